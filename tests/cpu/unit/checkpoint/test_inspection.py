"""What users see of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint.inspection import (
    check_step,
    choose_checkpoint,
    describe_all,
    list_steps,
    open_run,
    read_named,
)
from trainer.checkpoint.manifest import CorruptCheckpointError
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


def test_a_step_that_is_missing_is_named_with_those_there_are(tmp_path):
    checkpoints = manager(tmp_path)
    save(checkpoints, 2)
    check_step(checkpoints.store, 2, "--step")
    with pytest.raises(UserError, match="--step=3: .* has no checkpoint of that step; it has 2$"):
        check_step(checkpoints.store, 3, "--step")
    assert list_steps(list(range(5)), most=2) == "3, 4 and 3 older ones"


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_a_checkpoint_is_chosen_by_its_step_or_its_score_and_read_whole(tmp_path, mode, best):
    checkpoints = manager(tmp_path / "run/checkpoints")
    for step, score in ((1, 0.5), (2, 0.75), (3, 0.25), (4, None)):
        save(checkpoints, step, score=score, score_metric="val/accuracy", score_mode=mode)
    run = str(tmp_path / "run")
    assert open_run(run).root == checkpoints.store.root
    newest, why = choose_checkpoint(run, None, best=False)
    assert (newest.step, why) == (4, "") and read_named(newest.path).step == 4
    assert choose_checkpoint(run, 1, best=False)[0].step == 1
    chosen, why = choose_checkpoint(run, None, best=True)
    assert chosen.step == best and why.startswith(" (the best of 3: val/accuracy 0.")
    (tmp_path / f"run/checkpoints/global_step_{best}/weights/shard").write_bytes(b"shorter")
    with pytest.raises(CorruptCheckpointError, match=f"global_step_{best}: weights/shard"):
        choose_checkpoint(run, best, best=False)


def test_what_names_no_checkpoint_gets_one_sentence(tmp_path):
    save(manager(tmp_path / "run"), 10)
    one = str(tmp_path / "run/global_step_10")
    with pytest.raises(UserError, match="is one checkpoint, and --best and --step choose one of a run; name the run"):
        choose_checkpoint(one, None, best=True)
    with pytest.raises(UserError, match="is one checkpoint; name its run"):
        open_run(one)
    with pytest.raises(UserError, match=r"--step=3: .* has no checkpoint of that step; it has 10"):
        choose_checkpoint(str(tmp_path / "run"), 3, best=False)
    with pytest.raises(UserError, match="--best: no checkpoint of .* has a score; name one with --step, of 10"):
        choose_checkpoint(str(tmp_path / "run"), None, best=True)
    with pytest.raises(UserError, match="no checkpoint is there; looked in it"):
        read_named(str(tmp_path / "none"))
