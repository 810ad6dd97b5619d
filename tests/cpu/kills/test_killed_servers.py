"""Runs with frozen models on servers, whose answers change when they are asked again, end as if never killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import run_until
from tests.support.model_server import FrozenModel
from tests.support.reward_model import add_score_head
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow]
STEPS, MATH = 4, "data/math/reward"
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 16}


def build(path: Path, seed: int = 0, has_score: bool = False) -> Path:
    build_tiny(TinyShape(**SIZE, num_kv_heads=1, seed=seed), str(path))
    if has_score:
        add_score_head(path)
    return path


def kill_at_step_3(run: Path, *overrides: str) -> None:
    reached, saved = run.with_name("reached"), run / "checkpoints/global_step_2"
    env = {"TRAINER_FAILPOINT": f"logged,3,{reached}"}
    assert not run_until(
        run.with_suffix(".log"), *overrides, env=env, kill_when=lambda _: reached.exists() and saved.exists()
    )


def test_a_run_with_teachers_and_a_reward_model_on_servers_ends_as_if_never_killed(tmp_path):
    """Two teachers by source: their log-probs as advantages, and a divergence over the vocabulary in the loss. A resume
    finds the servers at other addresses, and refuses one with other weights."""
    build(tmp_path / "model")
    rows = "".join(json.dumps({"prompt": f"{i}?", "answer": "x"}) + "\n" for i in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    paths = {name: build(tmp_path / name, seed, name == "judge") for seed, name in enumerate(("a", "b", "judge"), 1)}

    def words(run: str, first: FrozenModel, second: FrozenModel, judge: FrozenModel) -> list[str]:
        sources = [f"+data.mix.{name}.files=[{tmp_path}/rows.jsonl]" for name in ("math", "code")]
        return [f"trainer.run_dir={tmp_path}/{run}", "algorithm=opd", f"model.path={tmp_path}/model", "data=files",
                *sources, f"algorithm.teacher.url={{math:'{first.url}',code:'{second.url}'}}", "rollout.n=2",
                "algorithm.opd_kl_coef=1", "algorithm.teacher.divergence=forward", "reward.name=model",
                f"reward.model.url={judge.url}", f"trainer.total_steps={STEPS}", f"trainer.hf_save_interval={STEPS}",
                "trainer.val_interval=-1", "trainer.policy.optimizer.lr=1e-2", "data.train_size=-1"]  # fmt: skip

    with FrozenModel(paths["a"], "logprobs") as a, FrozenModel(paths["b"], "logprobs") as b:
        with FrozenModel(paths["judge"], "scores") as judge:
            assert run_until(tmp_path / "whole.log", *words("whole", a, b, judge))
            whole = metrics(tmp_path / "whole")
            assert all(row["policy/teacher_kl"] > 0 for row in whole)
            assert all(row[f"{MATH}/reward_model/mean"] == row[f"{MATH}/mean"] != 0 for row in whole)
            assert a.asked and b.asked and not (set(a.asked) & set(b.asked)), "each reads the rows of its source"
            for server in (a, b, judge):
                server.asked.clear()
            kill_at_step_3(tmp_path / "killed", *words("killed", a, b, judge))
        with FrozenModel(paths["judge"], "scores") as moved:
            shutil.copytree(tmp_path / "killed", tmp_path / "refused")
            assert run_until(tmp_path / "killed.log", *words("killed", a, b, moved))
            assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
            assert comparable(metrics(tmp_path / "killed")) == comparable(whole)
            weights = f"exports/global_step_{STEPS}/policy/model.safetensors"
            assert (tmp_path / "killed" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
            a.load(paths["b"])
            assert run_until(tmp_path / "refused.log", *words("refused", a, b, moved), status=1)
    said = (tmp_path / "refused.log").read_text()
    assert "algorithm.teacher.url.math=" in said and "its weights are not those that the run began with" in said
