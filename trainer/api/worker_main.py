"""`python -m trainer.api.worker_main`: the process of a run that `trainer.train` has started."""

from __future__ import annotations

from trainer.process.signals import HANDLED, SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

import hashlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.cluster.supervisor import signal_on_death_of_parent
from trainer.config import Config
from trainer.config.command_line import Job, run_to_end
from trainer.config.tasks import add_task
from trainer.errors import UserError
from trainer.files.atomic_io import write_file
from trainer.files.redaction import redact_text
from trainer.files.uris import absolute
from trainer.process.log_setup import LOG_FILE, guard_output, logging_to_file, show_messages
from trainer.run.next_command import PASSED_FUNCTIONS
from trainer.run.state import OnStep

_DIRECTORY = "functions"
_MODULE = '''"""A function that was passed to `trainer.train`, as cloudpickle has written it."""

import pathlib

import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())
'''


def job_of(pickles: Mapping[str, tuple[str, bytes]], report: Callable[..., None], on_step: OnStep | None) -> Job:
    """Return the job of a run from Python, which reports its paths first. `pickles`: of functions passed by value."""
    if passed := pickles.get("task"):  # the config names it before there is a directory for its module
        add_task(f"{PASSED_FUNCTIONS}.task:{passed[0]}", lambda: pickle.loads(passed[1]))

    def job(config: Config) -> float | None:
        t = config.trainer
        paths = {name: absolute(getattr(t, name)) for name in ("run_dir", "ckpt_path", "export_path")}
        metric, mode = config.compared_by
        report(**paths, best_metric=metric, best_mode=mode)
        write_functions(t.run_dir, pickles)
        from trainer.main import train

        return train(config, on_step)

    return job


def write_functions(run_dir: str, pickles: Mapping[str, tuple[str, bytes]]) -> None:
    """Write pickled functions into the run directory, and let this process and all that it starts import them."""
    if not pickles:
        return
    digest = hashlib.sha256(repr(sorted(pickles.items())).encode()).hexdigest()[:16]
    root = os.path.abspath(os.path.join(run_dir, _DIRECTORY, digest))
    package = os.path.join(root, PASSED_FUNCTIONS)
    try:
        os.makedirs(package, exist_ok=True)
        os.chmod(os.path.join(run_dir, _DIRECTORY), 0o700)  # the functions hold what they have captured
        for parameter, (name, data) in pickles.items():
            write_file(os.path.join(package, f"{parameter}.pkl"), data)
            write_file(os.path.join(package, f"{parameter}.py"), _MODULE.format(name=name))
    except OSError as error:
        raise UserError(f"trainer.run_dir={run_dir}: cannot be written ({error.strerror}); choose another") from error
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


def main() -> NoReturn:
    """Run what the parent asks for on stdin, tell it the outcome there, and end with the command line's status."""
    signal_on_death_of_parent(signal.SIGKILL)  # the run is safe, and its lock is free for the next start
    parent = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    message = parent.recv()
    if os.getppid() != message["parent"]:  # it died before that took effect
        os._exit(1)
    sys.orig_argv += message["overrides"]

    def report(**content: Any) -> None:
        parent.send(content)

    def on_step(metrics: dict[str, float]) -> bool:
        report(metrics={name: int(value) if name == "step" else float(value) for name, value in metrics.items()})
        while not parent.poll(1.0):
            SIGNALS.check()  # the user's function may take long, as with a breakpoint
        return parent.recv()

    guard_output()
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # the parent has blocked them
        job = job_of(message["pickles"], report, on_step if message["asks"] else None)
        outcome = run_to_end(job, message["overrides"])
        LOG_FILE.write(outcome.shown)  # the parent shows it
        report(text=redact_text(outcome.trace or outcome.text), signal=SIGNALS.first)
        outcome.exit()


if __name__ == "__main__":
    main()
