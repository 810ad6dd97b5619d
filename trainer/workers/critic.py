"""The critic: values and the value update."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms import Totals, value_loss
from trainer.config import AlgorithmConfig
from trainer.parallel.batching import Batch
from trainer.workers.base import TrainedWorker


class CriticWorker(TrainedWorker):
    role = "critic"

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Values of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: self.module(mb["input_ids"]))

    def update(self, batch: Batch, algorithm: AlgorithmConfig) -> dict[str, float]:
        """One optimizer step on a mini-batch of experience.

        Args:
            batch: `input_ids`, `response_mask`, `values` (old ones), `returns`: `(B, T)`; `lengths`: `(B,)`.

        Returns:
            `loss`, `clip_frac`, `grad_norm`, `lr`.
        """
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["response_mask"])))

        def loss_function(mb: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return value_loss(
                self.module(mb["input_ids"]), mb["values"], mb["returns"], mb["response_mask"],
                value_clip=algorithm.value_clip, totals=totals,
            )  # fmt: skip

        return self.optimizer_step(batch, loss_function)
