"""Teachers on inference servers: what they say of the tokens of a step, once, whatever happens to the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from trainer.config import Config
from trainer.config.tasks import ServerSpec
from trainer.episodes import Episode, Sample
from trainer.objectives.base import Computation
from trainer.parallel.batching import Batch


class ServerTeachers:
    """The teachers of a run that are on servers. A server need not give the same bits twice, so the journal keeps what
    it says. A resumed step reads it there."""

    def __init__(self, cfg: Config):
        self._specs = {spec.name: spec for spec in cfg.servers}
        self.records: Any = None
        """The journal of the run, which this package does not know: what it gets is durable before the step trains, and
        found again after a kill."""

    def __contains__(self, role: str) -> bool:
        return role in self._specs

    def compute(self, computation: Computation, batch: Batch, rows: np.ndarray, step: int) -> dict[str, np.ndarray]:
        """Return what a teacher says of rows of a batch, by the names of the arrays, each `(n, T)` or `(n, T, k)`. It
        is 0 where the mask is 0."""
        spec = self._specs[computation.role]
        top_k = spec.top_k if computation.output == "top_k" else 0
        masks = batch["mask"][rows] > 0
        ends = np.where(masks.any(axis=1), masks.shape[1] - masks[:, ::-1].argmax(axis=1), 1)
        sequences = [batch["input_ids"][row, :end] for row, end in zip(rows, ends, strict=True)]
        answers = self._recorded(spec, sequences, top_k, step)
        if not top_k:
            array = np.zeros(masks.shape, np.float32)
            for i, sample in enumerate(answers):
                array[i, 1 : ends[i]] = sample.logprobs
            return {computation.name: np.where(masks, array, 0)}
        ids, logprobs = (np.zeros((*masks.shape, top_k), dtype) for dtype in (np.int64, np.float32))
        for i, sample in enumerate(answers):
            ids[i, 1 : ends[i]] = sample.token_ids.reshape(-1, top_k)
            logprobs[i, 1 : ends[i]] = np.asarray(sample.logprobs).reshape(-1, top_k)
        return {f"{computation.name}_ids": ids, f"{computation.name}_logprobs": logprobs}

    def _recorded(self, spec: ServerSpec, sequences: Sequence[np.ndarray], top_k: int, step: int) -> list[Sample]:
        digest = xxhash.xxh3_128()
        for ids in sequences:
            digest.update(np.append(ids, -1).astype(np.int32).tobytes())
        records = self.records
        key = records.key(step, spec.name, spec.server.weights, top_k, digest.hexdigest())
        if records.is_on and (found := records.replay.find(step, [key])):
            return found[key][0].samples
        answers = [
            Sample(ids.ravel(), np.ones(ids.size, np.float32), logprobs.ravel())
            for ids, logprobs in spec.server.logprobs(sequences, top_k)
        ]
        records.add(step, {key: [Episode(f"{spec.name}:{step}:0", f"{spec.name}:{step}", answers)]})
        return answers
