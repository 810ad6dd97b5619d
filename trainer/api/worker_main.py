"""`python -m trainer.api.worker_main`: the process of a run that `trainer.train` has started."""

from __future__ import annotations

from trainer.process.signals import HANDLED, SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

from trainer.cluster.supervisor import signal_on_death_of_parent
from trainer.config import Config
from trainer.config.command_line import run_to_end
from trainer.files.redaction import redact_text
from trainer.files.uris import absolute
from trainer.process.log_setup import LOG_FILE, guard_output, logging_to_file, show_messages


def main() -> NoReturn:
    """Run what the parent asks for on stdin, tell it the outcome, and end with the status of the command line."""
    signal_on_death_of_parent(signal.SIGKILL)  # the run is safe, and its lock is free for the next start
    message = json.load(sys.stdin)
    if os.getppid() != message["parent"]:  # it died before that took effect
        os._exit(1)
    os.set_inheritable(message["reports"], False)
    sys.orig_argv += message["overrides"]

    def report(**content: Any) -> None:
        os.write(message["reports"], json.dumps(content, default=float).encode() + b"\n")

    def on_step(metrics: dict[str, float]) -> bool:
        report(metrics=metrics)
        while not select.select([message["reports"]], [], [], 1.0)[0]:
            SIGNALS.check()  # the user's function may take long, as with a breakpoint
        return os.read(message["reports"], 1) != b"0"  # empty: the user's function has raised

    def job(config: Config) -> float | None:
        t, (metric, mode) = config.trainer, config.compared_by
        paths = {name: absolute(getattr(t, name)) for name in ("run_dir", "ckpt_path", "export_path")}
        report(**paths, best_metric=metric, best_mode=mode)
        from trainer.main import train

        return train(config, on_step if message["asks"] else None)

    guard_output()
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # the parent has blocked them
        outcome = run_to_end(job, message["overrides"])
        LOG_FILE.write(outcome.shown)  # the parent shows it
        report(text=redact_text(outcome.trace or outcome.text), signal=SIGNALS.first)
        outcome.exit()


if __name__ == "__main__":
    main()
