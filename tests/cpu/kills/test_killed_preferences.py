"""A kind of training that the package does not have: it is killed and resumed as exactly as those that it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import STEPS, run_until
from tests.support.preferences import TASK
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny
from trainer.reports.compare import compare_runs
from trainer.reports.diagnose import diagnose
from trainer.reports.report import write_report

pytestmark = [pytest.mark.early, pytest.mark.slow]


def test_preferences_over_pairs_end_as_if_never_killed(tmp_path, capsys):
    """On two ranks, with a frozen reference; pairs stay together. What reads the run needs nothing of its code."""
    size = TinyConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, str(tmp_path / "model"))
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    base = ("trainer.task=tests.support.preferences:TASK", f"model.path={tmp_path}/model", "trainer.num_workers=2",
            "data=files", f"data.train_files=[{tmp_path}/pairs.jsonl]", "trainer.val_interval=-1",
            "trainer.mini_batch_size=4", "trainer.ckpt_async=false")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert abs(rows[0]["policy/margin"]) < 1e-4 < rows[-1]["policy/margin"], "the reference is the initial policy"
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] and rows[-1]["progress/samples"] == 2 * 4 * STEPS

    killed, reached = (f"trainer.run_dir={tmp_path}/killed", *base), tmp_path / "reached"
    env = {"TRAINER_FAILPOINT": f"logged,4,{reached}"}  # step 4 is logged, and step 2 saved
    assert not run_until(tmp_path / "killed.log", *killed, env=env, kill_when=lambda _: reached.exists())
    described = "\n".join(diagnose(str(tmp_path / "killed")))
    assert f"of {STEPS} is logged" in described and "trainer.task=" not in described
    assert run_until(tmp_path / "killed.log", *killed)
    assert "resume verified: 2 replayed steps identical" in (tmp_path / "killed.log").read_text()
    assert comparable(metrics(tmp_path / "killed")) == comparable(rows)
    weights = f"exports/global_step_{STEPS}/policy/model.safetensors"
    assert (tmp_path / "killed" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()

    compare_runs([str(tmp_path / "killed"), str(tmp_path / "whole")], None, style="json")
    best = max(row[TASK.best] for row in rows)
    assert [row[f"best {TASK.best}"] for row in json.loads(capsys.readouterr().out)] == [best, best]
    assert Path(write_report(str(tmp_path / "killed"))).stat().st_size > 5000
