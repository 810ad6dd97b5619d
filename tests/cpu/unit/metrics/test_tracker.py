"""`metrics.jsonl` of a run that is killed and resumed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.metrics import ROOT, make_tracker, run_python
from tests.support.odd_files import DEEP_JSON
from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.metrics import names
from trainer.metrics.tracker import MetricsLines, Tracker, as_lines, check_lines, read_metrics
from trainer.reports.report import write_report


def test_a_line_has_the_step_then_sorted_names_and_valid_json(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(0, {"val/accuracy": 0.5})
    tracker.log(
        1,
        {
            "reward/std": float("inf"),
            "reward/mean": np.float32(0.25),
            "policy/kl": float("nan"),
            "progress/prompts": np.int64(64),
        },
    )
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 0, "val/accuracy": 0.5}\n'
        '{"step": 1, "policy/kl": null, "progress/prompts": 64, "reward/mean": 0.25, "reward/std": null}\n'
    )
    tracker.close()
    tracker.close()  # harmless


def test_logging_a_step_twice_is_a_bug(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(3, {"reward/mean": 1.0})
    with pytest.raises(AssertionError, match="step 3 is logged after step 3"):
        tracker.log(3, {"reward/mean": 1.0})
    with pytest.raises(AssertionError, match="rewind first"):
        make_tracker(tmp_path).log(4, {"reward/mean": 1.0})
    assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 1


def test_a_new_run_in_an_old_directory_starts_from_nothing(tmp_path):
    make_tracker(tmp_path).log(7, {"reward/mean": 1.0})
    tracker = make_tracker(tmp_path)
    tracker.rewind(-1)
    tracker.log(0, {"reward/mean": 2.0})
    assert read_metrics(str(tmp_path / "metrics.jsonl")) == [{"step": 0, "reward/mean": 2.0}]


numbers = st.floats() | st.integers(-(2**60), 2**60)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(sorted(names.METRICS)), numbers), min_size=1, max_size=8),
    kept_bytes=st.floats(0, 1),
    tail=st.sampled_from([b"", b"\0" * 100]),
    resume=st.floats(0, 1),
)
def test_a_run_cut_anywhere_and_resumed_has_the_file_of_the_uninterrupted_run(
    tmp_path_factory, rows, kept_bytes, tail, resume
):
    run_dir = tmp_path_factory.mktemp("run")
    path = run_dir / "metrics.jsonl"
    tracker = make_tracker(run_dir)
    for step, row in enumerate(rows):
        tracker.log(step, row)
    tracker.close()
    whole = path.read_bytes()

    # A power failure may cut the file anywhere, or leave zeros for what was not written yet.
    cut = whole[: round(kept_bytes * len(whole))] + tail
    path.write_bytes(cut)
    (run_dir / "metrics.jsonl.tmp").write_bytes(b'{"left by": a ki')
    lines = cut.count(b"\n")
    step = round(resume * lines) - 1  # the checkpoint's: all lines up to it are in the file
    tracker = make_tracker(run_dir)
    tracker.rewind(step)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: step + 1])
    for later in range(step + 1, len(rows)):
        tracker.log(later, rows[later])
    tracker.close()
    assert path.read_bytes() == whole
    assert os.listdir(run_dir) == ["metrics.jsonl"]


def test_what_was_logged_survives_a_kill(tmp_path):
    code = """
import sys
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker
tracker = Tracker(sys.argv[1], LoggerConfig(), {})
for step in range(10**6):
    tracker.log(step, {"reward/mean": step / 7, "policy/kl": 1e-300})
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(200):
        process.stdout.readline()
    process.kill()
    logged = 200 + len(process.stdout.read().splitlines())
    process.wait()
    rows = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert len(rows) >= logged
    assert rows == [{"step": s, "policy/kl": 1e-300, "reward/mean": s / 7} for s in range(len(rows))]


