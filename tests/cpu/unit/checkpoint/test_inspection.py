"""What users see of checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.checkpoints import manager, parts_of, save
from trainer.checkpoint.inspection import age, axes_of, check_content, check_step, describe_all, list_steps
from trainer.checkpoint.manifest import CorruptCheckpointError, read
from trainer.errors import UserError


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 2)])
def test_the_best_is_that_of_the_metric_of_the_newest(tmp_path, mode, best):
    checkpoints = manager(tmp_path)
    scores = {1: ("other", 9.0), 2: ("reward", 1.0), 3: ("reward", 2.0), 4: ("reward", 2.0)}
    for step, (metric, score) in scores.items():
        save(checkpoints, step, score=score, score_metric=metric, score_mode=mode)
    Path(checkpoints.store.path(4), "weights/shard").unlink()
    rows = describe_all(checkpoints.store, "size")
    assert [row["step"] for row in rows if row["best"]] == [best]
    assert [row["step"] for row in rows if row["latest"]] == [3], "4 is damaged"
    assert rows[3]["problem"] == "weights/shard is missing"


def test_files_are_read_until_the_time_is_over(tmp_path):
    checkpoint = read(save(manager(tmp_path), 1, parts_of({"n": 1, "bytes": b"x" * 100})))
    total = sum(entry.bytes for entry in checkpoint.entries)
    assert check_content(checkpoint, 0) == (0, total)
    assert check_content(checkpoint, 60) == (total, total)
    Path(checkpoint.path, "weights/shard").write_bytes(b"y" * 100)
    with pytest.raises(CorruptCheckpointError, match="weights/shard does not have the content"):
        check_content(checkpoint, 60)


def test_a_step_that_is_missing_is_named_with_those_there_are(tmp_path):
    checkpoints = manager(tmp_path)
    save(checkpoints, 2)
    check_step(checkpoints.store, 2, "--step")
    with pytest.raises(UserError, match="--step=3: .* has no checkpoint of that step; it has 2$"):
        check_step(checkpoints.store, 3, "--step")
    assert list_steps(list(range(5)), most=2) == "3, 4 and 3 older ones"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3 * 86400, "3 d"), (2 * 3600, "2 h"), (130, "2 m"), (5, "5 s"), (-60, "in the future")]
)
def test_the_age_of_a_checkpoint(seconds, text):
    assert age((datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()) == text


def test_axes_with_several_ranks_are_named():
    assert axes_of({"dp_shard": 4, "tp": 1}) == "dp_shard 4" and axes_of({"tp": 1}) == "one rank"
    assert axes_of(None) == "axes unknown"
