"""The process that runs code of the policy: it forks a process, closed in, for each piece of code.

It is a bare Python with the standard library, started by `trainer.sandbox.code_runner`. It reads requests from its
input, a line of JSON each: `{"number", "code"}`. For each it writes `{"number", "begun"}` when it runs the program, and
`{"number", "output", "left_out", "problem"}` when it has ended, or `{"number", "failed": why}` where the program could
not be closed in and has not run. After `{"cancel": number}` it ends a program. The first line of its output is
`{"ready": true}`, once an empty program has run, or `{"refused": why}`.
"""

from __future__ import annotations

import ast
import gc
import importlib
import io
import json
import linecache
import os
import selectors
import signal
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer.sandbox import isolation

_PRELOADED = """
bisect collections copy dataclasses datetime decimal fractions functools heapq itertools json math operator random re
statistics string textwrap time typing
"""
_MOST_OUTPUT = 1 << 20
"""Bytes after which the code is ended. Less is kept (see `CodeLimits.output`)."""
_FILE = "<code>"
_TRIAL, _TRIAL_S = -1, 60.0
"""The number of the empty program that runs first, and its seconds: those of the machine, not of a program."""
_CLOSED_IN = b"closed in"
_CPU_ERROR_S = 0.2
"""The kernel counts processor time for its limit less exactly than for its reports."""


def main(settings: dict[str, Any]) -> NoReturn:
    """Be the server. Its parent passes `CodeLimits`, the kind of isolation, directories, and modules to import."""
    isolation.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kind = isolation.Namespaces if settings["isolation"] == isolation.NAMESPACES else isolation.Landlock
    walls = kind(settings["directories"], settings["hidden"])
    try:
        _preload(settings["modules"])
        walls.enter()
        server = os.fork()  # the first process of the namespace: its end is the end of all others
        if server:
            os.close(0)
            os.close(1)
            os.waitpid(server, 0)
            os._exit(0)
        isolation.die_with_parent()
        memory = isolation.memory_in_use() + (settings["limits"]["memory_mb"] << 20)
        calls, nothing = isolation.SyscallFilter(walls.syscalls), os.open(os.devnull, os.O_RDONLY)
        walls.prepare()
    except (isolation.IsolationError, ImportError) as error:
        _send({"refused": str(error)})
        os._exit(1)
    gc.freeze()
    server = _Server(walls, settings)
    try:
        server.run()
    except _Forked as forked:
        request, output, report = forked.args
    del server  # with it go other programs that wait, or have printed something
    _be_program(request["code"], output, report, nothing, walls, calls, memory, settings["limits"])


def _preload(modules: Sequence[str]) -> None:
    for module in (*_PRELOADED.split(), *modules):
        importlib.import_module(module)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # whose seed is fixed for each program


