"""What a run has left behind, as Python sees it."""

from __future__ import annotations

import json
import math

import pytest

from trainer import UserError, read_metrics
from trainer.api.results import describe_result
from trainer.metrics.best import Best, find_best

ROWS = [
    {"step": 0, "val/accuracy": 0.25},
    {"step": 1, "reward/mean": 0.5},
    {"step": 2, "reward/mean": None, "val/accuracy": 0.75},
    {"step": 3, "reward/mean": 0.75, "val/accuracy": 0.75},
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for step in (10, 2):
        (tmp_path / f"exports/global_step_{step}/policy").mkdir(parents=True)
        (tmp_path / f"checkpoints/global_step_{step}").mkdir(parents=True)
    return tmp_path


def test_metrics_are_a_table_with_a_row_for_each_step(run):
    for path in (run, str(run / "metrics.jsonl")):
        table = read_metrics(path)
        assert list(table.columns) == ["step", "reward/mean", "val/accuracy"]
        assert list(table["step"]) == [0, 1, 2, 3]
        assert math.isnan(table["reward/mean"][2]) and table["reward/mean"].max() == 0.75


def test_a_directory_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="no metrics are there; name a run directory"):
        read_metrics(tmp_path)


def test_the_result_lists_best_value_checkpoints_and_exports_in_order(run):
    paths = {"run_dir": run, "ckpt_path": run / "checkpoints", "export_path": run / "exports"}
    paths = {name: str(path) for name, path in paths.items()}
    result = describe_result({**paths, "best_metric": "val/accuracy", "best_mode": "max"}, "finished")
    assert result.best == Best("val/accuracy", 0.75, 2, start=0.25)
    assert [path.rpartition("_")[2] for path in result.checkpoints] == ["2", "10"]
    assert [path.split("/")[-2] for path in result.exports] == ["global_step_2", "global_step_10"]
    assert result.report is None and len(result.metrics) == 4


def test_the_best_value_follows_the_mode_and_skips_what_is_not_finite():
    assert find_best(ROWS, "reward/mean", "min") == Best("reward/mean", 0.5, 1)
    assert find_best(ROWS, "val/loss", "min") is None
    assert find_best([{"step": 1, "val/loss": math.inf}], "val/loss", "max") is None
