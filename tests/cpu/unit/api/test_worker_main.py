"""The process of a run that `trainer.train` has started: what it is told, what it tells, and when it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.jobs import environment
from trainer.api.running import PYTHON_RUN


def run(directory: Path, *overrides: str, parent: int | None = None, pickles: dict[str, Any] | None = None):
    """The status of the process, its reports, and its output."""
    own, other = multiprocessing.Pipe()
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", PYTHON_RUN],
            cwd=directory,
            stdin=other.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    message = {"parent": parent or os.getpid(), "overrides": list(overrides), "pickles": pickles or {}, "asks": False}
    reports = []
    with own, contextlib.suppress(EOFError, ConnectionError):
        own.send(message)
        while True:
            reports.append(own.recv())
    output, _ = process.communicate(timeout=300)
    return process.returncode, reports, output.decode()


def test_a_refused_config_is_a_report_and_not_printed(tmp_path):
    status, reports, output = run(tmp_path, "trainer.nub_workers=2")
    assert (status, output, len(reports)) == (2, "", 1)
    assert reports[0]["text"].startswith("trainer.nub_workers: no such key")


def test_the_places_of_the_run_come_first_and_then_the_reason_of_its_end(tmp_path):
    (tmp_path / "run").touch()
    status, (places, end), _ = run(tmp_path, "trainer.run_dir=run")
    assert status == 2 and end["text"].startswith("trainer.run_dir=run: ")
    assert places["run_dir"] == f"{tmp_path}/run" and places["ckpt_path"] == f"{tmp_path}/run/checkpoints"
    assert (places["best_metric"], places["best_mode"]) == ("val/accuracy", "max")


def test_a_process_whose_parent_has_died_before_it_could_notice_ends(tmp_path):
    status, reports, output = run(tmp_path, "trainer.run_dir=run", parent=1)
    assert (status, reports, output) == (1, [], "") and os.listdir(tmp_path) == []