def test_a_full_disk_costs_nothing_that_was_written(tmp_path):
    code = """
import resource, sys
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker
tracker = Tracker(sys.argv[1], LoggerConfig(), {})
if sys.argv[2] == "rewind":
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    tracker.rewind(3)
else:
    for step in range(4):
        tracker.log(step, {"reward/mean": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
    tracker.log(4, {"reward/mean": 1.0})
"""
    path = tmp_path / "metrics.jsonl"
    logging = run_python(code, str(tmp_path), "log")
    assert logging.returncode == 0 and "metrics.jsonl: cannot be written (No space left on device)" in logging.stderr
    assert [row["step"] for row in read_metrics(str(path))] == [0, 1, 2, 3]
    before = path.read_bytes()
    rewinding = run_python(code, str(tmp_path), "rewind")
    assert rewinding.returncode == 0 and path.read_bytes() == before  # nothing is written


def test_reading_leaves_out_a_torn_end_and_refuses_rubbish_elsewhere(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": null}\n{"step": 2, "a"')
    assert read_metrics(str(path)) == [{"step": 1, "a": None}]
    path.write_text('{"step": 1}\n{"step": 2, "a": 1e999}\n{"step": 3}\n{"step": 4, "a": 0.\0\0}\n')
    lines = MetricsLines(str(path))
    assert list(lines.steps) == [1, 2, 3] and lines[2] == {"step": 3} and lines.after(2) == lines[2:]
    with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object"):
        list(lines)
    with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object"):
        check_lines(str(path), 1, 3)
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object"):
        read_metrics(str(path))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl:2"):
        make_tracker(tmp_path).rewind(1)
    assert path.read_bytes() == before


def test_the_run_id_is_kept_while_wandb_is_off(tmp_path):
    assert make_tracker(tmp_path).state_dict() == {"wandb_run_id": None}
    tracker = Tracker(str(tmp_path), LoggerConfig(), {}, run_ids={"wandb_run_id": "abcd1234"})
    assert tracker.state_dict() == {"wandb_run_id": "abcd1234"}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"step": 2, "reward/mean": "nan"}', "reward/mean is 'nan'"),
        (b'{"step": 2, "reward/mean": NaN}', "reward/mean is nan"),
        (b'{"reward/mean": 0.5}', "step is missing"),
        (b"[]", "it holds list instead of fields"),
        (b'{"step": 2,', "Expecting property name .*"),
    ],
)
def test_the_problem_of_a_line_of_metrics_is_named(tmp_path, line, problem):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    sentence = rf"^{path}:2 has no JSON object with a step and numbers \({problem}\); repair or remove the file$"
    with pytest.raises(UserError, match=sentence):
        read_metrics(str(path))


def test_a_long_run_is_thinned_evenly_with_its_validations(tmp_path):
    path, long = tmp_path / "metrics.jsonl", range(2500)  # more lines than are read at once
    rows = [{"step": step, "loss": 1.0} | ({"val/accuracy": step / 1e4} if step % 3 == 0 else {}) for step in long]
    path.write_text(as_lines(rows))
    thinned = {row["step"]: row for row in MetricsLines(str(path)).thinned(100, steps=[7])}
    whole = {*range(0, 2500, 25), 7, 2499}
    assert thinned == {step: rows[step] for step in whole} | {
        step: {"step": step, "val/accuracy": step / 1e4} for step in range(0, 2500, 27) if step not in whole
    }
    assert [row["step"] for row in MetricsLines(str(path)).having("val/acc")] == list(range(0, 2500, 3))
    assert [row["step"] for row in MetricsLines(str(path)).having("lo")] == list(long)
    assert list(MetricsLines(str(path)).having("oss")) == list(MetricsLines(str(path)).having("val/loss")) == []


@pytest.mark.parametrize(
    "line",
    [DEEP_JSON, b'{"step": "1"}', b'{"step": 1e3}', b'{"step": true}', b'{"step": 5, "a": "b"}',
     b'{"step": 5, "a": []}', b'{"step": -1}', b'{"step": 5, "a": ' + b"9" * 400 + b"}",
     b'{"step": 5, "a": Infinity}', b"\xff"],
    ids=range(10),
)  # fmt: skip
def test_lines_of_metrics_of_another_shape_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward/mean": 0.5}\n' + line + b"\n" + b'{"step": 6}\n')
    for read in (lambda: read_metrics(str(path)), lambda: write_report(str(tmp_path))):
        with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object with a step"):
            read()
