"""Curves, marks and advice of runs, as the page gets them."""

from __future__ import annotations

import json

from tests.support.metrics import make_tracker
from tests.support.viewed_runs import make_run
from trainer.config.tasks import ACCURACY
from trainer.metrics.tracker import as_lines
from trainer.reports.compare import read_run
from trainer.view.runs import curves, describe_metrics, describe_run


def test_a_run_is_described(tmp_path):
    path = make_run(tmp_path / "run", steps=4)
    run = describe_run(read_run(str(path)), "run")
    assert run["step"] == 4 and run["total_steps"] == 4
    assert run["curves"]["val/accuracy"] == [[0, 2, 4], [0.25, 0.7, 0.6]]
    assert [(mark["kind"], mark["step"]) for mark in run["marks"]] == [
        ("incident", 2), ("restart", 1), *(("checkpoint", step) for step in range(1, 5))]  # fmt: skip
    assert run["marks"][0]["text"] == "out of memory; restarted the ranks; no memory"
    assert run["marks"][1]["text"] == f"resumed from {path}/checkpoints/global_step_1, step 1 of 4"
    assert run["starts"] == [
        {"time": "2026-01-02T03:04:05", "command": "trainer train", "host": "node",
         "git": ["0123456789ab with changes"]}]  # fmt: skip
    assert run["config"]["algorithm.kl_coef"] == "0.1"
    json.dumps(run, allow_nan=False)


def test_a_run_without_anything_but_metrics_is_described(tmp_path):
    make_tracker(tmp_path).log(1, {"reward/mean": float("nan")})
    run = describe_run(read_run(str(tmp_path)), "run")
    assert run["curves"] == {"reward/mean": [[1], [None]]} and run["marks"] == run["starts"] == []


def test_long_curves_keep_the_best_and_the_last_step_and_every_validation(tmp_path):
    rows = [{"step": step, "a": step, **({"val/b": 1.0} if step % 99 == 0 else {})} for step in range(1, 20_001)]
    rows[4321][ACCURACY] = 0.5
    (tmp_path / "metrics.jsonl").write_text(as_lines(rows))
    found = curves(read_run(str(tmp_path)).drawn)
    steps, values = found["a"]
    assert 4000 < len(steps) < 4300 and steps == values and steps[-1] == 20_000
    assert found["val/b"][0] == [*range(99, 20_001, 99)] and found[ACCURACY] == [[4322], [0.5]]


def test_every_metric_is_explained(tmp_path):
    known = describe_metrics([read_run(str(make_run(tmp_path / "run")))])
    assert known["policy/kl"][0] == "nats" and known["val/accuracy"][1].startswith("Validation prompts")
    assert "reward/zero_std_frac" in known


def test_advice_is_that_of_the_metrics(tmp_path):
    tracker = make_tracker(tmp_path)
    for step in range(1, 8):
        tracker.log(step, {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_frac": 1.0})
    (advice,) = describe_run(read_run(str(tmp_path)), "run")["advice"]
    assert advice["steps"] == [1, 7] and advice["key"] in advice["text"] and "rollout.n" in advice["text"]
