"""A trained value model: the critic."""

from __future__ import annotations

import numpy as np

from trainer.objectives.base import Outputs
from trainer.parallel.batching import MicroBatch
from trainer.parallel.shares import Part, Share
from trainer.workers.base import TrainedWorker


class CriticWorker(TrainedWorker):
    """The critic and its optimizer."""

    def values(self, share: Share) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of this rank's rows of a batch (see `ModelWorker.map_rows`)."""
        return self.map_rows(share, lambda mb: self.module(mb.input_ids, mb.packing))

    def outputs(self, mb: MicroBatch, part: Part) -> Outputs:
        return Outputs(values=self.module(mb.input_ids, mb.packing))
