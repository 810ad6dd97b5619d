"""The picture of a run."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.support.metrics import make_tracker, step_metrics
from trainer.config import Config, Metric, TrainerConfig
from trainer.errors import UserError
from trainer.process.failures import INCIDENTS, INFRASTRUCTURE, JOB, Incident
from trainer.reports.report import _panels, _reward, main, write_report
from trainer.run.run_metadata import record_start

ROOT = Path(__file__).parents[4]


def report_of(run_dir: Path, rows: list[dict[str, float]], first_step: int = 1, task: str = "rl") -> bytes:
    tracker = make_tracker(run_dir)
    for step, row in enumerate(rows, start=first_step):
        tracker.log(step, row)
    tracker.close()
    if task != "rl":
        record_start(str(run_dir), Config(trainer=TrainerConfig(task=task)))
    path = write_report(str(run_dir))
    assert path == str(run_dir / "report.png")
    picture = Path(path).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert set(os.listdir(run_dir)) - {"config.yaml", "starts.jsonl"} == {"metrics.jsonl", "report.png"}
    return picture


FEW = [{"reward/mean": step / 8, "reward/std": 0.1} for step in range(1, 6)]
"""Metrics of a picture with few panels, which is drawn sooner."""


def picture_size(picture: bytes) -> tuple[int, int]:
    return struct.unpack(">II", picture[16:24])


def test_the_report_shows_the_metrics(tmp_path):
    rows = [{"val/accuracy": 0.3}, *(step_metrics(step) | {"reward/std": 0.1} for step in range(1, 6))]
    one = report_of(tmp_path / "a" / "run", rows, first_step=0)
    same = report_of(tmp_path / "b" / "run", rows, first_step=0)
    assert one == same
    for name in ("reward/std", "val/accuracy", "response_length/mean", "policy/kl", "time/rollout"):
        changed = [row | {name: row[name] * 1.5} if name in row and i > 2 else row for i, row in enumerate(rows)]
        assert report_of(tmp_path / name / "run", changed, first_step=0) != one, name


def test_the_report_takes_what_there_is(tmp_path):
    supervised = report_of(
        tmp_path / "sft", [{"sft/loss": 1 / s, "sft/accuracy": 0.5} for s in range(1, 9)], task="sft"
    )
    held_out = [{"sft/loss": 1 / s, **({"val/loss": 2 / s} if s % 2 else {})} for s in range(1, 9)]
    assert report_of(tmp_path / "sft2", held_out, task="sft") != supervised
    ppo = report_of(tmp_path / "ppo", [step_metrics(2) | {"critic/explained_variance": 0.5, "policy/entropy": 1.0}])
    assert picture_size(ppo)[1] > 2 * picture_size(supervised)[1]  # three rows of panels against one
    holes = [{"reward/mean": float("nan"), "reward/std": 0.1, "time/step": 1.0}, {"reward/mean": 1.0}]
    report_of(tmp_path / "holes", holes)
    report_of(tmp_path / "long", [{"reward/mean": s % 7 if s % 5 else float("nan")} for s in range(1, 400)])


def test_the_band_of_rewards_stays_within_their_bounds():
    def bounds(*pairs: tuple[float, float]) -> tuple[float, float]:
        axes = Figure().add_subplot()
        _reward(axes, [{"step": i, "reward/mean": mean, "reward/std": std} for i, (mean, std) in enumerate(pairs)])
        ends = axes.collections[0].get_datalim(axes.transData)
        return round(ends.y0, 6), round(ends.y1, 6)

    assert bounds((0.5, 0.5), (0.9, 0.3), (0.1, 0.3)) == (0, 1), "shares of successes"
    assert bounds((0.5, 0.5), (0.9, 0.4)) == (0, 1.3), "some rewards are above 1"
    assert bounds((0.5, 0.1), (1.5, 0.1)) == (0.4, 1.6)


def test_metrics_of_a_task_that_share_a_panel_are_told_apart():
    names = ("policy/accuracy", "policy/margin", "my/other", "val/accuracy")
    metrics = {name: Metric("", "share", panel="Mine" if "other" not in name else "Other") for name in names}
    (own,) = (
        panel for panel in _panels([dict.fromkeys(names[:2], 0.5) | {"step": 1}], metrics) if "Mine" in str(panel)
    )
    axes = Figure().add_subplot()
    own(axes, [dict.fromkeys(names, 0.5) | {"step": 1}])
    assert [text.get_text() for text in axes.get_legend().texts] == [names[0], names[1], names[3]]


def test_the_report_draws_named_validation_sets_together():
    rows = [{"step": 1, "val/math/accuracy": 0.5, "val/code/accuracy": 0.25, "val/math/pass@2": 0.6}]
    (panel,) = [panel for panel in _panels(rows, {}) if "Validation sets" in str(panel)]
    assert panel.keywords["names"] == ["val/code/accuracy", "val/math/accuracy"]


def test_the_report_shows_pass_at_k_of_this_and_of_earlier_versions(tmp_path):
    rows = [row | {"val/accuracy": 0.5} for row in FEW]
    plain = report_of(tmp_path / "plain" / "run", rows)
    for number, name in enumerate(("val/pass@4", "val/pass@k")):
        assert report_of(tmp_path / str(number) / "run", [row | {name: 0.7} for row in rows]) != plain, name


def test_the_report_draws_terms_and_what_environments_count(tmp_path):
    rows = FEW
    plain = report_of(tmp_path / "plain" / "run", rows)
    for number, name in enumerate(("reward/format/mean", "reward/_hidden/mean", "episode/tool_calls/search/mean")):
        low, high = (
            report_of(tmp_path / f"{kind} {number}" / "run", [row | values for row in rows])
            for kind, values in (("low", {name: 0.2}), ("high", {name: 0.7, "reward/other/mean": 0.1}))
        )
        assert len({plain, low, high}) == 3, name
    one = [row | {"reward/gsm8k/mean": row["reward/mean"]} for row in rows]
    assert report_of(tmp_path / "one" / "run", one) == plain, "a reward that is the only one is drawn already"
    many = [row | {f"reward/term{i}/mean": i / 9 for i in range(12)} for row in rows]
    assert report_of(tmp_path / "many" / "run", many) != plain


def test_the_report_says_which_advisories_hold_at_the_end(tmp_path):
    rows = [step_metrics(step) | {"response_length/clip_ratio": 0.6} for step in range(1, 6)]
    over = rows + [step_metrics(step) | {"response_length/clip_ratio": 0.1} for step in range(6, 12)]
    plain = [row | {"response_length/clip_ratio": 0.1} for row in rows]
    quiet, noted = report_of(tmp_path / "a" / "run", plain), report_of(tmp_path / "b" / "run", rows)
    assert picture_size(report_of(tmp_path / "c" / "run", over)) == picture_size(quiet), "it holds no more"
    assert picture_size(noted)[1] > picture_size(quiet)[1] and picture_size(noted)[0] == picture_size(quiet)[0]


def test_the_report_marks_incidents(tmp_path):
    plain = report_of(tmp_path / "plain" / "run", FEW)
    drawn = []
    for kind in (INFRASTRUCTURE, JOB):
        run = tmp_path / kind / "run"
        report_of(run, FEW)
        INCIDENTS.open(str(run))
        INCIDENTS.record(Incident(3, "rank", "rank 1", "10.0.0.7", kind, "killed process", "restarted", 9.0, "died"))
        INCIDENTS.close()
        drawn.append(Path(write_report(str(run))).read_bytes())
    assert len({plain, *drawn}) == 3


def test_dollars_and_underscores_in_names_are_no_formulas(tmp_path):
    rows = [{"reward/a$b_$/mean": step / 4, "reward/_c$^$/mean": 0.5, "sft/loss": 1.0} for step in range(1, 5)]
    report_of(tmp_path / "run$b_$", rows)


def test_a_report_of_nothing_says_so(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "trainer", "report", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}: is no run directory; it has no metrics.jsonl\n"


def test_the_report_of_a_sweep_is_one_of_each_of_its_runs(tmp_path, capsys):
    for name, row in (("lr=1", step_metrics(1)), ("lr=2", step_metrics(2)), ("lr=3", {"policy/lr": 1.0})):
        make_tracker(tmp_path / name).log(1, row)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"{tmp_path}/lr={number}/report.png" for number in (1, 2)]
    assert printed.err == f"left out {tmp_path}/lr=3/metrics.jsonl has nothing to draw yet\n"
    assert (tmp_path / "lr=1/report.png").exists() and (tmp_path / "lr=2/report.png").exists()
    assert main([str(tmp_path), "--out=one.png"]) == 2
    expected = f"error: --out=one.png: is one picture, and {tmp_path} holds 3 runs; name one of them\n"
    assert capsys.readouterr().err == expected
    for name in ("lr=1", "lr=2"):
        shutil.rmtree(tmp_path / name)
    make_tracker(tmp_path / "lr=4").log(1, {"policy/lr": 1.0})
    assert main([str(tmp_path)]) == 2, "there is no picture"


def test_the_report_of_a_run_that_may_only_be_read_goes_elsewhere(tmp_path):
    report_of(tmp_path / "run", [step_metrics(1)])
    (tmp_path / "run/report.png").unlink()
    assert write_report(str(tmp_path / "run"), str(tmp_path / "out.png")) == str(tmp_path / "out.png")
    assert (tmp_path / "out.png").exists() and not (tmp_path / "run/report.png").exists()
    make_tracker(tmp_path).log(1, {"policy/lr": 1.0})
    with pytest.raises(UserError, match="nothing to draw yet"):
        write_report(str(tmp_path))
