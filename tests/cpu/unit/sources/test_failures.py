"""Rewards and environments that fail: what a step and an evaluation make of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.replies import FakeEngines, evaluator_beside, sampling_source
from tests.support.runs import configured, rollouts_of
from trainer.config import DataConfig, EnvironmentConfig, RewardConfig
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.transcripts import TranscriptLog

PROVEN_KEYS = {"environment.on_failure", "reward.on_failure"}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""

REWARD = """
def half(completion):
    # The place of the completion is its text.
    if FAILS and int(completion) in FAILS:
        raise TimeoutError("the judge is down")
    return int(completion) % 2 + int(completion) / 100
"""


class Engines(FakeEngines):
    """Completions of two digits, the place of the request."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        texts = [self._tokenizer.encode(f"{place:02}", add_special_tokens=False) for place in range(len(requests))]
        return [Completion(tokens, [-1.0] * len(tokens), "stop", 1) for tokens in texts]


class Step:
    """A step of three prompts with three completions each, of which those at the places `fails` have no reward."""

    def __init__(self, root: Path, model: str, fails: Sequence[int], estimator: str = "grpo", **reward: Any):
        root.mkdir()
        cfg = configured(root / "run", train_batch_size=3, mini_batch_size=3, val_interval=1)
        cfg.rollout.n, cfg.rollout.val_n = 3, 2
        cfg.logger.save_rollouts = True
        cfg.algorithm.advantage_estimator = estimator
        cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 9}, train_size=9, val_size=4)
        if reward.pop("environment", False):
            options = {"fails": list(fails), "at_reset": not fails}
            cfg.environment = EnvironmentConfig(name="failing_world:World", kwargs=options, **reward)
        else:
            cfg.reward = RewardConfig(name="failing_rewards:half", **{"max_error_rate": 1.0, **reward})
        (root / "failing_rewards.py").write_text(f"FAILS = {list(fails)}\n" + REWARD)
        (root / "failing_world.py").write_text(WORLD)
        log = TranscriptLog(cfg, lambda: None)
        with sampling_source(cfg, Engines(load_tokenizer(model)), model, estimator == "remax") as source:
            self.episodes: list[Episode] = source.next(1)
            self.metrics = source.add_metrics(1, {})
            self.row_rewards = [row.reward for row in source._trained[1].used]
            source.commit(1)
            log.add_step(1, self.episodes)
            self.shown = [sample.block() for sample in log.pop(1).get("training", [])]
            evaluator = evaluator_beside(source, model)
            for _ in range(2):
                evaluation = evaluator.evaluate(1)
                log.add_evaluation(1, evaluation)
        self.validation = evaluation.metrics
        self.lines = rollouts_of(root / "run", 1)
        self.held_out = [json.loads(line) for line in (root / "run/validation/step_1.jsonl").read_text().splitlines()]

    @property
    def rewards(self) -> list[float | None]:
        return [episode.reward for episode in self.episodes]


WORLD = """
from trainer.environments import StepResult

class World:
    first = {}

    def __init__(self, fails, at_reset=False):
        self.fails, self.at_reset = fails, at_reset

    def reset(self, row, seed):
        if self.at_reset and row == World.first.setdefault("row", row):
            raise RuntimeError("it broke")
        return [{"role": "user", "content": "?"}]

    def step(self, reply):
        if int(reply["content"]) in self.fails:
            raise RuntimeError("it broke")
        return StepResult(reward=int(reply["content"]) % 2 + int(reply["content"]) / 100, done=True)

    def close(self):
        pass
"""


@pytest.fixture
def step(tmp_path, model, monkeypatch):
    """Returns a function that makes a `Step`."""
    count = iter(range(100))

    def make(*fails: int, **settings: Any) -> Step:
        root = tmp_path / str(next(count))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            return Step(root, model, fails, **settings)

    return make


ALL = [place % 2 + place / 100 for place in range(9)]


