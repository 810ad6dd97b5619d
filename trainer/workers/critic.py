"""A trained value model: the critic."""

from __future__ import annotations

import numpy as np

from trainer.objectives.base import Outputs
from trainer.parallel.batching import Batch, MicroBatch
from trainer.workers.base import TrainedWorker


class CriticWorker(TrainedWorker):
    """The critic and its optimizer."""

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of this rank's rows of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: self.module(mb.input_ids, mb.packing))

    def outputs(self, mb: MicroBatch, mini_batch: Batch) -> Outputs:
        return Outputs(values=self.module(mb.input_ids, mb.packing))
