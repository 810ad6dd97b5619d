"""Supervised episodes: examples, or rollouts of earlier runs, whose tokens are to be learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import xxhash

from trainer.config import SFTConfig
from trainer.data.ledger import Ledger, SampleIndex
from trainer.episodes import Episode, Sample
from trainer.seeding import permutation


class SupervisedSource:
    """Examples drawn in epochs, as many a step as fill `sft.batch_size` rows of `sft.max_length` tokens.

    Args:
        parts: the data sets.
        seed: of the run.
    """

    def __init__(self, sft: SFTConfig, parts: Sequence[Sequence[Sample]], seed: int):
        self.sft = sft
        self._parts = parts
        self._seed = seed
        self.ledger = Ledger(parts, seed, "examples", self._fingerprint, sft.weights)
        self._steps: dict[int, list[SampleIndex]] = {}
        """Rows of the steps that are not committed."""

    def __str__(self) -> str:
        return f"{sum(map(len, self._parts)):,} examples"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""

    @property
    def epoch(self) -> float:
        return self.ledger.epoch

    def start(self, version: int, is_initial: bool) -> None:
        """Examples need no policy."""

    def publish(self, version: int) -> None:
        """Examples need no policy."""

    def next(self, step: int) -> list[Episode]:
        """Return the next examples: they fill rows in order, until the next one does not fit into the last row."""
        rows, width = self.sft.batch_size, self.sft.max_length
        draws: list[SampleIndex] = []
        episodes: list[Episode] = []
        row, used = 1, 0
        for draw in self.ledger.ahead():
            sample = self._parts[draw.dataset][draw.index]
            if used + len(sample.token_ids) > width:
                row, used = row + 1, 0
                if row > rows:
                    break
            used += len(sample.token_ids)
            draws.append(draw)
            uid = f"{draw.epoch}:{draw.index}:{draw.dataset}"
            episodes.append(Episode(uid, uid, [sample]))
        self._steps[step] = draws
        return episodes

    def add_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def commit(self, step: int) -> None:
        self.ledger.commit(self._steps.pop(step))

    def some_examples(self, count: int) -> list[Sample]:
        """Return at most `count` of the examples, drawn by the seed of the run."""
        examples = [example for part in self._parts for example in part]
        return [examples[i] for i in permutation(len(examples), self._seed, "some examples")[:count]]

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.clear()
        self.ledger.load_state_dict(state)

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for part in self._parts:
            digest.update(f"data set of {len(part)}".encode())
            for sample in part:
                digest.update(f"example of {len(sample.token_ids)}".encode())
                digest.update(sample.token_ids.astype(np.int64).tobytes())
                for values in (sample.mask, [] if sample.logprobs is None else sample.logprobs):
                    digest.update(np.asarray(values, dtype=np.float64).tobytes())
        return digest.hexdigest()
