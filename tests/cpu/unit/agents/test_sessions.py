"""The attempts of an agent: which failures give it another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.generation import SAMPLED
from trainer.agents.sessions import AgentSession, Cancellation
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import RolloutRequest
from trainer.sandbox.process import ProcessDied

RESULT = {"reward": 1.0, "rewards": {"a": 0.5}, "metrics": {}}


class Scene:
    """A session, in a process, and what it has begun and ended."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.noted: list[AgentSession] = []
        request = RolloutRequest(Prompt(0, (), "", "", {"x": 1}), "0:0", 1, 0, SAMPLED)
        self.session = AgentSession(request, 5, 60.0, self._begin, self.ended.append)
        self.session.on_rest = self.noted.append
        self.send()

    def _begin(self, request: RolloutRequest) -> Any:
        number = len(self.begun)
        rules = SimpleNamespace(model="policy")
        episode = SimpleNamespace(
            base_url=f"http://x/{number}", secret=str(number), rules=rules, limit="", start_clock=lambda: None
        )
        self.begun.append(episode)
        return episode

    def send(self) -> Any:
        """Do as the pool does to make the next call."""
        self.session.worker = "process"
        call = self.session.next_call()
        if call is None:
            self.session.rest()
        return call

    def lose_process(self) -> None:
        self.session.worker = None
        self.session.restart()

    @property
    def outcome(self) -> tuple[str, str]:
        return self.session.status, self.session.failure


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_agent_is_called_with_its_endpoint(scene):
    assert scene.send()[1:] == ["run", {"x": 1}, 5, {"base_url": "http://x/0", "api_key": "0", "model": "policy"}]


def test_a_result_ends_the_episode(scene):
    assert scene.session.take(RESULT) is False
    assert scene.send() is None and scene.noted == [scene.session]
    assert scene.outcome == ("stop", "") and scene.session.result.reward == 1.0


@pytest.mark.parametrize("limit", ["turns", "length"])
def test_an_agent_that_meets_a_limit_ends_with_its_status(scene, limit):
    """Whether it returns a result, or raises."""
    other = Scene()
    scene.begun[0].limit = other.begun[0].limit = limit
    scene.session.take(RESULT)
    assert scene.outcome == (limit, "") and scene.session.result.rewards == {"a": 0.5}
    other.session.record_failure("raised", "raised BadRequestError")
    assert other.outcome == (limit, "") and other.session.result.reward == 0
    assert other.session.error == "raised BadRequestError"


@pytest.mark.parametrize("status, expected", [("raised", "failed"), ("died", "failed"), ("timeout", "timeout")])
def test_a_failure_gives_another_attempt_at_another_address(scene, status, expected):
    scene.session.record_failure(status, "was bad")
    assert scene.outcome == ("", "") and scene.ended == scene.begun[:1]
    assert scene.send()[4]["base_url"] == "http://x/1"
    scene.session.record_failure(status, "was bad")
    assert scene.session.status == expected and scene.session.failure.startswith("run ")
    assert scene.session.result is None and scene.send() is None


def test_a_process_that_another_has_ended_costs_nothing(scene):
    for _ in range(5):
        scene.lose_process()
        assert scene.send()[4]["base_url"] == f"http://x/{len(scene.begun) - 1}"
    assert scene.outcome == ("", "") and scene.ended == scene.begun[:-1]


def test_an_agent_that_is_late_is_ended_and_gets_another_attempt(scene):
    for attempt in range(2):
        cancellation = scene.session.cancellation()
        assert scene.session.cancellation() is None, "it is ended already"
        assert cancellation.next_call() == [scene.session.attempt, "cancel"]
        assert cancellation.worker == "process" and cancellation.next_call() == [scene.session.attempt, "cancel"]
        cancellation.take({})
        assert cancellation.next_call() is None and cancellation.worker is None
        scene.session.record_failure("raised", "raised CancelledError")
        if attempt == 0:
            assert scene.send() is not None
    assert scene.outcome == ("timeout", "run took longer than environment.timeout_s=60")
    assert scene.session.cancellation() is None


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_process_that_does_not_end_a_late_agent_is_replaced(scene, is_alone):
    """That counts as one failure."""
    for attempt in range(2):
        assert scene.session.cancellation().next_call() is not None
        scene.lose_process()
        if is_alone:  # the pool blames it
            scene.session.record_failure("timeout", "took longer")
        if attempt == 0:
            assert scene.outcome == ("", "") and scene.send() is not None
    assert scene.outcome == ("timeout", "run took longer than environment.timeout_s=60")


def test_an_agent_may_have_no_further_attempt(scene):
    scene.session.cancellation("was not done after environment.max_seconds=5", is_last=True).next_call()
    scene.session.record_failure("raised", "raised CancelledError")
    assert scene.outcome == ("timeout", "run was not done after environment.max_seconds=5")


def test_the_seconds_of_an_episode_count_from_its_first_attempt(scene):
    first = scene.session.first_began_at
    assert first is not None and first == scene.session.began_at
    scene.session.record_failure("raised", "was bad")
    assert scene.session.began_at is None
    scene.send()
    assert scene.session.began_at > first == scene.session.first_began_at


def test_an_attempt_that_has_ended_is_not_cancelled(scene):
    cancellation = scene.session.cancellation()
    scene.lose_process()
    assert cancellation.next_call() is None
    scene.send()
    other = scene.session.cancellation()
    scene.session.take(RESULT)
    assert isinstance(other, Cancellation) and other.next_call() is None
    assert scene.outcome == ("stop", "")


def test_rewards_that_are_too_large_fail_the_agent(scene):
    assert scene.session.take({"reward": 9e11, "rewards": {"a": 9e11}, "metrics": {}}) is True
    assert scene.outcome == ("failed", "gave rewards that add up to 1.8e+12, beyond 1e+12")


@pytest.mark.parametrize("value", [None, {}, {"reward": 1, "rewards": {}, "metrics": {}}])
def test_an_answer_that_is_none_of_the_handler_ends_the_process(scene, value):
    with pytest.raises(ProcessDied):
        scene.session.take(value)
