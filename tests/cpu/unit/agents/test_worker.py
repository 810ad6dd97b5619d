"""Agents in their process: how they are called, and what they may return."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from typing import Any

import pytest

from trainer.environments import AgentResult
from trainer.environments.worker import EnvironmentHandler, WrongValueError
from trainer.sandbox import limits

ENDPOINT = {"base_url": "http://127.0.0.1:1/episodes/x/v1", "api_key": "x", "model": "policy"}


@pytest.fixture(autouse=True)
def _proxies(monkeypatch):
    """What an agent's process sets for itself ends with the test."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")


def handler_of(name: str, **options: Any) -> EnvironmentHandler:
    return EnvironmentHandler(name, options, 3.0, 0)


def run(value: Any, name: str = "tests.support.agents:Returns") -> dict[str, Any]:
    handler = handler_of(name)
    return asyncio.run(handler.compute([0, "run", {"value": value}, 3, ENDPOINT]))


@pytest.mark.parametrize(
    "value, reward, rewards, metrics",
    [
        (2, 2.0, {}, {}),
        (True, 1.0, {}, {}),
        ({"reward": 0.5, "rewards": {"a": 1}, "metrics": {"x/y": 2}}, 0.5, {"a": 1.0}, {"x/y": 2.0}),
    ],
)
def test_an_agent_returns_a_result_or_a_number(value, reward, rewards, metrics):
    assert run(value) == {"reward": reward, "rewards": rewards, "metrics": metrics, "player_rewards": {}}


def test_what_is_no_result_is_refused():
    for value, problem in [
        (None, "it must be a trainer.environments.AgentResult or a number, not None"),
        ("1", "not '1'"),
        (float("nan"), "or a number, not nan"),
        ({"reward": float("inf")}, r"\(in agents.py:\d+\): reward is inf"),
        ({"rewards": {"a b": 1}}, "rewards: returned a term called 'a b'"),
        ({"rewards": 3}, "rewards are a int, not a dict"),
        ({"metrics": {"turns": 1}}, "metrics: turns is counted for every episode"),
        ({"metrics": {"samples": 1}}, "metrics: samples is counted for every episode"),
    ]:
        with pytest.raises(WrongValueError, match=problem):
            run(value)


def test_an_error_in_init_is_not_that_of_run():
    handler, call = handler_of("tests.support.agents:Returns", wrong=1), [0, "run", {"value": 1}, 3, ENDPOINT]
    with pytest.raises(Exception) as raised:
        asyncio.run(handler.compute(call))
    assert handler.describe(raised.value, call).startswith("was not called, because __init__ raised TypeError: ")


class Async:
    async def run(self, row: Any, seed: int, endpoint: Any) -> AgentResult:
        return AgentResult(float(seed), metrics={"key": len(endpoint.variables["OPENAI_BASE_URL"])})


def test_an_agent_may_be_async():
    assert run(1, f"{__name__}:Async") == {
        "reward": 3.0,
        "rewards": {},
        "metrics": {"key": 32.0},
        "player_rewards": {},
    }


@pytest.mark.parametrize("known", ["", "example.org,localhost"])
def test_agents_reach_the_host_of_their_endpoint_without_a_proxy(monkeypatch, known):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, known)
    handler = handler_of("tests.support.agents:Returns")
    for _ in range(2):
        there = {**ENDPOINT, "base_url": "http://10.0.0.5:8123/episodes/x/v1"}
        asyncio.run(handler.compute([0, "run", {"value": 1}, 3, there]))
    found = os.environ["NO_PROXY"].split(",")
    assert sorted(found) == sorted({*filter(None, known.split(",")), "127.0.0.1", "localhost", "10.0.0.5"})
    assert os.environ["no_proxy"].split(",") == found


class Waits:
    def run(self, row: Any, seed: int, endpoint: Any) -> float:
        BEGUN.put(None)
        return float(EVENT.wait(60))


BEGUN: queue.SimpleQueue[None] = queue.SimpleQueue()
EVENT = threading.Event()


def test_a_process_with_many_threads_of_late_agents_must_end(monkeypatch):
    """Threads that have ended do not count."""
    monkeypatch.setattr(limits, "THREADS_LEFT", 2)

    async def late(handler: EnvironmentHandler, number: int) -> None:
        call = asyncio.ensure_future(handler.compute([number, "run", {}, 3, ENDPOINT]))
        await asyncio.wait_for(asyncio.to_thread(BEGUN.get), 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    async def several() -> None:
        handler = handler_of(f"{__name__}:Waits")
        await late(handler, 1)
        assert not handler.must_end and len(handler._threads._left) == 1
        EVENT.set()
        while handler._threads._left:
            await asyncio.sleep(0.01)
        EVENT.clear()
        await late(handler, 2)
        assert not handler.must_end
        await late(handler, 3)
        assert handler.must_end
        EVENT.set()

    asyncio.run(several())
