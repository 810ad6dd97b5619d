"""The attempts of an agent: which failures give it another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.agents.runner import AgentSession
from trainer.sandbox.pool import CallFailed, CallLost

RESULT = {"reward": 1.0, "rewards": {"a": 0.5}, "metrics": {}, "player_rewards": {}}


class Scene:
    """A session, what it has begun and ended, and what its process answers: values, or exceptions to raise."""

    def __init__(self, *answers: Any, limit: str = "", idle_s: float = 0.0):
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.messages: list[Any] = []
        self.alone: list[bool] = []
        self._answers = list(answers)
        self._limit, self._idle_s = limit, idle_s
        self.cancelled = 0
        self.session = AgentSession({"x": 1}, 5, 60.0, self._begin, self.ended.append, "0:0")
        asyncio.run(self.session.run(self))  # type: ignore[arg-type]

    def _begin(self) -> Any:
        number = len(self.begun)
        self.begun.append(
            SimpleNamespace(
                base_url=f"http://x/{number}",
                secret=str(number),
                rules=SimpleNamespace(model="policy"),
                limit=self._limit,
                start_clock=lambda: None,
                idle_s=lambda: self._idle_s,
            )
        )
        return self.begun[-1]

    async def ask(self, call: Any) -> Any:
        self.messages.append(call.message)
        self.alone.append(call.is_alone)
        if self._idle_s:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def outcome(self) -> tuple[str, str]:
        return self.session.status, self.session.failure


def test_an_agent_is_called_with_its_endpoint_and_a_result_ends_the_episode():
    scene = Scene(RESULT)
    endpoint = {"base_url": "http://x/0", "api_key": "0", "model": "policy", "episode_id": "0:0"}
    assert [message[1:] for message in scene.messages] == [["run", {"x": 1}, 5, endpoint]]
    assert scene.outcome == ("stop", "") and scene.session.result.reward == 1.0


@pytest.mark.parametrize("limit", ["turns", "length"])
def test_an_agent_that_meets_a_limit_ends_with_its_status(limit):
    """Whether it returns a result, or raises."""
    scene = Scene(RESULT, limit=limit)
    assert scene.outcome == (limit, "") and scene.session.result.rewards == {"a": 0.5}
    other = Scene(CallFailed("raised", "raised BadRequestError"), limit=limit)
    assert other.outcome == (limit, "") and other.session.result.reward == 0
    assert other.session.error == "raised BadRequestError"


@pytest.mark.parametrize("status, expected", [("raised", "failed"), ("died", "failed"), ("timeout", "timeout")])
def test_a_failure_gives_another_attempt_at_another_address(status, expected):
    scene = Scene(CallFailed(status, "was bad"), RESULT)
    assert scene.outcome == ("stop", "") and scene.ended == scene.begun[:1]
    assert scene.messages[1][4]["base_url"] == "http://x/1"
    scene = Scene(CallFailed(status, "was bad"), CallFailed(status, "was bad"))
    assert scene.session.status == expected and scene.session.failure.startswith("run ")
    assert scene.session.result is None


def test_a_process_that_another_has_ended_costs_nothing():
    scene = Scene(*[CallLost()] * 4, CallLost(is_suspect=True), RESULT)
    assert scene.outcome == ("stop", "") and scene.ended == scene.begun[:-1] and len(scene.begun) == 6
    assert scene.alone == [False] * 5 + [True]


def test_an_agent_that_is_late_is_ended_and_gets_another_attempt():
    scene = Scene(idle_s=61.0)
    assert scene.cancelled == len(scene.messages) == 2 and scene.ended == scene.begun[:1]
    assert scene.outcome == ("timeout", "run took longer than environment.timeout_s=60")


def test_what_is_no_result_fails_the_agent():
    large = {**RESULT, "reward": 9e11, "rewards": {"a": 9e11}}
    assert Scene(large).outcome == ("failed", "gave rewards that add up to 1.8e+12, beyond 1e+12")
    for value in (None, {}, {"reward": 1, "rewards": {}, "metrics": {}}):
        assert Scene(value).outcome == ("failed", "has written into the pipe of its process")
