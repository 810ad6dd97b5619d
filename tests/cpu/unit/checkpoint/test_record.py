"""The record of the last commit, which lets a start notice that its checkpoints are gone."""

from __future__ import annotations

import pytest

from tests.support.odd_files import ODD_JSON
from trainer.checkpoint import record
from trainer.errors import UserError


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path):
    record.check_nothing_committed(str(tmp_path), "there")
    record.write(str(tmp_path), 3, "/there")
    assert record.exists(str(tmp_path)) and record.read(str(tmp_path)) == "/there"
    with pytest.raises(UserError, match="no checkpoint is there, and .* committed global_step_3 in /there; mount"):
        record.check_nothing_committed(str(tmp_path), "/there")
    record.remove(str(tmp_path))
    record.remove(str(tmp_path))
    record.check_nothing_committed(str(tmp_path), "/there")


@pytest.mark.parametrize("content", ODD_JSON, ids=range(len(ODD_JSON)))
def test_a_damaged_record_proves_a_commit(tmp_path, content):
    (tmp_path / record.NAME).write_bytes(content)
    assert record.read(str(tmp_path)) is None
    with pytest.raises(UserError, match="this run has committed a checkpoint; mount"):
        record.check_nothing_committed(str(tmp_path), "/there")
