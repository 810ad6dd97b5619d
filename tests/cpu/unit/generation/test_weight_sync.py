"""How weights travel to engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.generation.weight_sync import Broadcast


def test_all_ranks_step_through_a_broadcast():
    """Gathering a tensor is a collective, so a rank that sends nothing must still come along."""
    seen = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            seen.append(i)
            yield f"w{i}", torch.zeros(1)

    Broadcast("127.0.0.1:1", receivers=1, device="cpu", timeout_s=1).send(weights(), rank=1)
    assert seen == [0, 1, 2]