def _send(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals, most of which have no name
        return f"signal {number}"


class _Forked(Exception):  # noqa: N818 - it is no error
    """Raised in the process of a program, to leave the frames of the server.

    Its arguments: the request, where it prints, and where it reports that it is closed in, or why not.
    """


class _Run:
    """A program that runs."""

    def __init__(self, number: int, process: int, output: int, report: int, deadline: float):
        self.number = number
        self.process = process
        self.ended = os.pidfd_open(process)
        self.output = output
        self.report = report
        self.text = bytearray()
        self.size = 0
        self.deadline = deadline
        self.problem = ""

    def end(self, problem: str) -> None:
        if not self.problem:
            self.problem = problem
            os.kill(self.process, signal.SIGKILL)

    def read(self) -> int:
        """Read a part of the output; return its size."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return 0
        self.size += len(data)
        self.text += data[: max(0, _MOST_OUTPUT - len(self.text))]
        return len(data)


class _Server:
    def __init__(self, walls: Any, settings: dict[str, Any]):
        self._walls = walls
        self._limits = settings["limits"]
        self._at_once = settings["at_once"]
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: list[_Run] = []
        self._unread = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> NoReturn:
        self._start({"number": _TRIAL, "code": ""}, _TRIAL_S)
        while True:
            while self._waiting and len(self._running) < self._at_once:
                request = self._waiting.popleft()
                self._start(request, self._limits["time_s"])
                _send({"number": request["number"], "begun": True})
            now = time.monotonic()
            nearest = min((run.deadline for run in self._running), default=None)
            for key, _ in self._selector.select(None if nearest is None else max(0.0, nearest - now)):
                if key.fd == 0:
                    self._take()
                elif key.fd == key.data.output:
                    self._read(key.data)
            for run in list(self._running):
                if run.deadline <= time.monotonic():
                    run.end("time")
                self._finish(run)

    def _take(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)  # and with this process, all that run
        *lines, rest = (self._unread + data).split(b"\n")
        self._unread = rest
        for message in map(json.loads, lines):
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self._waiting.append(message)

    def _cancel(self, number: int) -> None:
        """End a program, or forget it before it has begun."""
        self._waiting = deque(request for request in self._waiting if request["number"] != number)
        for run in self._running:
            if run.number == number:
                run.end("cancelled")

    def _read(self, run: _Run) -> None:
        if not run.read():
            self._selector.unregister(run.output)  # the code has closed it
        elif run.size > _MOST_OUTPUT:
            run.end("output")

    def _start(self, request: dict[str, Any], time_s: float) -> None:
        (output, end), (report, report_end) = os.pipe(), os.pipe()
        os.set_blocking(output, False)
        self._walls.before_fork()
        process = -1
        try:
            process = os.fork()
        finally:
            if process != 0:
                self._walls.after_fork()
        if process == 0:
            raise _Forked(request, end, report_end)
        os.close(end)
        os.close(report_end)
        run = _Run(request["number"], process, output, report, time.monotonic() + time_s)
        self._running.append(run)
        self._selector.register(output, selectors.EVENT_READ, run)
        self._selector.register(run.ended, selectors.EVENT_READ, run)

    def _finish(self, run: _Run) -> None:
        """Send the result of a run that has ended."""
        process, status, usage = os.wait4(run.process, os.WNOHANG)
        if process == 0:
            return
        while run.read():
            pass
        self._running.remove(run)
        for descriptor in (run.output, run.ended):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        with open(run.report, "rb") as file:
            said = file.read()
        problem = run.problem
        if not problem and os.WIFSIGNALED(status):
            problem = _signal_name(os.WTERMSIG(status))
            used = usage.ru_utime + usage.ru_stime + _CPU_ERROR_S
            if problem == "SIGKILL" and used >= self._limits["cpu_s"]:
                problem = "cpu"
        elif not problem and run.size > _MOST_OUTPUT:
            problem = "output"
        if said != _CLOSED_IN:
            why = said.removeprefix(_CLOSED_IN).decode(errors="replace") or problem or f"status {status}"
            self._answer(run.number, {"failed": f"a program could not be closed in: {why}"})
            return
        text = run.text.decode(errors="replace")
        kept = self._limits["output"]
        left_out = max(0, len(text) - kept)
        self._answer(run.number, {"output": text[:kept], "left_out": left_out, "problem": problem})

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        if number != _TRIAL:
            _send({"number": number, **answer})
            return
        why = answer.get("failed") or answer["problem"] or answer["output"]
        if why:
            _send({"refused": f"an empty program failed: {why}"})
            os._exit(1)
        _send({"ready": True})


def _be_program(
    code: str,
    output: int,
    report: int,
    nothing: int,
    walls: Any,
    calls: isolation.SyscallFilter,
    memory: int,
    limits: dict[str, Any],
) -> NoReturn:
    """Be the process of a program: close this process in, and run it."""
    try:
        isolation.die_with_parent()
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        walls.close_in(limits["files_mb"], limits["files"])
        report = os.dup2(report, 3)
        os.closerange(4, 1 << 16)
        isolation.drop_rights()
        isolation.limit_resources(limits["cpu_s"], memory, limits["files_mb"])
        calls.load()
        os.write(report, _CLOSED_IN)
        os.close(report)
    except BaseException as error:
        try:
            os.write(report, f"{type(error).__name__}: {error}"[:1000].encode(errors="replace"))
        finally:
            os._exit(70)
    status = 70
    try:
        status = execute(code)
    except MemoryError:
        os.write(2, b"MemoryError\n")
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def execute(code: str) -> int:
    """Run a program; print the value of an expression at its end. Return the exit status."""
    stream = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", errors="backslashreplace")
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = stream
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.argv = [""]
    sys.modules["random"].seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    status = 0
    try:
        tree = ast.parse(code, _FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _FILE, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status and not isinstance(error.code, int):
            print(error.code)
    except BaseException as error:
        status = 1
        stream.write("".join(_shown(traceback.TracebackException.from_exception(error)).format()))
    stream.flush()
    return status & 0xFF


def _shown(error: traceback.TracebackException) -> traceback.TracebackException:
    """Return an error with the lines of the code alone, without those of libraries on this machine."""
    error.stack = traceback.StackSummary.from_list(frame for frame in error.stack if frame.filename == _FILE)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _shown(other)
    return error
