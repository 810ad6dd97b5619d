"""What an evaluation measures, and of which completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.replies import source_of
from trainer.config import TinyConfig
from trainer.generation.engine import Sampling
from trainer.models.tiny import build_tiny
from trainer.seeding import request_seed

GREEDY = {"p0": "a", "p1": "bbb", "p2": "cccc"}
"""The reward is the length: of the three, two reach the threshold of 3, one of them exactly."""
SAMPLED = {"p0": ("ddd", "e"), "p1": ("f", "ff"), "p2": ("g", "gg")}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), path)
    return path


def reply(prompt: str, number: int, sampling: Sampling) -> str:
    return GREEDY[prompt] if sampling.temperature == 0.0 else SAMPLED[prompt][number]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_evaluation_is_greedy_and_pass_at_k_is_sampled(tmp_path, model, temperature):
    with source_of(tmp_path, model, reply, held_out=3) as source:
        cfg = source.cfg
        cfg.rollout.val_n, cfg.rollout.temperature, cfg.rollout.top_p = 2, temperature, 0.9
        cfg.reward.success_threshold = 3.0
        metrics = source.evaluate(7)
        greedy, sampled = source.fleet.samplings
        assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)
        assert (sampled.temperature, sampled.top_p) == (temperature or 1.0, 0.9), "greedy completions are all equal"
        uids = [f"val:{i}" for i in range(3)]
        expected = [request_seed(cfg.trainer.seed, 7, uid, 0) for uid in uids]
        expected += [request_seed(cfg.trainer.seed, 7, uid, 1 + j) for uid in uids for j in range(2)]
        assert source.fleet.seeds == expected and len(set(expected)) == 9
    assert metrics["val/reward/mean"] == pytest.approx((1 + 3 + 4) / 3)
    assert metrics["val/accuracy"] == pytest.approx(2 / 3), "a reward at the threshold is a success"
    assert metrics["val/pass@2"] == pytest.approx(1 / 3), "of the prompts, not of their first and second completions"
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


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path, model):
    with source_of(tmp_path, model, reply) as source:
        assert source.evaluate(1) == {} and source.fleet.seeds == []


def test_a_run_without_success_is_told_once_after_its_second_evaluation(tmp_path, model, caplog):
    with source_of(tmp_path, model, reply, held_out=1) as source:
        source.cfg.reward.success_threshold = 3.0
        said = [source.evaluate(step) and len(caplog.messages) for step in (1, 2, 3)]
    assert said == [0, 1, 1] and "no reward has reached reward.success_threshold=3 yet (the largest: 1)" in caplog.text
