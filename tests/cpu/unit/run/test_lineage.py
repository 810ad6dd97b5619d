"""The record of the checkpoint that a fork started from, and its metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import metrics
from tests.support.odd_files import ODD_JSON, resume
from tests.support.runs import OpenRun, a_run, configured
from trainer.metrics.tracker import PARENT_FILE, read_metrics


def test_a_lineage_that_is_none_is_refused(run_dir):
    lineage = run_dir / "lineage.json"
    for content in ODD_JSON:
        lineage.write_bytes(content)
        assert f"{lineage}: is damaged" in resume(run_dir)


def fork(parent: Path, run_dir: Path, step: int, **trainer) -> list[int]:
    """Fork `parent`; return the steps of the parent that the fork's report can show."""
    path = str(parent / f"checkpoints/global_step_{step}")
    with OpenRun(configured(run_dir, resume_mode="from_path", resume_path=path, **trainer)) as run:
        run.load()
        if not trainer:
            a_step(run, run_dir, step + 1)
    return [row["step"] for row in read_metrics(str(run_dir / PARENT_FILE))]


def a_step(run: OpenRun, run_dir: Path, step: int) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step}, "reward/mean": 0.5}}\n')
    run.state["step"] = step
    run.save(step)


def test_a_fork_keeps_the_metrics_of_its_parents_up_to_the_fork(tmp_path):
    a_run(tmp_path / "parent", steps=(1, 2, 3))
    assert fork(tmp_path / "parent", tmp_path / "fork", step=2) == [1, 2]
    shutil.rmtree(tmp_path / "parent")
    (tmp_path / "fork").rename(tmp_path / "moved")
    assert fork(tmp_path / "moved", tmp_path / "second", step=3) == [1, 2, 3]
    assert fork(tmp_path / "moved", tmp_path / "weights", step=3, load_components=["weights"]) == []
    assert [row["step"] for row in metrics(tmp_path / "second")] == [4]


def test_steps_that_a_parent_has_trained_itself_come_from_its_own_lines(tmp_path):
    """The parent went back behind its own fork, and has logged these steps since."""
    a_run(tmp_path / "parent", steps=(1, 2, 3))
    earlier = "".join(json.dumps({"step": step, "reward/mean": 7.0}) + "\n" for step in (0, 1, 2))
    (tmp_path / "parent/metrics.parent.jsonl").write_text(earlier)
    assert fork(tmp_path / "parent", tmp_path / "fork", step=2) == [0, 1, 2]
    lines = (tmp_path / "fork/metrics.parent.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward/mean"] for line in lines] == [7.0, 0.5, 1.0]


@pytest.mark.parametrize("content", [None, "{}\n{}\n"])
def test_a_fork_whose_parent_has_no_readable_metrics_starts_without_them(tmp_path, caplog, content):
    a_run(tmp_path / "parent")
    (tmp_path / "parent/metrics.jsonl").unlink()
    if content is not None:
        (tmp_path / "parent/metrics.jsonl").write_text(content)
    assert fork(tmp_path / "parent", tmp_path / "fork", step=2) == []
    assert ("will not show the parent" in caplog.text) == (content is not None)
