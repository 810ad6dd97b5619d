"""The record of the last commit, which lets a start notice that its checkpoints are gone."""

from __future__ import annotations

import pytest

from tests.support.odd_files import ODD_JSON
from trainer.checkpoint import last_commit
from trainer.errors import UserError


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path):
    last_commit.check_nothing_committed(str(tmp_path), "there")
    last_commit.write(str(tmp_path), 3, "/there")
    assert last_commit.exists(str(tmp_path)) and last_commit.read(str(tmp_path)) == "/there"
    with pytest.raises(UserError, match="no checkpoint is there, and .* committed global_step_3 in /there; mount"):
        last_commit.check_nothing_committed(str(tmp_path), "/there")
    (tmp_path / last_commit.NAME).unlink()
    last_commit.check_nothing_committed(str(tmp_path), "/there")


def test_a_damaged_record_proves_a_commit(tmp_path):
    for content in ODD_JSON:
        (tmp_path / last_commit.NAME).write_bytes(content)
        assert last_commit.read(str(tmp_path)) is None
        with pytest.raises(UserError, match="this run has committed a checkpoint; mount"):
            last_commit.check_nothing_committed(str(tmp_path), "/there")
