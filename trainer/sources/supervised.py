"""Episodes of data that is there before the run: examples, or rollouts of earlier runs, whose tokens are learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import xxhash

from trainer.checkpoint.components import Component
from trainer.config import SFTConfig
from trainer.data.examples import Pair
from trainer.data.ledger import Ledger, MixLedger, SampleIndex
from trainer.episodes import MARGIN, Episode, Sample
from trainer.seeding import permutation
from trainer.sources.episode_metrics import mix_progress


class LedgerSource:
    """Base class of sources that sample nothing: a subclass makes the episodes of the rows that the ledger draws.

    Args:
        name: what the rows are, for the log.
    """

    repeats = True

    def __init__(self, ledger: Ledger | MixLedger, name: str):
        self.ledger = ledger
        self._name = name
        self._steps: dict[int, list[SampleIndex]] = {}  # rows of the steps that are not committed

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""

    @property
    def epoch(self) -> float:
        return self.ledger.epoch

    def start(self, version: int, is_initial: bool) -> None:
        """No policy is needed."""

    def publish(self, version: int) -> None:
        """No policy is needed."""

    def draw(self, step: int) -> list[tuple[SampleIndex, Sequence[Episode]]]:
        """Return the rows of `step`, each with its episodes, which are one group. Changes nothing."""
        raise NotImplementedError

    def group_of(self, index: SampleIndex) -> tuple[str, str]:
        """Return the name of a row's group, and its source (see `Episode.source`)."""
        if not isinstance(self.ledger, MixLedger):
            return f"{index.epoch}:{index.index}", ""
        name = self.ledger.name_of(index)
        return f"{name}:{index.epoch}:{index.index}", f"mix.{name}"

    def next(self, step: int) -> list[Episode]:
        drawn = self.draw(step)
        self._steps[step] = [index for index, _ in drawn]
        return [episode for _, episodes in drawn for episode in episodes]

    def add_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        return metrics | mix_progress(self.ledger, self._steps[step])

    def commit(self, step: int) -> None:
        self.ledger.commit(self._steps.pop(step))

    def components(self) -> list[Component]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.clear()
        self.ledger.load_state_dict(state)


class SupervisedSource(LedgerSource):
    """Examples drawn in epochs, as many a step as fill `sft.batch_size` rows of `sft.max_length` tokens.

    Args:
        datasets: the examples of each source of `data.mix`; without a mix, all examples are one.
        seed: of the run.
        weights: of the sources, by their names, in the order of `datasets`. Empty: there is no mix.
    """

    def __init__(
        self,
        sft: SFTConfig,
        datasets: Sequence[Sequence[Sample]],
        seed: int,
        weights: Mapping[str, float] | None = None,
    ):
        self.sft = sft
        self._datasets = datasets
        self._seed = seed
        ledger = ledger_of(datasets, seed, weights, "examples", fingerprint_of)
        super().__init__(ledger, f"{sum(map(len, datasets)):,} examples")

    def draw(self, step: int) -> list[tuple[SampleIndex, Sequence[Episode]]]:
        """Return the next examples: they fill rows in order, until the next one does not fit into the last row."""
        rows, width = self.sft.batch_size, self.sft.max_length
        drawn: list[tuple[SampleIndex, Sequence[Episode]]] = []
        row, used = 1, 0
        for index in self.ledger.ahead():
            sample: Sample = self.ledger.row(index)
            if used + len(sample.token_ids) > width:
                row, used = row + 1, 0
                if row > rows:
                    break
            used += len(sample.token_ids)
            uid, source = f"{index.epoch}:{index.index}:{index.dataset}", ""
            if isinstance(self.ledger, MixLedger):
                group, source = self.group_of(index)
                uid = f"{group}:0"
            drawn.append((index, [Episode(uid, uid, [sample], source=source)]))
        return drawn

    def some_examples(self, count: int) -> list[Sample]:
        """Return at most `count` of the examples, drawn by the seed of the run."""
        examples = [example for dataset in self._datasets for example in dataset]
        return [examples[i] for i in permutation(len(examples), self._seed, "some examples")[:count]]


class PairSource(LedgerSource):
    """Pairs of answers drawn in epochs, `trainer.train_batch_size` a step. Each is a group of two episodes.

    Args:
        size: number of pairs of a step.
        datasets, seed, weights: see `SupervisedSource`.
    """

    def __init__(
        self, size: int, datasets: Sequence[Sequence[Pair]], seed: int, weights: Mapping[str, float] | None = None
    ):
        self._size = size
        super().__init__(
            ledger_of(datasets, seed, weights, "pairs", _digest_pairs), f"{sum(map(len, datasets)):,} pairs"
        )

    def draw(self, step: int) -> list[tuple[SampleIndex, Sequence[Episode]]]:
        drawn = self.ledger.peek(self._size)
        return [(index, episodes_of(self.ledger.row(index), *self.group_of(index))) for index in drawn]


def episodes_of(pair: Pair, group: str, source: str = "") -> list[Episode]:
    """Return the episodes of a pair: the chosen answer has the reward 1, the other one 0."""
    terms = {MARGIN: pair.margin}
    return [
        Episode(f"{group}:{i}", group, [sample], reward=1.0 - i, rewards=terms, source=source)
        for i, sample in enumerate(pair.samples)
    ]


def ledger_of(
    datasets: Sequence[Sequence[Any]],
    seed: int,
    weights: Mapping[str, float] | None,
    name: str,
    digest: Callable[[Sequence[Any]], str],
) -> Ledger | MixLedger:
    """Return the ledger of the rows of each source.

    Args:
        weights: of the sources, by their names. None or empty: there is one source.
        name: what the rows are, for messages.
        digest: returns a digest of the rows of a source.
    """
    if not weights:
        (dataset,) = datasets
        return Ledger(dataset, seed, name, partial(digest, dataset))
    by_name = zip(weights, datasets, strict=True)
    ledgers = {source: Ledger(rows, seed, name, partial(digest, rows), source=source) for source, rows in by_name}
    return MixLedger(ledgers, weights)


def _digest_pairs(pairs: Sequence[Pair]) -> str:
    samples = [sample for pair in pairs for sample in pair.samples]
    margins = np.asarray([pair.margin for pair in pairs], dtype=np.float64)
    return fingerprint_of(samples) + xxhash.xxh3_128_hexdigest(margins.tobytes())


def fingerprint_of(examples: Sequence[Sample]) -> str:
    """Return a digest of examples."""
    digest = xxhash.xxh3_128()
    for sample in examples:
        digest.update(f"example of {len(sample.token_ids)}".encode())
        digest.update(sample.token_ids.astype(np.int64).tobytes())
        for values in (sample.mask, [] if sample.logprobs is None else sample.logprobs):
            digest.update(np.asarray(values, dtype=np.float64).tobytes())
    return digest.hexdigest()
