"""Saved states of random generators."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.parallel.rng import capture_rng, restore_rng, rng_as_text, rng_from_text


def test_states_of_random_generators_that_cannot_be_are_refused():
    good = rng_as_text(capture_rng())
    restore_rng(rng_from_text(good))
    for bad in ({}, good | {"torch": ""}, good | {"torch": "AAAA"}, good | {"others": "e30="}, good | {"others": "x"}):
        with pytest.raises(UserError, match="random generators are damaged"):
            restore_rng(rng_from_text(bad))
