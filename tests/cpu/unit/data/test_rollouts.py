"""Rollouts written as data."""

from __future__ import annotations

import os

import pytest

from tests.support.runs import OpenRun, settings
from trainer.data.datasets import Prompt
from trainer.data.rollouts import write_rollouts
from trainer.errors import UserError


def test_a_job_that_lost_its_run_directory_publishes_no_rollouts(tmp_path):
    with OpenRun(settings(tmp_path)) as run:
        prompts = [Prompt(0, (1,), "a", "b")]
        write_rollouts(str(tmp_path), 1, prompts, [], [], run.directory.check)
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match="lost the run directory"):
            write_rollouts(str(tmp_path), 2, prompts, [], [], run.directory.check)
    assert os.listdir(tmp_path / "rollouts") == ["step_1.jsonl"]
