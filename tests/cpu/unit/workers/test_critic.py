"""The critic of a rank: its values, and its update towards the returns. `test_update_reference.py` has every number."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import GROUPS, assembled, config, make_batch, update
from tests.support.whole_batches import compute_batch
from trainer.workers.base import CriticWorker
from trainer.workers.rank import Rank


def learn(rank: Rank, path: str) -> dict[str, Any]:
    """Values before and after some updates."""
    rank.build(roles(rank.cfg, ["critic"]), path)
    assert isinstance(rank.roles["critic"], CriticWorker)
    batch = make_batch()
    found: dict[str, Any] = {}
    for name in ("before", "after"):
        rows, values = compute_batch(rank, "critic", "values", batch)
        found[name] = {"rows": rows, "values": values}
        if name == "before":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found["metrics"] = [update(rank, "critic", batch, step) for step in range(1, 6)]
            found["warnings"] = [str(one.message) for one in caught if "FSDP" in str(one.message)]
    return found


def test_values_start_at_0_and_approach_the_returns(model_path):
    results = run_ranks(2, learn, model_path, cfg=config(mini_batch_size=GROUPS))
    batch = make_batch()
    before, after = (assembled([result[name] for result in results], "values") for name in ("before", "after"))
    assert not before.any(), "its head starts at 0"
    error, start = (np.square((values - batch["returns"]) * batch["mask"]).sum() for values in (after, before))
    assert error < start
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["warnings"] == [], "an objective may change the values in place: FSDP's hook stays"
    assert not (after * (np.arange(after.shape[1]) >= batch["lengths"][:, None])).any(), "padding has no value"
