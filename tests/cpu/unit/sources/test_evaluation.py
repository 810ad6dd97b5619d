"""The metrics of an evaluation, and the completions that they cover."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.replies import evaluator_beside, source_of
from trainer.config import Config, RewardConfig, ValSetConfig
from trainer.episodes import Episode, Sample
from trainer.generation.engine import Sampling
from trainer.metrics.estimates import means_of, row_values
from trainer.models.tokenizer import load_tokenizer
from trainer.seeding import request_seed
from trainer.sources.evaluation import LossEvaluator
from trainer.sources.routes import make_routes
from trainer.sources.transcripts import TranscriptLog

GREEDY = {"p0": "a", "p1": "bbb", "p2": "cccc"}
"""The reward is the length: of the three, two reach the threshold of 3, one of them exactly."""
SAMPLED = {"p0": ("ddd", "e"), "p1": ("f", "ff"), "p2": ("g", "gg")}


def reply(prompt: str, number: int, sampling: Sampling) -> str:
    return GREEDY[prompt] if sampling.temperature == 0.0 else SAMPLED[prompt][number]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_evaluation_is_greedy_and_pass_at_k_is_sampled(tmp_path, model, temperature):
    with source_of(tmp_path, model, reply, validation=3) as source:
        cfg = source.cfg
        cfg.rollout.val_n, cfg.rollout.temperature, cfg.rollout.top_p = 2, temperature, 0.9
        cfg.reward.success_threshold, cfg.logger.samples = 3.0, 3
        evaluation = evaluator_beside(source, model).evaluate(7)
        metrics, engines = evaluation.metrics, source.rollouts.engines
        greedy, sampled = engines.samplings
        assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)
        assert (sampled.temperature, sampled.top_p) == (temperature or 1.0, 0.9), "greedy completions are all equal"
        uids = [f"val:{i}" for i in range(3)]
        expected = [request_seed(cfg.trainer.seed, 7, uid, 0) for uid in uids]
        expected += [request_seed(cfg.trainer.seed, 7, uid, 1 + j) for uid in uids for j in range(2)]
        assert engines.seeds == expected and len(set(expected)) == 9
    assert metrics["val/reward/mean"] == pytest.approx((1 + 3 + 4) / 3)
    assert metrics["val/accuracy"] == pytest.approx(2 / 3), "a reward at the threshold is a success"
    assert metrics["val/pass@2"] == pytest.approx(1 / 3), "of the prompts, not of their first and second completions"
    log = TranscriptLog(cfg, lambda: None)
    log.add_evaluation(7, evaluation)
    assert {sample.number for sample in log.pop(7)["validation"]} == {0}, "people see greedy completions"
    assert log.pop(7) == {}
    assert written(tmp_path / "run/validation/step_7.jsonl") == [
        *((uid, 0, f"p{i}", GREEDY[f"p{i}"]) for i, uid in enumerate(uids)),
        *((uid, 1 + j, f"p{i}", SAMPLED[f"p{i}"][j]) for i, uid in enumerate(uids) for j in range(2)),
    ]


def written(path: Path) -> list[tuple[str, int, str, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["step"] == 7 and line["reward"] == len(line["completion"][0]["content"]) for line in lines)
    return [
        (line["uid"], line["number"], line["prompt"][-1]["content"], line["completion"][0]["content"]) for line in lines
    ]


def with_sets(cfg: Config) -> None:
    """Add two sets of the first two prompts: pairs of sampled completions, and greedy ones with another reward."""
    files = [*cfg.data.val_files]
    other = RewardConfig(name="tests.support.named_rewards:is_a", num_processes=1)
    own = dataclasses.replace(cfg.reward, success_threshold=2.0)
    cfg.data.val_sets = {
        "pairs": ValSetConfig(files=files, size=2, n=2, temperature=0.5, top_p=0.9, reward=own, interval=2),
        "greedy": ValSetConfig(files=files, size=2, max_response_tokens=5, reward=other, interval=3),
    }


def test_named_sets_have_metrics_draws_and_rewards_of_their_own(tmp_path, model):
    with source_of(tmp_path, model, reply, validation=3, edit=with_sets) as source:
        cfg, engines = source.cfg, source.rollouts.engines
        cfg.trainer.total_steps = 7
        evaluator = evaluator_beside(source, model)
        evaluation = evaluator.evaluate(6)
        default, pairs, greedy = engines.samplings
        assert (pairs.temperature, pairs.top_p, pairs.max_tokens) == (0.5, 0.9, 8)
        assert (greedy.temperature, greedy.top_p, greedy.max_tokens) == (0.0, 1.0, 5)
        seeds = [request_seed(cfg.trainer.seed, 6, f"val:pairs:{i}", j) for i in range(2) for j in range(2)]
        assert engines.seeds[3:7] == seeds and len(set(engines.seeds)) == 9
        metrics = evaluation.metrics
        # p0: lengths 3 and 1; p1: 1 and 2; the threshold is 2.
        assert (metrics["val/pairs/accuracy"], metrics["val/pairs/avg@2"]) == (0.5, pytest.approx(7 / 4))
        assert (metrics["val/pairs/pass@2"], metrics["val/pairs/failures"]) == (1.0, 0.0)
        assert (metrics["val/greedy/accuracy"], metrics["val/greedy/avg@1"]) == (0.5, 0.5), "a and bbb"
        assert "val/greedy/pass@1" not in metrics and metrics["val/reward/mean"] == pytest.approx((1 + 3 + 4) / 3)
        assert [episode.uid for episode in evaluation.sets["greedy"]] == ["val:greedy:0:0", "val:greedy:1:0"]
        due = {step: sorted(evaluator.evaluate(step).sets) for step in (1, 2, 3, 7)}
        assert due == {1: [], 2: ["pairs"], 3: ["greedy"], 7: ["greedy", "pairs"]}
        assert [step for step in range(8) if cfg.validates(step)] == list(range(8)), "the default set is due always"
        cfg.trainer.val_interval = -1
        assert [step for step in range(8) if cfg.validates(step)] == [0, 2, 3, 4, 6, 7]
        assert evaluator.evaluate(2).greedy == []


def test_a_prompt_whose_rewards_are_not_all_known_does_not_count_in_pass_at_k(tmp_path, model):
    """As in `row_values`, from which `trainer evaluate` makes its table."""
    with source_of(tmp_path, model, reply, validation=2) as source:
        source.cfg.rollout.val_n = 4
        evaluator = evaluator_beside(source, model)
        rewards = [0.0, 0.0, None, 0.0], [1.0, 0.0, 0.0, 0.0]
        sampled = [
            Episode(f"val:{i}:{j}", f"val:{i}", [], reward)
            for i, row in enumerate(rewards)
            for j, reward in enumerate(row)
        ]
        assert (
            evaluator._pass_at_k(sampled)
            == {"val/pass@4": 1.0}
            == {f"val/{name}": value for name, value in means_of(row_values(rewards, 1.0)).items() if name == "pass@4"}
        )


def test_a_record_of_a_set_is_of_its_reward(tmp_path, model):
    """The settings of the run do not hold it."""
    with source_of(tmp_path, model, reply, validation=2, edit=with_sets) as source:
        before = {name: route.decides for name, route in source.rollouts.routes.items()}
        source.cfg.data.val_sets["pairs"].reward.weights = [2.0]
        source.cfg.data.val_sets["greedy"].reward.timeout_s = 5.0
        after = make_routes(source.cfg, dict.fromkeys(before), load_tokenizer(model))
    changed = [name for name, route in after.items() if route.decides != before[name]]
    assert changed == ["val_sets.pairs"] and before[""] == ""


def test_validation_examples_are_evaluated_under_the_current_policy():
    sample = Sample(np.zeros(3, np.int32), np.ones(3, np.float32))
    found = LossEvaluator([Episode("0", "0", [sample])] * 2, lambda episodes: {"loss": float(len(episodes))}).evaluate(
        3
    )
    assert found.metrics == {"val/loss": 2.0}
