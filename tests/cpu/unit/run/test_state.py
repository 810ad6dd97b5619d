"""The state of a run in a checkpoint, also in one of an earlier version."""

from __future__ import annotations

import pytest

from trainer.files.documents import mismatch
from trainer.run.state import TrainerState, shape_of_state

TRACKER = {"tracker": {"wandb_run_id": "abc"}}
OTHERS = {"kl_controller": {"kind": "fixed", "coef": 0.0}, "rng": {"torch": ""}, **TRACKER}


def test_a_state_comes_back_as_it_was_saved():
    state = TrainerState(7, 28, 112, 4000, {"val/accuracy": 0.5, "step": 4})
    saved = state.state_dict() | OTHERS
    assert mismatch(saved, shape_of_state(saved)) is None
    loaded = TrainerState()
    loaded.load_state_dict(saved)
    assert loaded == TrainerState(7, 28, 112, 4000, {"val/accuracy": 0.5, "step": 4}, {"wandb_run_id": "abc"})


def test_the_short_state_of_earlier_supervised_runs_is_taken():
    saved = {"step": 7, **TRACKER}
    assert mismatch(saved, shape_of_state(saved)) is None
    loaded = TrainerState()
    loaded.load_state_dict(saved)
    assert loaded == TrainerState(7, run_ids={"wandb_run_id": "abc"})


@pytest.mark.parametrize("name", ["counters", "kl_controller", "best", "rng", "step", "tracker"])
def test_a_state_that_lacks_a_part_is_damaged(name):
    saved = TrainerState(7).state_dict() | OTHERS
    del saved[name]
    assert mismatch(saved, shape_of_state(saved)) == f"{name} is missing"
