"""A job that gets a signal at one moment after another."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml

from tests.support.jobs import comparable, metrics
from tests.support.signalled_jobs import WAYS, ForkedJobs

MOMENTS = [
    ("start", 0.2),
    ("reading the data", 0.0),
    ("loading the model into the ranks", 0.3),
    ("starting what generates and rewards", 0.0),
    ("evaluating the initial weights", 0.0),
    ("step 1/3", 0.0),
]
"""In the order of a run, which continues after each of them."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_at_any_moment_exits_75_with_one_message_and_no_processes(tmp_path):
    jobs = ForkedJobs(tmp_path)
    for (moment, delay_s), way in zip(MOMENTS, itertools.cycle(WAYS)):
        status, output = jobs.run(moment, delay_s, way)
        where = f"{way} {delay_s} s after {moment!r}: {output}"
        if status != 0 or "finished step 3" not in output:  # a run that is hit at its last instant has finished
            assert status == 75, where
            last_line = output.strip().splitlines()[-1]
            assert last_line.startswith("stopped ") and output.count("stopped ") == 1, where
            assert "the same command with trainer.resume_mode=latest continues" in last_line, where
            if moment != "start":
                assert (tmp_path / "run/log.txt").read_text().endswith(f" {last_line}\n"), where
        assert "Traceback" not in output and "Exception ignored" not in output, where
        assert not (tmp_path / "run/.lock").exists(), where
    status, output = jobs.run()
    assert status == 0 and "finished step 3" in output, output
    (tmp_path / "uninterrupted").mkdir()
    assert ForkedJobs(tmp_path / "uninterrupted").run()[0] == 0
    assert comparable(metrics(tmp_path / "run")) == comparable(metrics(tmp_path / "uninterrupted/run"))
    log = (tmp_path / "run/log.txt").read_text()
    starts = [json.loads(line) for line in (tmp_path / "run/starts.jsonl").read_text().splitlines()]
    assert len(starts) == log.count(" start of ") >= len([moment for moment, _ in MOMENTS if moment != "start"])
    assert starts[-1]["config"] == yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    for line in ("step 1/3", "step 3/3", "finished step 3 of 3"):
        assert line in log
