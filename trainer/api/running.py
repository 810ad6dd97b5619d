"""`train`: a run from Python.

The run is a process of its own (`trainer.api.worker_main`), with the command line's code from its first line to its
last. So it computes the same bits as the command line, and neither torch, Ray, signal handlers, logging nor random
states of the caller can meet those of the run.

A function of a module travels to the processes of the run as its import path. A function of a script or a notebook,
which no other process can import, travels by value: cloudpickle writes it into a private directory, as a module that
can be imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainer.api.results import RunResult, describe_result
from trainer.config.tasks import TaskSpec
from trainer.errors import UserError, describe_error
from trainer.process.signals import EXIT_STATUS, HANDLED
from trainer.run.next_command import PASSED_FUNCTIONS, PYTHON_RUN
from trainer.run.state import OnStep

Function = Callable[..., Any] | str
_KEYS = {
    "reward": "reward.name",
    "advantage_estimator": "algorithm.advantage_estimator",
    "policy_loss": "algorithm.policy_loss",
    "curriculum": "data.curriculum",
    "environment": "environment.name",
    "task": "trainer.task",
}
"""The parameters of `train` that take functions, and the config key of each."""


_MODULE = '''"""A function that was passed to `trainer.train`, as cloudpickle has written it."""

import pathlib

import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())
'''


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

    Raises:
        UserError: the command line would have ended with status 2: the message says what to change.
        RunStopped: a signal or `trainer.deadline` stopped the run, and it was saved; or a second signal stopped it
            without a save; or the run could no longer end itself, and was killed by its watch.
        RunFailed: the run failed.
    """
    given = {"reward": reward, "advantage_estimator": advantage_estimator, "policy_loss": policy_loss}
    given |= {"curriculum": curriculum, "environment": environment, "task": task}
    functions = {name: value for name, value in given.items() if value is not None}
    overrides, pickles = _with_functions(_checked(overrides), functions)
    with tempfile.TemporaryDirectory(prefix="trainer-functions-") as directory:
        write_functions(directory, pickles)
        return _conclude(*_run(overrides, directory, on_step))


def _conclude(reports: Sequence[Mapping[str, Any]], status: int, stops: bool = False) -> RunResult:
    """Return the result of a run whose process has ended with `status`, or raise what `train` raises.

    Args:
        reports: what the process has reported: its paths first, the reason of its end last.
        stops: the caller's `on_step` has asked for the end.
    """
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


def _checked(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides={overrides!r}: must be a list of texts such as 'algorithm=ppo'")
    for override in overrides:
        if override.startswith("-") or "=" not in override and not override.startswith("~"):
            raise UserError(f"{override}: must be KEY=VALUE; flags such as -m are for the command line")
    return list(overrides)


def _with_functions(overrides: list[str], functions: dict[str, Any]) -> tuple[list[str], dict[str, tuple[str, bytes]]]:
    """Return the overrides with those for the functions, and the pickles of functions that no module holds."""
    pickles = {}
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
        overrides = [*overrides, f"{key}=[{','.join(paths)}]" if several else f"{key}={path}"]
    return overrides, pickles


def describe_function(parameter: str, function: Callable[..., Any] | str) -> tuple[str, bytes | None]:
    """Return the import path of a function, and its pickle if no module holds it.

    Args:
        parameter: of `train`, for the import path and for errors.
        function: a name or an import path is returned as it is.

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
    return f"{PASSED_FUNCTIONS}.{parameter}:{plain}", _pickled(function, parameter, plain)


def _pickled(function: Callable[..., Any], parameter: str, name: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"{parameter}={name}: other processes cannot get this function ({describe_error(error)}); let it open or "
            "make what it needs when it is called, or move it to a module"
        ) from error


def write_functions(directory: str, pickles: Mapping[str, tuple[str, bytes]]) -> None:
    """Write pickled functions as modules that a process with `directory` in its PYTHONPATH can import.

    Args:
        pickles: for each parameter of `train`, the name of the function and its pickle.
    """
    package = os.path.join(directory, PASSED_FUNCTIONS)
    os.mkdir(package)
    for parameter, (name, data) in pickles.items():
        for ending, content in (("pkl", data), ("py", _MODULE.format(name=name).encode())):
            with open(os.path.join(package, f"{parameter}.{ending}"), "wb") as file:
                file.write(content)


def _run(overrides: list[str], functions: str, on_step: OnStep | None) -> tuple[list[dict[str, Any]], int, bool]:
    """Run the child to its end; returns its reports, its exit status, and whether `on_step` has asked for the end.

    Args:
        functions: directory of the modules of functions that were passed by value.
    """
    own, others = socket.socketpair()
    # A notebook, or a test, has put something else in place of the terminal.
    replaced = sys.stdout is not sys.__stdout__
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([functions, *_own_paths()])}
    reports, stops = [], False
    with _signals_to_child() as send_to, own:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", PYTHON_RUN],  # all users of the machine can read this line
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if replaced else None,
                stderr=subprocess.STDOUT if replaced else None,
                pass_fds=[others.fileno()],
                env=environment | ({"PYTHONIOENCODING": "utf-8"} if replaced else {}),
                start_new_session=True,  # Ctrl-C reaches it once, from here
            )
            descriptor = others.fileno()  # the same number in the child
        finally:
            others.close()
        send_to(process)
        message = {"overrides": overrides, "asks": on_step is not None}
        message |= {"reports": descriptor, "parent": os.getpid()}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(message).encode())
        printing = threading.Thread(target=_print, args=(process.stdout or (),))
        printing.start()
        try:
            for line in own.makefile("rb"):
                report = json.loads(line) if line.endswith(b"\n") else {}
                if on_step is None or "metrics" not in report:
                    reports.append(report)
                    continue
                stops |= bool(on_step(report["metrics"]))
                with contextlib.suppress(OSError):  # the child has died
                    own.sendall(b"1" if stops else b"0")
        finally:
            own.shutdown(socket.SHUT_WR)  # if `on_step` has raised, the child saves and stops
            printing.join()
            status = process.wait()
        return reports, status, stops


def _print(lines: Iterable[bytes]) -> None:
    for line in lines:
        print(line.decode("utf-8", "replace"), end="", flush=True)


@contextlib.contextmanager
def _signals_to_child() -> Iterator[Callable[[subprocess.Popen], None]]:
    """Pass signals on to the child while the block runs. Yields a function that names the child.

    The child starts with the signals blocked, and unblocks them once it handles them. On another thread than the main
    thread, which cannot handle signals, the child gets none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda process: None
        return
    processes: list[subprocess.Popen] = []

    def forward(number: int, _: object) -> None:
        for process in processes:
            process.send_signal(number)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    before = {number: signal.signal(number, forward) for number in HANDLED}

    def send_to(process: subprocess.Popen) -> None:
        processes.append(process)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # signals that have come meanwhile are handled here

    try:
        yield send_to
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_paths() -> list[str]:
    """Return the directories from which this process imports, besides those that every Python has."""
    stock = {*site.getsitepackages(), site.getusersitepackages()}
    stock |= {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    stock.add(os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload"))
    paths = [os.path.abspath(path) for path in sys.path]  # an empty one is the working directory
    return [path for path in dict.fromkeys(paths) if path not in stock and os.path.exists(path)]
