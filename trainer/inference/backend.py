"""The process of the engine of an inference server: started, watched, ended, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp
import psutil

from trainer.cluster.supervisor import adopt_orphans, end_all, is_running
from trainer.errors import WorkerError
from trainer.files.shared_memory import PrivateDirectory
from trainer.process import time_limits
from trainer.process.model_server import TOKEN
from trainer.process.network import use_network_of
from trainer.process.signals import SIGNALS
from trainer.sandbox.reaper import is_tracker

LOG = logging.getLogger(__name__)

_SERVE = "trainer.inference.vllm_server:serve"
_PREFIX = "trainer-inference-"
_FAILED_STARTS = 5  # starts in a row without an engine that served, after which the server ends
_PROMPT_TOKENS = 4096  # tokens of a prompt that an engine certainly reads within `SERVER_HANG_S`
_SEGMENT = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-)\w+)$", re.MULTILINE)
_LONGEST_SOCKET_PATH, _UUID_CHARS = 107, 37


def longest_pause_s(alive: Mapping[str, Any]) -> float:
    """Return after which time without a token an engine hangs that answers: longer while it reads a long prompt."""
    return time_limits.SERVER_HANG_S * (1 + alive["prompt"] / _PROMPT_TOKENS)


class Backend:
    """The engine's processes, which listen on a Unix socket in a directory of this user alone.

    A reaper is above them (`trainer.sandbox.reaper`): it ends them all when the API server dies, or this process.

    Args:
        settings: what the engine is built from: `model_path`, `name`, `rollout`, `device`, `seed`, `trust_remote_code`,
            `chat_template`, `chat_template_kwargs`, `deterministic` (`trainer.deterministic`); and `idle_check_s`,
            seconds between two looks at the processes of an idle engine.
        on_start: called when the engine has lost its weights, as a new one starts.
    """

    def __init__(self, settings: Mapping[str, Any], on_start: Callable[[], None]):
        self._settings = settings
        self._on_start = on_start
        parent = tempfile.gettempdir()
        if len(f"{parent}/{_PREFIX}{'x' * 16}/engine") > _LONGEST_SOCKET_PATH:
            parent = "/tmp"
        self._directory = PrivateDirectory(parent, _PREFIX, 8)
        self._socket = os.path.join(self._directory.path, "engine")
        self._process: subprocess.Popen[bytes] | None = None
        self.start_id = ""  # Names one start of the engine. Weights that were sent to another are lost.
        self.is_ready = False
        self._ever_served = False
        self._failed: str | None = None
        self._load_began: float | None = None
        self._segments: set[str] = set()  # shared memory of the processes, which a killed one leaves behind
        self.session: aiohttp.ClientSession
        adopt_orphans()  # they come here if the reaper is killed

    def fail(self, reason: str, start_id: str) -> None:
        """Let the engine be ended and started again, if this start of it still runs."""
        if start_id != self.start_id:
            return
        self.is_ready = False
        self._failed = self._failed or reason

    async def answers(self) -> bool:
        """Return whether the engine answers within `SERVER_HANG_S`."""
        return await self._alive(time_limits.SERVER_HANG_S, "/trainer/alive?now") is not None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Let the engine show no progress in this block, as long as a load of weights may take. One at a time."""
        self._load_began = time.monotonic()
        try:
            yield
        finally:
            self._load_began = None

    async def run(self, ready: Callable[[], None]) -> None:
        """Keep the engine running, until the task is cancelled.

        Args:
            ready: called each time the engine serves.

        Raises:
            WorkerError: the engine does not start.
        """
        failures = 0
        connector = aiohttp.UnixConnector(self._socket, limit=0, force_close=True)  # vLLM closes idle ones
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            "http://engine", connector=connector, timeout=timeout, auto_decompress=False
        ) as self.session:
            try:
                while True:
                    self._launch()
                    has_served, reason = await self._watch(ready)
                    await self._end()
                    failures = 0 if has_served else failures + 1
                    if failures and (failures == _FAILED_STARTS or not self._ever_served):
                        raise WorkerError(f"the engine of the inference server does not start: {reason}", "see above")
                    LOG.warning("%s; it is started again", reason)
                    await asyncio.sleep(min(time_limits.RESTART_LONGEST_DELAY_S, failures * 2.0**failures))
            finally:
                self.is_ready = False
                await self._end()
                self._directory.close()

    def _launch(self) -> None:
        self.start_id, self._failed = secrets.token_hex(8), None
        self._on_start()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._socket)
        arguments = os.path.join(self._directory.path, "settings.json")  # the command line of a process is public
        with open(arguments, "w") as file:
            json.dump([self._socket, self._settings], file)
        null = os.open(os.devnull, os.O_RDWR)
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import json; from trainer.sandbox.reaper import main; "
            f"main({os.getpid()}, {null}, {_SERVE!r}, json.load(open(sys.argv[1])))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[null],
            env=_environment(self._directory.path),
            start_new_session=True,  # only this process handles signals
        )
        os.close(null)

    async def _watch(self, ready: Callable[[], None]) -> tuple[bool, str]:
        """Watch one process until it has failed. Return whether it has served, and what happened."""
        assert self._process is not None
        deadline, has_served, seen, moved_at = time.monotonic() + time_limits.SERVER_START_S, False, None, 0.0
        while True:
            self._segments |= _mapped_segments(self._process.pid)
            if self._failed is not None:
                return has_served, f"the engine has failed ({self._failed})"
            if (status := self._process.poll()) is not None:
                self.is_ready = False
                return has_served, f"the engine has exited (status {status})"
            was_loading = self._load_began is not None
            limit_s = time_limits.SERVER_HANG_S if has_served else time_limits.SERVER_POLL_S
            alive = await self._alive(limit_s)
            now = time.monotonic()
            is_loading = was_loading or self._load_began is not None
            is_overdue = self._load_began is not None and now - self._load_began > time_limits.SERVER_START_S
            if is_loading:
                moved_at = now
            if alive is not None:
                if alive["progress"] != seen or not alive["busy"]:
                    seen, moved_at = alive["progress"], now
                if not has_served:
                    has_served = self._ever_served = self.is_ready = True
                    ready()
            is_stuck = not is_loading and (alive is None or now - moved_at > longest_pause_s(alive))
            if has_served and (is_overdue or is_stuck) and self._process.poll() is None:
                self.is_ready = False
                doing = "while it loads weights" if is_overdue else f"for {time_limits.SERVER_HANG_S:g} s"
                return True, f"the engine makes no progress {doing}"
            if not has_served and now > deadline:
                return False, f"the model is not loaded after {time_limits.SERVER_START_S:g} s"
            await asyncio.sleep(time_limits.SERVER_POLL_S if has_served else time_limits.POLL_INTERVAL_S)

    async def _alive(self, limit_s: float, path: str = "/trainer/alive") -> dict[str, Any] | None:
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            async with self.session.get(path, timeout=timeout) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _end(self) -> None:
        """End the processes of the engine: politely, so that they free their shared memory, then by force."""
        process, self._process, self.is_ready = self._process, None, False
        if process is None:
            return
        below = _below(process.pid)
        self._segments |= _mapped_segments(process.pid)
        for one in below:
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGTERM)
                one.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + time_limits.SERVER_STOP_S
        while any(map(is_running, below)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        process.terminate()
        process.send_signal(signal.SIGCONT)
        while process.poll() is None and time.monotonic() < deadline + time_limits.SERVER_STOP_S:
            await asyncio.sleep(0.05)
        kept = (process.pid, SIGNALS.watching_process)
        orphans = _below(os.getpid())  # of a reaper that was killed
        end_all([one for one in [*below, *orphans] if one.pid not in kept and is_running(one) and not is_tracker(one)])
        if process.poll() is None:
            process.kill()
        process.wait()
        for one in below:  # orphans have become children of this process
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)
        for path in self._segments:
            with contextlib.suppress(OSError):
                os.remove(path)
        self._segments.clear()


def _environment(directory: str) -> dict[str, str]:
    """Return the environment of the engine, whose processes reach each other on this machine alone."""
    # Keys are the front's matter: the front passes none on.
    environment = {name: value for name, value in os.environ.items() if name not in (TOKEN, "VLLM_API_KEY")}
    use_network_of("127.0.0.1", environment)
    if len(directory) < _LONGEST_SOCKET_PATH - _UUID_CHARS:
        environment.setdefault("VLLM_RPC_BASE_PATH", directory)  # others cannot enter it
    return environment


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _mapped_segments(pid: int) -> set[str]:
    """Return the paths of the shared memory that the processes below `pid` have made. Its names are random."""
    found: set[str] = set()
    for process in _below(pid):
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps") as file:
            found.update(_SEGMENT.findall(file.read()))
    return found
