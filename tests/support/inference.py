"""Inference servers for tests: real ones, in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.forks import fork_server
from tests.support.jobs import command_of, environment
from trainer.config import RolloutConfig
from trainer.generation.server_engine import ServerEngine
from trainer.generation.server_protocol import Job
from trainer.process.model_server import TOKEN as VARIABLE

TOKEN = "a token that has 30 characters"
ROLLOUT = ["rollout.max_prompt_tokens=300", "rollout.max_response_tokens=64", "rollout.max_num_seqs=64"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@functools.cache
def http_client() -> httpx.Client:
    """The client of this process: another one for each request would take 40 ms to be made."""
    return httpx.Client(timeout=60, trust_env=False)


class Server:
    """A server, as a fork of a process that has imported everything. A context manager.

    It fails if the server leaves processes behind.
    """

    def __init__(self, log: Path, *overrides: str, port: int = 0, token: str | None = None, limits: str = ""):
        self.port, self.token, self.log = port or free_port(), token, log
        self.url = f"http://127.0.0.1:{self.port}"
        self._overrides, self._limits = overrides, limits
        self.start()

    def start(self) -> None:
        env = {name: value for name, value in environment().items() if name != VARIABLE}
        env |= {VARIABLE: self.token} if self.token else {}
        env |= {"TRAINER_TIME_LIMITS": self._limits}
        with open(self.log, "a") as output:
            self.process = fork_server().start(
                *("tests.support.forks:run_module", "trainer.inference"),
                *(f"inference.port={self.port}", *self._overrides),
                cwd=Path.cwd(),
                env=env,
                stdout=output,
            )

    def status(self) -> dict[str, Any]:
        return http_client().get(f"{self.url}/trainer/status", headers=self.headers).json()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def wait(self, state: str = "ready") -> Server:
        for _ in range(1500):
            with contextlib.suppress(httpx.TransportError):
                if self.status()["state"] == state:
                    return self
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def engine(self) -> list[psutil.Process]:
        """The reaper, and below it the processes of the engine."""
        children = psutil.Process(self.process.pid).children()
        reaper = next(child for child in children if "reaper" in command_of(child))
        return [reaper, *reaper.children(recursive=True)]

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family() if self.process.poll() is None else []
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(family, 120)[1], "processes are left"


def job(run: str = "a", start: int = 1, owner: str = "", engine: int = 0) -> Job:
    """A start of a run. Each test has runs of its own: a server remembers who has left."""
    identity = f"{run} in {os.environ.get('PYTEST_CURRENT_TEST')}"
    return Job(identity, start, f"run {run} {start}", engine, owner or os.urandom(8).hex())


@contextlib.contextmanager
def engine(url: str, user: Job | None = None, **options: Any) -> Iterator[ServerEngine]:
    """An engine of a job that uses the server at `url`."""
    settings = {"max_prompt_tokens": 300, "max_response_tokens": 64, "max_num_seqs": 64}
    rollout = RolloutConfig(engine="server", urls=[url], **(settings | options))
    one = ServerEngine("", dtype="auto", seed=1, rollout=rollout, device="cpu", index=0, job=user or job())
    try:
        yield one
    finally:
        one.shutdown()


@contextlib.contextmanager
def answering(answers: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the same answer to each request to a path, and `{}` where there is none. Yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            answer = answers.get(self.path, b"{}")
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()
