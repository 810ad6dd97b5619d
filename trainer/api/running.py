"""`train`: a run from Python.

Without `in_process`, the run is a process of its own (`trainer.api.worker_main`), with the command line's code from its
first line to its last. So it computes the same bits as the command line, and neither torch, Ray, signal handlers,
logging nor random states of the caller can meet those of the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from trainer.api.results import RunResult, describe_result
from trainer.config.tasks import TASKS, TaskSpec
from trainer.errors import UserError, describe_error
from trainer.process.log_setup import logging_to_file, showing_messages
from trainer.process.signals import EXIT_STATUS, HANDLED, SIGNALS, Stopped
from trainer.run.next_command import PASSED_FUNCTIONS, PYTHON_RUN
from trainer.run.state import OnStep

Function = Callable[..., Any] | str
Pickles = dict[str, tuple[str, bytes]]
"""Name and pickle of each function that no module holds, by the parameter of `train`."""
_KEYS = {
    "reward": "reward.name",
    "advantage_estimator": "algorithm.advantage_estimator",
    "policy_loss": "algorithm.policy_loss",
    "curriculum": "data.curriculum",
    "environment": "environment.name",
    "task": "trainer.task",
}
"""The parameters of `train` that take functions, and the config key of each."""

_IN_PROCESS = ("trainer.ray_address=this_process", "trainer.num_workers=1", "trainer.device=cpu")
_ENGINE = ("rollout.engine=transformers", "rollout.num_engines=1")


class RunStopped(Exception):
    """A signal or `trainer.deadline` stopped the run early.

    The same call with `trainer.resume_mode=latest` continues it. `result` is what the run has left
    behind so far; None if it had not begun.
    """

    def __init__(self, text: str, result: RunResult | None):
        super().__init__(text)
        self.result = result


class RunFailed(RuntimeError):
    """The run failed, and not through a mistake of the user. The text is what the command line would have printed."""


def train(
    overrides: Sequence[str] = (),
    *,
    reward: Function | Sequence[Function] | None = None,
    advantage_estimator: Function | None = None,
    policy_loss: Function | None = None,
    curriculum: Function | None = None,
    environment: type | Function | None = None,
    task: TaskSpec | str | None = None,
    on_step: OnStep | None = None,
    in_process: bool = False,
) -> RunResult:
    """Do what `trainer train OVERRIDES` does, and return the result of the run.

    Works in scripts, with or without a `__main__` guard, and in notebooks. SIGTERM, SIGUSR1 and Ctrl-C let the run
    finish its step, save and stop. If this process is killed, the run ends with it.

    A function of a module is imported where it is used. Any other function is copied, with all that it refers to.

    Args:
        overrides: `KEY=VALUE` or `GROUP=CHOICE`, as on the command line.
        reward: a function for `reward.name`, or its name, or a list of them.
        advantage_estimator: a function for `algorithm.advantage_estimator`, or its name.
        policy_loss: a function for `algorithm.policy_loss`, or its name.
        curriculum: a function for `data.curriculum`, or its name.
        environment: a class for `environment.name`, or its name.
        task: for `trainer.task`: `rl`, `sft`, `dpo`, `rm`, an import path, or a `trainer.tasks.TaskSpec`.
        on_step: called in this process with the metrics of each finished step and its `step`, while the run waits. If
            it returns something true, or raises, the run saves and stops after this step; `train` then returns a result
            whose `status` is `stopped`, or raises the exception.
        in_process: for breakpoints. Driver, one rank and the transformers engine are this process, on the CPU. It
            computes the same bits. What fails raises its own exception, and no `RunFailed`.

    Raises:
        UserError: the command line would have ended with status 2: the message says what to change.
        RunStopped: a signal or `trainer.deadline` stopped the run, and it was saved; or a second signal stopped it
            without a save; or the run could no longer end itself, and was killed by its watch.
        RunFailed: the run failed.
    """
    functions = {name: value for name, value in locals().items() if name in _KEYS and value is not None}
    words, pickles = _words(overrides, functions)
    if in_process:
        idle = [f"trainer.task={name}" for name, spec in TASKS.items() if not spec.generates]
        generates = task.generates if isinstance(task, TaskSpec) else not set(idle) & set(words)
        return _run_here([*_IN_PROCESS, *(_ENGINE if generates else ()), *words], pickles, on_step)
    return _conclude(*_run(words, pickles, on_step))


def _conclude(reports: Sequence[Mapping[str, Any]], status: int, stops: bool = False) -> RunResult:
    """Return the result of a run whose process has ended with `status`, or raise what `train` raises."""
    paths = reports[0] if reports and "run_dir" in reports[0] else None
    text = reports[-1].get("text", "") if reports else ""
    if status == 0 and paths is not None:
        return describe_result(paths, "finished")
    if status == EXIT_STATUS and stops and paths is not None and reports[-1].get("signal", "") is None:
        return describe_result(paths, "stopped")
    if status == EXIT_STATUS:
        text = text or "stopped by signals, without cleaning up"
        raise RunStopped(text, paths and describe_result(paths, "stopped"))
    if status == 2 and text:
        raise UserError(text)
    if status < 0:
        text = f"its process was killed by {signal.Signals(-status).name}, perhaps because memory ran out"
    raise RunFailed(text or f"its process ended with status {status}")


def _run_here(words: list[str], pickles: Pickles, on_step: OnStep | None) -> RunResult:
    """Run in this process, and leave its environment, log and signal handlers as they were."""
    import torch

    from trainer.api.worker_main import job_of
    from trainer.config.command_line import run_words

    paths: dict[str, Any] = {}
    ends: list[BaseException | None] = []  # what `on_step` has raised; None: it has returned something true

    def step(metrics: dict[str, float]) -> bool:
        assert on_step is not None
        try:
            if on_step(metrics):
                ends.append(None)
        except BaseException as error:
            ends.append(error)
        return bool(ends)

    environment, threads = dict(os.environ), torch.get_num_threads()
    try:
        with showing_messages(), SIGNALS.listening(), logging_to_file():
            run_words(job_of(pickles, paths.update, step if on_step else None), words)
    except Stopped as reason:
        if ends and ends[0] is not None:
            raise ends[0] from None
        if not ends:
            raise RunStopped(str(reason), paths and describe_result(paths, "stopped")) from None
        return describe_result(paths, "stopped")
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
    return describe_result(paths, "finished")


def _words(overrides: Sequence[str], functions: Mapping[str, Any]) -> tuple[list[str], Pickles]:
    """Return the overrides, checked, with those for the functions; and the pickles."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides={overrides!r}: must be a list of texts such as 'algorithm=ppo'")
    for override in overrides:
        if override.startswith("-") or "=" not in override and not override.startswith("~"):
            raise UserError(f"{override}: must be KEY=VALUE; flags such as -m are for the command line")
    words, pickles = list(overrides), Pickles()
    for parameter, function in functions.items():
        key = _KEYS[parameter]
        if any(override.lstrip("+").startswith(f"{key}=") for override in overrides):
            raise UserError(f"{key}: the overrides and {parameter}= both set it; leave one of them out")
        several = parameter == "reward" and isinstance(function, (list, tuple))
        parts = {f"{parameter}_{i}": part for i, part in enumerate(function)} if several else {parameter: function}
        paths = []
        for name, part in parts.items():
            path, data = describe_function(name, part)
            paths.append(path)
            if data is not None:
                pickles[name] = (path.rpartition(":")[2], data)
        words.append(f"{key}=[{','.join(paths)}]" if several else f"{key}={path}")
    return words, pickles


