"""The state of a run in a checkpoint."""

from __future__ import annotations

import pytest

from trainer.files.documents import mismatch
from trainer.run.state import SHAPE_OF_STATE, TrainerState

TRACKER = {"tracker": {"wandb_run_id": "abc"}}
OTHERS = {"kl_controller": {"kind": "fixed", "coef": 0.0}, "rng": {"torch": ""}, "history": "h", **TRACKER}


def test_a_state_comes_back_as_it_was_saved():
    state = TrainerState(7, 28, 112, 4000, {"val/accuracy": 0.5, "step": 4})
    saved = state.state_dict() | OTHERS
    assert mismatch(saved, SHAPE_OF_STATE) is None
    loaded = TrainerState()
    loaded.load_state_dict(saved)
    assert loaded == TrainerState(7, 28, 112, 4000, {"val/accuracy": 0.5, "step": 4}, {"wandb_run_id": "abc"})


@pytest.mark.parametrize("name", ["counters", "kl_controller", "best", "rng", "step", "tracker", "history"])
def test_a_state_that_lacks_a_part_is_damaged(name):
    saved = TrainerState(7).state_dict() | OTHERS
    del saved[name]
    assert mismatch(saved, SHAPE_OF_STATE) == f"{name} is missing"
