"""A kind of training that the package does not have: it is killed and resumed as exactly as those that it has."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import run_until
from tests.support.preferences import TASK
from trainer.models.tiny import TinyShape, build_tiny
from trainer.reports.compare import compare_runs
from trainer.reports.diagnose import diagnose
from trainer.reports.report import write_report

pytestmark = [pytest.mark.early, pytest.mark.slow]


STEPS = 4
WEIGHTS = f"exports/global_step_{STEPS}/policy/model.safetensors"


SHORT = (f"trainer.total_steps={STEPS}", f"trainer.hf_save_interval={STEPS}", "trainer.val_interval=-1")


def build(path: Path, seed: int = 0) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 16}
    build_tiny(TinyShape(**size, num_kv_heads=1, seed=seed), str(path))


def kill_at_step_3(run: Path, *overrides: str) -> None:
    """Start a job in the directory `run`, and kill it when step 3 is logged and step 2 is saved."""
    reached, saved = run.with_name("reached"), run / "checkpoints/global_step_2"
    env = {"TRAINER_FAILPOINT": f"logged,3,{reached}"}
    log = run.with_suffix(".log")
    assert not run_until(log, *overrides, env=env, kill_when=lambda _: reached.exists() and saved.exists())


def assert_same_run(killed: Path, whole: Path) -> None:
    assert comparable(metrics(killed)) == comparable(metrics(whole))
    assert (killed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_preferences_over_pairs_end_as_if_never_killed(tmp_path, capsys):
    """On two ranks, with a frozen reference and a second policy; pairs stay together.

    What reads the run needs nothing of its code.
    """
    build(tmp_path / "model")
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    base = ("trainer.task=tests.support.preferences:TWO", f"model.path={tmp_path}/model", "trainer.num_workers=2",
            "data=files", f"data.train_files=[{tmp_path}/pairs.jsonl]", *SHORT,
            "trainer.mini_batch_size=4")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert abs(rows[0]["policy/margin"]) < 1e-4 < rows[-1]["policy/margin"], "the reference is the initial policy"
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] and rows[-1]["progress/samples"] == 2 * 4 * STEPS
    first, last = rows[0], rows[-1]
    assert first["second/loss"] == first["policy/loss"] and last["second/loss"] > last["policy/loss"], "it is slower"

    killed = (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    described = "\n".join(diagnose(str(tmp_path / "killed")))
    assert f"of {STEPS} is logged" in described and "trainer.task=" not in described
    assert run_until(tmp_path / "killed.log", *killed)
    assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")

    compare_runs([str(tmp_path / "killed"), str(tmp_path / "whole")], None, as_json=True)
    best = max(row[TASK.best] for row in rows)
    assert [row[f"best {TASK.best}"] for row in json.loads(capsys.readouterr().out)] == [best, best]
    assert Path(write_report(str(tmp_path / "killed"))).stat().st_size > 5000


def test_distillation_with_muon_ends_as_if_never_killed(tmp_path):
    """On two ranks, with the teacher's log-probs as advantages, and a divergence over the vocabulary in the loss."""
    build(tmp_path / "model")
    build(tmp_path / "teacher", seed=1)
    base = ("algorithm=opd", f"model.path={tmp_path}/model", f"algorithm.teacher.path={tmp_path}/teacher",
            "algorithm.opd_kl_coef=1", "algorithm.teacher.divergence=jsd", "trainer.policy.optimizer.name=muon",
            "trainer.policy.optimizer.lr=1e-3", "trainer.num_workers=2", *SHORT)  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    distances = [row["policy/teacher_kl"] for row in metrics(tmp_path / "whole")]
    assert distances[0] > distances[-1] > 0
    assert "Muon trains model.layers.*.self_attn.q_proj.weight" in (tmp_path / "whole.log").read_text()
    killed = (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    assert run_until(tmp_path / "killed.log", *killed)
    assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_loss_that_reads_a_teacher_ends_as_if_never_killed(tmp_path):
    """The task is `rl` with one more role. A resume refuses another teacher, and its advice can be given as printed."""
    build(tmp_path / "model")
    build(tmp_path / "teacher", seed=1)
    base = ("trainer.task=tests.support.distillation:TASK", f"model.path={tmp_path}/model",
            "algorithm.policy_loss=tests.support.distillation:distilled", *SHORT)  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    distances = [row["policy/teacher_distance"] for row in metrics(tmp_path / "whole")]
    assert distances[0] > distances[-1] > 0

    log, killed = tmp_path / "killed.log", (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    weights = tmp_path / "teacher/model.safetensors"
    weights.rename(tmp_path / "kept")
    shutil.copy(tmp_path / "model/model.safetensors", weights)
    assert run_until(log, *killed, status=1)
    (advice,) = re.findall(r"trainer\.allow_config_change=\S+\]", log.read_text())
    assert advice == "trainer.allow_config_change=[teacher]"
    (tmp_path / "kept").replace(weights)
    assert run_until(log, *killed, advice)
    assert "resume verified: 1 replayed step" in log.read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
