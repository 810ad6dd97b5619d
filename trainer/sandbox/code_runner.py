"""Runs code of the policy, in processes that are closed in (see `trainer.sandbox.isolation`)."""

from __future__ import annotations

import asyncio
import functools
import glob
import itertools
import json
import math
import os
import select
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trainer
from trainer.errors import UserError
from trainer.sandbox import isolation
from trainer.sandbox.call_clock import uncounted

ISOLATIONS = (isolation.NAMESPACES, isolation.LANDLOCK)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_AT_ONCE = 8
_START_S = 120.0
"""Seconds that the server may take to start, with its imports."""
_SPARE_S, _OVERHEAD_S = 60.0, 1.0
"""Seconds that the start of a program may take, besides the programs before it; and those of each of them, besides its
own."""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All environment variables that the code sees."""
MAX_CODE = 1 << 20
"""Most characters of a piece of code."""


@dataclass(frozen=True)
class CodeLimits:
    """What one piece of code may use."""

    cpu_s: int = 5
    """Seconds of processor time."""
    time_s: float = 20.0
    """Seconds in all."""
    memory_mb: int = 512
    """MiB of memory, besides what Python has."""
    files_mb: int = 16
    """MiB of all its files together."""
    files: int = 64
    """Number of files and directories."""
    output: int = 4000
    """Characters of its output that are kept."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int) or (name == "time_s" and isinstance(value, float) and math.isfinite(value))
            if isinstance(value, bool) or not number or value <= 0:
                raise UserError(f"{name}={value!r}: give a {'' if name == 'time_s' else 'whole '}number above 0")


@dataclass(frozen=True)
class CodeResult:
    """What a piece of code has printed, and how it ended."""

    output: str
    """What it has printed, errors included."""
    left_out: int
    """Characters of the output that are not kept."""
    problem: str
    """Why it was ended: `cpu`, `time`, `output`, or the name of a signal. Empty: it ended by itself."""