def describe_function(parameter: str, function: Callable[..., Any] | str) -> tuple[str, bytes | None]:
    """Return the import path of a function, and its pickle if no module holds it.

    A function of a script or a notebook, which no other process can import, travels by value: the process of the run
    writes the pickle into the run directory, as a module that can be imported.

    Raises:
        UserError: `function` is no function, or it holds something that other processes cannot get.
    """
    if isinstance(function, str):
        return function, None
    if not callable(function) and not isinstance(function, TaskSpec):
        raise UserError(f"{parameter}: must be a function or the name of one, not {type(function).__name__}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    spec = getattr(sys.modules.get(module or ""), "__spec__", None)
    if module != "__main__" and spec is not None and getattr(sys.modules[module], name, None) is function:
        return f"{module}:{name}", None
    plain = getattr(function, "__name__", "")
    plain = plain if plain.isidentifier() else parameter  # a lambda, or an object with `__call__`
    import cloudpickle

    try:
        return f"{PASSED_FUNCTIONS}.{parameter}:{plain}", cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"{parameter}={plain}: other processes cannot get this function ({describe_error(error)}); let it open or "
            "make what it needs when it is called, or move it to a module"
        ) from error


def _run(words: list[str], pickles: Pickles, on_step: OnStep | None) -> tuple[list[dict[str, Any]], int, bool]:
    """Run the child to its end; returns its reports, its exit status, and whether `on_step` has asked for the end."""
    own, others = multiprocessing.Pipe()
    reports, stops = [], False
    with own, _child(others) as process:

        def print_all() -> None:
            for line in process.stdout or ():
                print(line.decode("utf-8", "replace"), end="", flush=True)

        printing = threading.Thread(target=print_all)
        printing.start()
        try:
            own.send({"overrides": words, "pickles": pickles, "asks": on_step is not None, "parent": os.getpid()})
            while True:
                report = own.recv()
                if on_step is None or "metrics" not in report:
                    reports.append(report)
                    continue
                is_last = True  # also if `on_step` raises: the child saves and stops
                try:
                    is_last = stops = bool(on_step(report["metrics"])) or stops
                finally:
                    own.send(is_last)
        except (EOFError, ConnectionError):  # the child has ended
            pass
        finally:
            printing.join()
            status = process.wait()
    return reports, status, stops


@contextlib.contextmanager
def _child(stdin: Connection) -> Iterator[subprocess.Popen]:
    """Start the process of a run, and pass signals on to it while the block runs.

    The child starts with the signals blocked, and unblocks them once it handles them. On another thread than the main
    thread, which cannot handle signals, it gets none.
    """
    # A notebook, or a test, has put something else in place of the terminal.
    replaced = sys.stdout is not sys.__stdout__
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_own_paths())}
    handled = HANDLED if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in handled}
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        with stdin:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", PYTHON_RUN],  # all users of the machine can read this line
                stdin=stdin.fileno(),
                stdout=subprocess.PIPE if replaced else None,
                stderr=subprocess.STDOUT if replaced else None,
                env=environment | ({"PYTHONIOENCODING": "utf-8"} if replaced else {}),
                start_new_session=True,  # Ctrl-C reaches it once, from here
            )
        for number in handled:
            signal.signal(number, lambda received, _: process.send_signal(received))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)  # signals that have come meanwhile are handled here
    try:
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_paths() -> list[str]:
    """Return the directories from which this process imports, besides those that every Python has."""
    stock = {*site.getsitepackages(), site.getusersitepackages()}
    stock |= {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    stock.add(os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload"))
    paths = [os.path.abspath(path) for path in sys.path]  # an empty one is the working directory
    return [path for path in dict.fromkeys(paths) if path not in stock and os.path.exists(path)]
