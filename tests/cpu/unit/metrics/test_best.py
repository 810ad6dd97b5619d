"""Which step of a run is the best."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import configured
from trainer.api.results import describe_result
from trainer.config import TASKS
from trainer.main import best_value
from trainer.metrics.best import better, find_best, score_of, sentence
from trainer.reports.compare import compare_runs
from trainer.run.directory import RunDirectory


def best_of(rows: list[dict[str, float]], metric: str = "val/accuracy", mode: str = "max") -> dict[str, float]:
    best: dict[str, float] = {}
    for step, row in enumerate(rows):
        best = better(best, metric, mode, step, row)
    return best


def line(accuracy: float, reward: float) -> dict[str, float]:
    return {"val/accuracy": accuracy, "val/reward/mean": reward}


def test_the_first_step_with_the_best_value_is_the_best():
    rows = [line(0.0, 0.9), line(0.1, 0.2), line(0.3, 0.1), line(0.0, 0.95), {}, line(0.3, 0.8)]
    assert best_of(rows) == {"val/accuracy": 0.3, "step": 2, "start": 0.0}
    assert best_of([{}, *rows[1:]]) == {"val/accuracy": 0.3, "step": 2}, "the start was not measured"
    assert sentence(best_of(rows)) == ", best val/accuracy 0.300 at step 2, 0.000 at the start"
    assert sentence(best_of([{}, *rows[1:]])) == ", best val/accuracy 0.300 at step 2"
    assert sentence({}) == ""


def test_start_weights_are_the_best_until_a_step_beats_them():
    found = best_of([line(0.15, 0.9), line(0.058, 0.5), line(0.092, 0.6), line(0.15, 0.6)])
    assert found == {"val/accuracy": 0.15, "step": 0, "start": 0.15}
    assert sentence(found) == ", best val/accuracy 0.150 at the start, which no step has beaten"
    assert score_of("val/accuracy", "max", line(0.1, 0.1), found)["score_of_start"] == 0.15
    assert score_of("val/reward/mean", "max", line(0.1, 0.1), found)["score_of_start"] is None, "another metric"


def test_a_search_compares_trained_steps_alone(tmp_path):
    cfg = configured(tmp_path)
    cfg.trainer.run_dir = str(tmp_path)
    rows = [{"step": step, **line(value, 0.0)} for step, value in enumerate((0.9, 0.5, 0.6))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert best_value(cfg) == 0.6


VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.75])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.just({}), st.builds(line, VALUES, VALUES)), min_size=1, max_size=5))
def test_a_run_its_result_and_a_comparison_name_the_same_best_step(tmp_path_factory, rows):
    own = best_of(rows)
    logged = [{"step": step, **row} for step, row in enumerate(rows)]
    found = find_best(logged, "val/accuracy", "max")
    start = {} if found is None or found.start is None else {"start": found.start}
    assert ({found.metric: found.value, "step": found.step, **start} if found else {}) == own
    directory = tmp_path_factory.mktemp("sweep")
    (directory / "job").mkdir()
    (directory / "job/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    paths = {name: str(directory / "job") for name in ("run_dir", "ckpt_path", "export_path")}
    assert describe_result({**paths, "best_metric": "val/accuracy", "best_mode": "max"}, "finished").best == found
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.reports.compare._draw", lambda *_: None)
        compare_runs([str(directory)], str(directory / "x.png"))
    cells = [cell.strip() for cell in printed.getvalue().splitlines()[3].split("│")[2:5]]
    first = f"{found.start:.4g}" if start else "-"
    assert cells == ([first, f"{found.value:.4g}", str(found.step)] if found else ["-"] * 3)


@pytest.mark.parametrize("mode, step", [("max", 2), ("min", 1)])
def test_another_metric_is_compared_as_it_is(mode, step):
    rows = [{}, {"policy/kl": 0.0}, {"policy/kl": 2.0}, {"policy/kl": 2.0, **line(0.5, 0.5)}]
    assert best_of(rows, "policy/kl", mode) == {"policy/kl": rows[step]["policy/kl"], "step": step}


def test_a_supervised_run_is_compared_by_the_held_out_loss_unless_it_names_a_metric():
    assert TASKS["sft"].compared_by("val/accuracy") == ("val/loss", "min")
    assert TASKS["rl"].compared_by("val/accuracy") == ("val/accuracy", "max")
    assert TASKS["sft"].compared_by("-sft/loss") == ("sft/loss", "min")


def test_checkpoints_of_a_supervised_run_are_kept_by_the_held_out_loss(tmp_path):
    configs = [configured(tmp_path, keep_best=1, max_ckpts_to_keep=1, task=task) for task in ("rl", "sft")]
    rules = [RunDirectory(cfg).checkpoints.retention for cfg in configs]
    assert [(one.best_metric, one.best_mode) for one in rules] == [("val/accuracy", "max"), ("val/loss", "min")]
