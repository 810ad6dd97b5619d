"""Tests that start processes of Python: jobs, ranks, engines of vLLM, Ray, commands, or sandboxes of user code.

They get the mark `processes` at the collection, by what they and their fixtures call, and so do whole runs in the
process of the test. `make check` leaves them out. A test without the mark that starts such a process fails.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

import pytest

MARK = "processes"
_STARTERS = {
    "trainer.agents.runner:AgentRunner",
    "trainer.api.running:train",
    "trainer.cluster.fork_server:ForkServer",
    "trainer.cluster.process_cluster:ProcessCluster",
    "trainer.cluster.ray_cluster:RayCluster",
    "trainer.cluster.ray_head:RayHead",
    "trainer.environments.episode_runner:EnvironmentRunner",
    "trainer.environments.episode_runner:EnvironmentPool",
    "trainer.jobs:run_task",
    "trainer.rewards.scoring:RewardPool",
    "trainer.sandbox.pool:WorkerPool",
    "trainer.sandbox.process:SandboxedProcess",
    "trainer.sandbox.programs:ProgramSandbox",
    "trainer.sources.trials:try_rewards",
    "trainer.sources.trials:try_sources",
}
"""What starts processes outside of `tests`."""
_NAMES = {"executable", "get_context", "_PROGRAM"}
"""Names by which tests start processes themselves: `sys.executable`, a command that begins with it, and
`multiprocessing.get_context("spawn")`."""
_running: list[pytest.Item] = []
"""The test that runs, if it must not start processes of Python."""


def add_marks(items: Collection[pytest.Item]) -> None:
    """Mark the tests that start processes of Python, and whole runs."""
    for item in items:
        fixtures = [fixture.func for group in item._fixtureinfo.name2fixturedefs.values() for fixture in group]
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        values = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
        is_job = {"jobs", "kills", "loop", "release"} & set(item.path.parts[-2:])
        if is_job or any(map(_starts_processes, [item.function, *fixtures, *values])):
            item.add_marker(MARK)
        if item.path.parts[-2] == "release":
            item.add_marker("release")


@functools.cache
def _starts_processes(function: Any) -> bool:
    return _reaches_a_starter(function, {})


def _reaches_a_starter(thing: Any, seen: dict[int, Any]) -> bool:
    """Return whether a function, a class or a collection of them names a starter, itself or through others of ours."""
    thing = inspect.unwrap(getattr(thing, "func", thing))
    if id(thing) in seen:
        return False
    seen[id(thing)] = thing  # and keep it, or another object may get its id
    if isinstance(thing, (dict, list, tuple)):
        values = thing.values() if isinstance(thing, dict) else thing
        return any(_reaches_a_starter(value, seen) for value in values if callable(value))
    name = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    if name in _STARTERS:
        return True
    if not name.startswith("tests."):
        return False
    if inspect.isclass(thing):
        return any(_reaches_a_starter(member, seen) for member in vars(thing).values() if inspect.isfunction(member))
    if not inspect.isfunction(thing):
        return False
    names = set(_names(thing.__code__))
    return bool(names & _NAMES) or any(_reaches_a_starter(thing.__globals__.get(name), seen) for name in names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def watch(item: pytest.Item) -> None:
    """From now on, `item` runs: fail it when it starts a process of Python without the mark."""
    _running[:] = [] if item.get_closest_marker(MARK) else [item]


def refuse_processes(event: str, arguments: tuple) -> None:
    """Fail the running test if this event of `sys.audit` is the start of a process that it must not start."""
    if event != "subprocess.Popen" or not _running:
        return
    words = [os.fsdecode(word) for word in arguments[1]] if isinstance(arguments[1], (list, tuple)) else []
    program = os.fsdecode(arguments[0] or words[0])
    is_python = os.path.basename(program).startswith(("python", os.path.basename(sys.executable)))
    if is_python:
        pytest.fail(
            f"{_running[0].nodeid} starts a process of Python ({' '.join(words[1:4])[:80]}), and `make check` runs "
            f"only tests that start none; mark it with @pytest.mark.{MARK}",
            pytrace=False,
        )
