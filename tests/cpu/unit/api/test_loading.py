"""Checkpoints from Python: what needs no model. `test_python.py` loads those of a run."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import manager, save
from trainer import UserError, load_checkpoint
from trainer.checkpoint import last_commit


def test_the_newest_valid_checkpoint_of_a_run_is_loaded(tmp_path):
    checkpoints = manager(tmp_path / "checkpoints")
    for step in (2, 10, 12):
        save(checkpoints, step)
    (tmp_path / "checkpoints/global_step_12/weights/shard").write_bytes(b"xyz")
    for path in (tmp_path, str(tmp_path / "checkpoints")):
        assert load_checkpoint(path).step == 10
    assert load_checkpoint(tmp_path / "checkpoints/global_step_2").step == 2
    with pytest.raises(UserError, match="weights/shard"):
        load_checkpoint(tmp_path / "checkpoints/global_step_12")


def test_checkpoints_elsewhere_are_found_by_the_record_of_the_run(tmp_path):
    save(manager(tmp_path / "elsewhere"), 3)
    (tmp_path / "run").mkdir()
    last_commit.write(str(tmp_path / "run"), 3, str(tmp_path / "elsewhere"))
    assert load_checkpoint(tmp_path / "run").step == 3


def test_a_missing_checkpoint_and_a_missing_policy_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="no checkpoint is there or in its checkpoints directory"):
        load_checkpoint(tmp_path)
    save(manager(tmp_path), 1)
    with pytest.raises(UserError, match="contains no policy"):
        load_checkpoint(tmp_path).policy_state_dict()
    with pytest.raises(UserError, match="dtype=int8: must be one of auto"):
        load_checkpoint(tmp_path).model("int8")
