"""Kill a job whose rewards come from a server: the result is that of an uninterrupted job, and no answer is lost."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import run_forked
from tests.support.jobs import comparable, environment, metrics
from tests.support.judges import Answer, Server, rewards, serving
from tests.support.killed_jobs import CONFIG, PPO, STEPS, run_killed, run_until
from trainer.models.tiny import TinyShape, build_tiny
from trainer.rewards.cache import CACHE_FILE, key_of

pytestmark = [pytest.mark.early, pytest.mark.slow]


class Judge:
    """Judges by content. It is overloaded now and then, and cannot judge some completions."""

    def __init__(self) -> None:
        self.run_dir = Path()
        self.asked: list[str] = []
        """The key of each completion to which it has given a reward."""
        self.asked_again: list[str] = []
        """Those whose reward the run had stored before."""

    def __call__(self, server: Server, document: Any) -> Answer:
        if len(server.requests) % 5 == 0:
            return 503, {"Retry-After": "0"}, b""
        store = self.run_dir / CACHE_FILE
        stored = store.read_text() if store.exists() else ""
        values: list[Any] = []
        for item in document["completions"]:
            key = key_of(f"{server.url}/score", item)
            number = zlib.crc32(f"{item['completion']} {item['answer']}".encode())
            fails = number % 5 == 0
            with server.lock:
                if (
                    item["completion"] != item["answer"] and not fails
                ):  # else it is the trial before the start, which is not stored
                    self.asked.append(key)
                if f'"{key}"' in stored:
                    self.asked_again.append(key)
            values.append("I cannot say" if fails else {"taste": number / 2**32, "length": len(item["completion"]) / 8})
        return rewards(values)


def test_a_job_with_a_remote_reward_ends_as_if_never_killed(tmp_path):
    """Killed behind a save and in one, with dynamic sampling ahead. Then other data and another model are
    refused, each in one message."""
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, str(tmp_path / "model"))
    judge = Judge()
    with serving(judge) as server:
        base = (f"model.path={tmp_path}/model", "reward.name=[remote,tests.support.hashed_reward:hashed]",
                "reward.weights=[1,0.5]", f"reward.url={server.url}/score", "algorithm.kl_coef=0.01",
                "reward.max_error_rate=1", "algorithm.dynamic_sampling=true", "rollout.ahead=1")  # fmt: skip
        judge.run_dir = tmp_path / "whole"
        assert run_until(tmp_path / "whole.log", f"trainer.run_dir={judge.run_dir}", *base)
        rows = metrics(judge.run_dir)
        assert sum(row.get("reward/failures", 0) for row in rows) > 0, "the judge has judged all"
        assert rows[-1]["reward/taste/mean"] != rows[-2]["reward/taste/mean"]
        stored = (judge.run_dir / CACHE_FILE).read_text()
        assert judge.asked and all(f'"{key}"' in stored for key in judge.asked)
        assert judge.asked_again == []

        judge.run_dir, judge.asked = tmp_path / "killed", []
        job = (f"trainer.run_dir={judge.run_dir}", *base)
        run_killed(tmp_path / "killed.log", *job)
    assert judge.asked_again == []
    assert comparable(metrics(judge.run_dir)) == comparable(rows)
    for name in (f"exports/global_step_{STEPS}/policy/model.safetensors", f"validation/step_{STEPS}.jsonl"):
        assert (judge.run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert "resume verified" in (tmp_path / "killed.log").read_text()

    allowed = "trainer.allow_config_change=[trainer.policy.optimizer.schedule_steps]"
    again = (*PPO, *CONFIG, *job, "trainer.total_steps=8", "reward.max_error_rate=1", allowed)
    other_data = run_forked("trainer", ["train", *again, "data.train_size=11"], tmp_path, environment(), timeout=300)
    assert other_data.returncode == 2, other_data.stderr
    assert "data: the number of prompts is not that of the checkpoint" in other_data.stderr
    assert "trainer.load_components=[weights,optimizer,rng,state]" in other_data.stderr
    assert "loading the model" not in other_data.stdout + other_data.stderr
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    other_model = run_forked("trainer", ["train", *again], tmp_path, environment(), timeout=300)
    assert other_model.returncode == 2 and "model.path" in other_model.stderr, other_model.stderr
    assert json.loads((judge.run_dir / "committed.json").read_text()), "the refused starts have changed the run"
