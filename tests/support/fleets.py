"""Engines that join a job of a test and leave it, as forks of a process that has imported everything."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.forks import ForkedCommand, fork_server
from tests.support.jobs import environment

TOKEN = "the token of this test"
LIMITS = "FLEET_POLL_S=0.1 FLEET_LEASE_S=5 SERVER_RETRY_S=0.1"
"""For `TRAINER_TIME_LIMITS`."""


class Crew:
    """Engines of the job in `run`: 2 to 6 of them.

    Args:
        every_s: seconds between two events. One engine is killed, another one joins, one is ended, another one joins.
    """

    def __init__(self, run: Path, every_s: float):
        self.run = run
        self.left: list[int] = []
        """Exit statuses of those that were ended."""
        self.killed = 0
        self._every_s = every_s
        self._engines: list[ForkedCommand] = []
        self._leaving: list[ForkedCommand] = []
        self._events = 0
        self._next = 0.0

    def join(self) -> ForkedCommand:
        """Start an engine."""
        with self.run.with_suffix(".engines.log").open("a") as output:
            engine = fork_server().start(
                *("tests.support.forks:run_module", "trainer", "engine", "--join", str(self.run)),
                cwd=self.run.parent,
                env=environment(),
                stdout=output,
            )
        self._engines.append(engine)
        return engine

    def disturb(self, _: int) -> None:
        """Let engines come and go. Called all the time while the job runs."""
        if not (self.run / ".engines/job.json").exists() or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        living = sum(engine.poll() is None for engine in self._engines)
        if living >= 2 and len(list((self.run / ".engines").glob("engine-*.json"))) < 2:
            return  # those that start would be the next to go, and on a slow machine none would ever serve
        event, self._events = self._events % 4, self._events + 1
        if len(self._engines) < 2:
            self._events = 0
            for _ in range(3):
                self.join()
        elif event % 2:
            self.join()
        elif event == 0:
            self._engines.pop(0).kill_group()
            self.killed += 1
        else:
            engine = self._engines.pop(0)
            engine.send_signal(signal.SIGTERM)
            self._leaving.append(engine)

    def kill(self) -> None:
        """Kill all that are left."""
        for engine in [*self._engines, *self._leaving]:
            if engine.poll() is None:
                engine.kill_group()

    def wait(self) -> None:
        """Wait until all have ended. Those that are there when the run ends do so by themselves; one that joins at this
        moment is refused."""
        assert {engine.wait(30) for engine in self._engines} <= {0, 2}
        self.left = [engine.wait(30) for engine in self._leaving]
