"""Agents in their process: how they are called, and what they may return."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from trainer.agents.worker import AgentHandler
from trainer.environments import AgentResult
from trainer.sandbox import limits

ENDPOINT = {"base_url": "http://127.0.0.1:1/episodes/x/v1", "api_key": "x", "model": "policy"}


def run(value: Any, name: str = "tests.support.agents:Returns") -> dict[str, Any]:
    handler = AgentHandler(name, {})
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
    assert run(value) == {"reward": reward, "rewards": rewards, "metrics": metrics}


@pytest.mark.parametrize(
    "value, problem",
    [
        (None, "run must return a trainer.environments.AgentResult or a number, not None"),
        ("1", "not '1'"),
        (float("nan"), "run must return"),
        ({"reward": float("inf")}, "reward: is inf"),
        ({"rewards": {"a b": 1}}, "rewards: returned a term called 'a b'"),
        ({"rewards": 3}, "rewards: are a int, not a dict"),
        ({"metrics": {"turns": 1}}, "metrics: turns is counted for every episode"),
        ({"metrics": {"samples": 1}}, "metrics: samples is counted for every episode"),
    ],
)
def test_what_is_no_result_is_refused(value, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        run(value)


class Async:
    cancelled = 0

    async def run(self, row: Any, seed: int, endpoint: Any) -> AgentResult:
        while row["value"] in ("wait", "stay"):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                Async.cancelled += 1
                if row["value"] == "wait" or Async.cancelled > 1:
                    raise
        return AgentResult(float(seed), metrics={"key": len(endpoint.variables["OPENAI_BASE_URL"])})


def test_an_agent_may_be_async():
    assert run(1, f"{__name__}:Async") == {"reward": 3.0, "rewards": {}, "metrics": {"key": 32.0}}


@pytest.mark.parametrize("known", ["", "example.org,localhost"])
def test_agents_reach_the_host_of_their_endpoint_without_a_proxy(monkeypatch, known):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, known)
    handler = AgentHandler("tests.support.agents:Returns", {})
    for _ in range(2):
        there = {**ENDPOINT, "base_url": "http://10.0.0.5:8123/episodes/x/v1"}
        asyncio.run(handler.compute([0, "run", {"value": 1}, 3, there]))
    found = os.environ["NO_PROXY"].split(",")
    assert sorted(found) == sorted({*filter(None, known.split(",")), "127.0.0.1", "localhost", "10.0.0.5"})
    assert os.environ["no_proxy"].split(",") == found


def test_an_agent_can_be_ended(monkeypatch):
    monkeypatch.setattr(Async, "cancelled", 0)

    async def both() -> None:
        handler = AgentHandler(f"{__name__}:Async", {})
        call = asyncio.ensure_future(handler.compute([7, "run", {"value": "wait"}, 3, ENDPOINT]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await handler.compute([8, "cancel"]) == {}
        assert not call.done()
        assert await handler.compute([7, "cancel"]) == {}
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await handler.compute([7, "cancel"]) == {} and not handler.must_end

    asyncio.run(both())
    assert Async.cancelled == 1


def test_a_process_with_an_agent_that_goes_on_when_it_is_cancelled_must_end(monkeypatch):
    monkeypatch.setattr(Async, "cancelled", 0)
    monkeypatch.setattr(limits, "CANCEL_S", 0.01)

    async def cancel() -> None:
        handler = AgentHandler(f"{__name__}:Async", {})
        call = asyncio.ensure_future(handler.compute([7, "run", {"value": "stay"}, 3, ENDPOINT]))
        await asyncio.sleep(0.01)
        assert await handler.compute([7, "cancel"]) == {} and handler.must_end
        call.cancel()

    asyncio.run(cancel())
