"""Saved states of random generators."""

from __future__ import annotations

import pytest
import torch

from trainer.errors import UserError
from trainer.parallel.rng import capture_rng, restore_rng, rng_as_text, rng_from_text


def test_corrupt_states_of_random_generators_are_refused():
    good = rng_as_text(capture_rng())
    restore_rng(rng_from_text(good))
    for bad in ({}, good | {"torch": ""}, good | {"torch": "AAAA"}, good | {"others": "e30="}, good | {"others": "x"}):
        with pytest.raises(UserError, match="random generators are corrupt"):
            restore_rng(rng_from_text(bad))


def test_the_driver_does_not_start_cuda_for_its_random_states(monkeypatch):
    """Asking for the state of a GPU's generator starts CUDA, for which the driver has no use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("CUDA has started"))
    assert set(capture_rng(with_gpu=False)) == {"torch", "others"}
