"""The processes of a job by their role."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from tests.support import jobs
from tests.support.inheriting_fork_server import InheritingForkServer
from trainer.cluster.fork_server import run_fork_server

_SANDBOXED = {
    "trainer.rewards.worker:RewardHandler": "reward",
    "trainer.environments.worker:EnvironmentHandler": "environment",
}
_MEMBERS = ("engine ", "rank ", "policy rank")


class DetachedForkServer(InheritingForkServer):
    """A fork server that is a fork of this process in its own session, like the fork server of a real job."""

    def _start(self, remote, preload: Sequence[str], env) -> psutil.Process:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            self._connection.close()
            run_fork_server(remote.fileno(), preload)
        return psutil.Process(child)


def run(*arguments: str) -> None:
    """Do what `trainer arguments` does, in this process, whose ranks and engines are forks of it."""
    from tests.support import inheriting_fork_server
    from tests.support.forks import run_module

    inheriting_fork_server.InheritingForkServer = DetachedForkServer  # type: ignore[misc]
    run_module("trainer", *arguments)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return jobs.family(pid)
    return []


def with_role(processes: Iterable[psutil.Process], role: str) -> list[psutil.Process]:
    """Those of the processes that have a role: `rank`, `engine`, `reward`, `environment` or `launcher`.

    A process of user code comes after its reaper. With Ray, ranks and engines are not told apart.
    """
    found = [process for process in processes if role in _roles_of(process)]
    return sorted(found, key=lambda process: process.pid)


def _roles_of(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.Error, OSError):
        name = _name(process)
        command = " ".join(process.cmdline())
        if "ray::Host" in command:
            return {"rank", "engine"}
        if name.startswith(_MEMBERS):
            return {"engine" if name.startswith("engine ") else "rank"}
        for serve, role in _SANDBOXED.items():
            if serve in command:
                return {role}
        if any(_name(child).startswith(_MEMBERS) for child in process.children()):
            return {"launcher"}
    return set()


def _name(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()