class _Program:
    """A program that the server has got."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """It runs, or never will."""
        self.result: asyncio.Future[CodeResult] = asyncio.get_running_loop().create_future()


class CodeRunner:
    """A server that runs code, each piece in a fresh process. It starts with the first piece, and again if it is lost.

    Args:
        kind: one of `ISOLATIONS`.
        modules: packages beside the standard library that the code may import. They are imported once, before.
        at_once: pieces of code that run at the same time. The others wait.
    """

    def __init__(
        self,
        limits: CodeLimits | None = None,
        kind: str = isolation.NAMESPACES,
        modules: Sequence[str] = (),
        at_once: int | None = None,
    ):
        if kind not in ISOLATIONS:
            raise UserError(f"isolation={kind}: choose {' or '.join(ISOLATIONS)}")
        directories = _directories(bool(modules))
        self._settings = {
            "limits": asdict(limits or CodeLimits()),
            "isolation": kind,
            "modules": list(modules),
            "directories": directories,
            "hidden": _hidden(directories, _packages() if modules else []),
            "at_once": at_once or min(_AT_ONCE, os.cpu_count() or 1),
        }
        self._path = _standard_library() + (_packages() if modules else [])
        self._numbers = itertools.count()
        self._server: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: dict[int, _Program] = {}
        self._unread, self._unsent = b"", bytearray()

    def start(self) -> None:
        """Start the server, unless it runs.

        Raises:
            UserError: code cannot be isolated here, a module cannot be imported, or an empty program fails.
        """
        if self._server is not None and self._server.poll() is None:
            return
        self.close()
        root = os.path.dirname(os.path.dirname(trainer.__file__))
        code = (
            f"import sys, json; sys.path[:] = {self._path!r}; sys.path.append({root!r}); "
            "from trainer.sandbox.code_server import main; sys.path.pop(); "
            f"main(json.loads({json.dumps(self._settings)!r}))"
        )
        self._server = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        ready = select.poll()
        ready.register(self._server.stdout, select.POLLIN)
        if not ready.poll(_START_S * 1000):
            modules = self._settings["modules"]
            answer = {"refused": f"its server did not start within {_START_S:g} s, with the imports of {modules}"}
        elif first := self._server.stdout.readline():
            answer = json.loads(first)
        else:
            answer = {"refused": f"its server ended with status {self._server.wait()}"}
        if "refused" in answer:
            self.close()
            isolation = self._settings["isolation"]
            raise UserError(f"code of the policy cannot run with isolation={isolation}: {answer['refused']}")
        assert self._server.stdin is not None
        os.set_blocking(self._server.stdin.fileno(), False)

    async def run(self, code: str) -> CodeResult:
        """Run code as a program, in an empty directory, and return what it has printed.

        The time in which other programs run first does not count as time of the call (see `uncounted`). If this is
        cancelled, the program is ended.

        Raises:
            UserError: see `start`.
            RuntimeError: the server was lost or does not begin the program, or the program could not be closed in and
                has not run.
        """
        if len(code) > MAX_CODE:
            return CodeResult("", 0, "size")
        self._listen()
        number, program = next(self._numbers), _Program()
        self._awaited[number] = program
        try:
            self._send({"number": number, "code": code})
            with uncounted():
                await self._turn_of(program)
            return await program.result
        finally:
            del self._awaited[number]
            if not program.result.done() or program.result.cancelled():
                self._cancel(number)

    async def _turn_of(self, program: _Program) -> None:
        """Wait until the programs before this one have ended, but not longer than they may take."""
        rounds = len(self._awaited) / self._settings["at_once"] + 1
        limit_s = rounds * (self._settings["limits"]["time_s"] + _OVERHEAD_S) + _SPARE_S
        try:
            await asyncio.wait_for(program.begun.wait(), limit_s)
        except TimeoutError as error:
            raise RuntimeError(f"the server that runs code has not begun a program within {limit_s:g} s") from error

    def _send(self, message: dict[str, Any]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """Send what the server takes now. It may first wait until its own answers are read."""
        assert self._loop is not None and self._server is not None and self._server.stdin is not None
        try:
            del self._unsent[: self._server.stdin.write(self._unsent) or 0]
        except BrokenPipeError:  # it has ended; `_read` learns that too
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._server.stdin.fileno(), self._write)
        else:
            self._loop.remove_writer(self._server.stdin.fileno())

    def _cancel(self, number: int) -> None:
        """End a program that nobody waits for any more. It may not have begun."""
        if self._server is not None:
            self._send({"cancel": number})

    def _listen(self) -> None:
        """Let the event loop that runs now read the answers."""
        before = self._server
        self.start()
        loop = asyncio.get_running_loop()
        if self._server is not before or loop is not self._loop:
            assert self._server is not None and self._server.stdout is not None
            self._loop = loop
            loop.add_reader(self._server.stdout.fileno(), self._read)

    def _read(self) -> None:
        assert self._loop is not None and self._server is not None and self._server.stdout is not None
        data = os.read(self._server.stdout.fileno(), 1 << 20)
        if not data:
            self.close()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            program = self._awaited.get(answer.pop("number"))
            if program is None or program.result.done():
                continue
            program.begun.set()
            if "failed" in answer:
                program.result.set_exception(RuntimeError(answer["failed"]))
            elif "begun" not in answer:
                program.result.set_result(CodeResult(**answer))

    def close(self) -> None:
        """End the server, and the code that it runs."""
        server, self._server, self._unread, self._unsent = self._server, None, b"", bytearray()
        if server is None:
            return
        assert server.stdin is not None and server.stdout is not None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(server.stdout.fileno())
            self._loop.remove_writer(server.stdin.fileno())
        self._loop = None
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()
        for program in self._awaited.values():
            if not program.result.done():
                program.begun.set()
                program.result.set_exception(RuntimeError("the server that runs code has ended"))


@functools.cache
def shared_runner(limits: CodeLimits, kind: str, modules: tuple[str, ...]) -> CodeRunner:
    """Return the runner of this process with these settings: all environments of a process share it."""
    return CodeRunner(limits, kind, modules)


def _standard_library() -> list[str]:
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    return [library, os.path.realpath(sysconfig.get_config_var("DESTSHARED") or os.path.join(library, "lib-dynload"))]


def _packages() -> list[str]:
    return list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _directories(with_packages: bool) -> list[str]:
    """Return what the code may read, without directories that are within others."""
    found = [*_LIBRARIES, *_standard_library(), *(_packages() if with_packages else [])]
    found = sorted({path for path in found if os.path.isdir(path)})
    return [path for path in found if not any(path.startswith(f"{other}/") for other in found if other != path)]


def _hidden(directories: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Return the directories of packages within `directories`, without those in `shown`."""
    roots = {os.path.realpath(path) for path in directories}
    places = [os.path.join(glob.escape(root), part) for root in roots for part in ("", "python3*")]
    found = {os.path.realpath(path) for place in places for path in glob.glob(os.path.join(place, "*-packages"))}
    return sorted(
        path for path in found - set(shown) if os.path.isdir(path) and any(path.startswith(f"{r}/") for r in roots)
    )
