"""The critic: values and the value update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from trainer.algorithms import Totals, value_loss
from trainer.config import Config, RoleSpec
from trainer.parallel.batching import Batch, MicroBatch
from trainer.parallel.layout import Layout
from trainer.workers.base import TrainedWorker


class CriticWorker(TrainedWorker):
    """The critic and its optimizer."""

    def __init__(
        self,
        spec: RoleSpec,
        module: nn.Module,
        layout: Layout,
        cfg: Config,
        before_weights_change: Callable[[], None],
    ):
        super().__init__(spec, module, layout, cfg.trainer, before_weights_change)
        self.value_clip = cfg.algorithm.value_clip

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: self.module(mb.input_ids, mb.packing))

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Make all optimizer steps of one step of the loop.

        Args:
            batch: `input_ids`, `mask`, `values` (of the critic before the update), `returns`: `(B, T)`; `lengths`,
                `group_ids`: `(B,)`.

        Returns:
            the means of `loss`, `clip_frac` and `grad_norm` over the mini-batches (see `TrainedWorker.train`), and
            `lr`.
        """
        return self.train(batch, step, self._update_mini_batch)

    def _update_mini_batch(self, batch: Batch) -> dict[str, float]:
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["mask"])))

        def loss_function(mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            values = self.module(mb.input_ids, mb.packing)
            return value_loss(
                values, mb["values"], mb["returns"], mb["mask"], value_clip=self.value_clip, totals=totals
            )

        return self.optimizer_step(batch, loss_function)