def test_failed_rewards_are_left_out_or_count_as_0(step, caplog):
    """With `zero` a failure is a reward of 0; with `leave_out`, the default, it is none, and counts in no mean."""
    failed = [1, 3, 4, 5]
    left_out, zero = step(*failed), step(*failed, on_failure="zero")
    assert left_out.rewards == [None if place in failed else ALL[place] for place in range(9)]
    assert zero.rewards == [0.0 if place in failed else ALL[place] for place in range(9)]
    for found in (left_out, zero):
        reasons = [episode.failure for episode in found.episodes]
        assert [bool(reason) for reason in reasons] == [place in failed for place in range(9)]
        assert all("the judge is down" in reason for reason in reasons if reason)
        assert [line["failure"] for line in found.lines] == reasons
        assert [line["reward"] for line in found.lines] == found.rewards
        assert found.metrics["reward/failures"] == 4
        assert found.validation["val/failures"] == 2
    assert left_out.row_rewards == [pytest.approx(np.mean([0, 0.02])), None, pytest.approx(np.mean([0.06, 1.07, 0.08]))]
    assert zero.row_rewards == [pytest.approx(np.mean([0, 0, 0.02])), 0.0, pytest.approx(np.mean([0.06, 1.07, 0.08]))]
    assert left_out.metrics["reward/half/mean"] == pytest.approx(np.mean([0, 0.02, 0.06, 1.07, 0.08]))
    said = "4 of 9 rewards of step 1 (44.4%) failed and are left out; the first: raised TimeoutError: the judge is"
    assert said in caplog.text
    # Held out: four prompts, of which the greedy completions at the places 1 and 3 fail.
    assert left_out.validation["val/reward/mean"] == pytest.approx(0.01) and left_out.validation["val/accuracy"] == 0
    assert zero.validation["val/reward/mean"] == pytest.approx(0.005)
    # Two samples of each: (0, 1), (2, 3), (4, 5), (6, 7). Both rewards are known of the last prompt alone.
    assert left_out.validation["val/pass@2"] == 1 and zero.validation["val/pass@2"] == 0.25
    held_out = {(line["uid"], line["number"]): line for line in left_out.held_out}
    assert held_out["val:1", 0]["reward"] is None and held_out["val:1", 0]["failure"]
    assert held_out["val:0", 0]["reward"] == 0 and held_out["val:0", 0]["failure"] is None


@pytest.mark.parametrize("on_failure", ["leave_out", "zero"])
def test_an_environment_that_fails_after_a_reply_gives_a_reward_of_0(step, caplog, on_failure):
    """Else the policy could learn to leave an episode that goes badly, by an action that fails."""
    failed = [1, 3, 4, 5]
    found = step(*failed, environment=True, on_failure=on_failure)
    assert found.rewards == [0.0 if place in failed else ALL[place] for place in range(9)]
    assert [one.status for one in found.episodes] == ["failed" if place in failed else "stop" for place in range(9)]
    reasons = [one.failure for one in found.episodes]
    assert [line["failure"] for line in found.lines] == reasons and "it broke" in reasons[1]
    assert (found.metrics["environment/failures"], found.validation["val/failures"]) == (4, 2)
    assert found.validation["val/reward/mean"] == pytest.approx(0.005)
    assert "4 of 9 episodes of step 1 (44.4%) failed and " in caplog.text


def test_an_environment_that_fails_before_a_reply_is_left_out_or_counts_as_0(step, caplog):
    left_out, zero = (step(environment=True, on_failure=value) for value in ("leave_out", "zero"))
    for found, reward in ((left_out, None), (zero, 0.0)):
        failed = [episode for episode in found.episodes if episode.failure]
        assert [(one.reward, one.status, one.turns) for one in failed] == [(reward, "failed", 0)] * 3
        assert len({one.group for one in failed}) == 1 and found.metrics["environment/failures"] == 3
        assert sum(one is None for one in found.row_rewards) == (reward is None)
    assert "failed and have a reward of 0, or are left out if the policy had not replied; the first" in caplog.text


def test_a_baseline_that_failed_is_no_baseline(step):
    """The greedy completions of `remax` have the places 0 to 2."""
    left_out, zero = (step(1, estimator="remax", on_failure=value) for value in ("leave_out", "zero"))
    assert [episode.baseline for episode in left_out.episodes] == [0.0] * 3 + [None] * 3 + [0.02] * 3
    assert [episode.baseline for episode in zero.episodes] == [0.0] * 6 + [0.02] * 3


def test_an_evaluation_of_which_all_failed_has_no_mean(step, caplog):
    left_out = step(*range(9))
    assert left_out.validation == {"val/failures": 4.0}
    assert "the evaluation of step 1: no reward is known, so there is no val/reward/mean" in caplog.text
    assert "reward.success_threshold" not in caplog.text, "the largest of no rewards says nothing of the threshold"
    assert not any(name.startswith("reward/half") for name in left_out.metrics)


def test_too_many_failures_end_the_run_before_it_trains_on_them(step):
    assert step(8, max_error_rate=0.2).rewards[8] is None
    sentence = r"reward.max_error_rate=0.2: 2 of 9 rewards of step 1 \(22.2%\) failed \(the first: raised TimeoutErr"
    with pytest.raises(UserError, match=sentence):
        step(1, 8, max_error_rate=RewardConfig().max_error_rate)
