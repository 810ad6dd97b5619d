"""Which rows of several sources come next: each source has a ledger of its own, and weights say whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

from trainer.data.ledger import FORMAT_OF_MIX, HOW_TO_FORK, Ledger, SampleIndex
from trainer.errors import UserError, as_list
from trainer.files.documents import Shape, is_count, is_number, mismatch

_STATE: dict[Any, Shape] = {
    "sources": [{"name": str, "trained": is_count, "since": is_count, "ledger": dict}],
    "weights": {str: is_number},
}


class MixLedger:
    """Draws rows of several sources in exact proportion to their weights.

    The next row comes from the source that is furthest behind its share of the rows drawn so far. How many rows are
    trained or in flight decides that, and nothing else. So no source is ever a whole row ahead of its share, and a run
    that is killed draws what it would have drawn. `SampleIndex.dataset` is the number of a source. A source keeps its
    number for the whole run.

    A resume may change weights and the set of sources: then shares count from the step of the resume on. A new source
    begins with its first row. A source that is dropped keeps its place, and continues there if it comes back.

    Args:
        ledgers: of the sources, by their names.
        weights: of the sources.
        rows: number of rows of each source.
    """

    def __init__(self, ledgers: Mapping[str, Ledger], weights: Mapping[str, float], rows: Mapping[str, int]):
        assert ledgers and ledgers.keys() == weights.keys() == rows.keys()
        self._ledgers = dict(sorted(ledgers.items()))
        self._weights = {name: float(weights[name]) for name in self._ledgers}
        self._rows = rows
        self._begin()

    def _begin(self) -> None:
        self._names = list(self._ledgers)
        """By number, with those that earlier starts had."""
        self._dropped: dict[str, dict[str, Any]] = {}
        """What was saved of the sources that earlier starts had."""
        self._trained: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        """Rows that were trained when the present weights began to count."""

    @property
    def epoch(self) -> float:
        """Rows trained, divided by the number of rows of all sources."""
        return sum(self._trained[name] for name in self._ledgers) / sum(self._rows[name] for name in self._ledgers)

    def progress(self, indices: Sequence[SampleIndex]) -> dict[str, tuple[int, float]]:
        """Return the rows of each source that are trained once these are, and their number in epochs."""
        counts = self._trained + Counter(map(self.name_of, indices))
        return {name: (counts[name], counts[name] / self._rows[name]) for name in self._ledgers}

    def name_of(self, index: SampleIndex) -> str:
        """Return the name of the source of a row."""
        return self._names[index.dataset]

    def row(self, index: SampleIndex) -> Any:
        return self._ledgers[self.name_of(index)].row(_in_source(index))

    def ahead(self, in_flight: Collection[SampleIndex] = ()) -> Iterator[SampleIndex]:
        """Yield the rows to train on next, without end (see `Ledger.ahead`)."""
        by_source: dict[str, list[SampleIndex]] = {name: [] for name in self._names}
        for index in in_flight:
            by_source[self.name_of(index)].append(_in_source(index))
        rows = {name: ledger.ahead(by_source[name]) for name, ledger in self._ledgers.items()}
        counts = {name: self._trained[name] - self._since[name] + len(by_source[name]) for name in self._ledgers}
        weights = {name: Fraction(weight) for name, weight in self._weights.items()}
        total = sum(weights.values())
        while True:
            drawn = sum(counts.values()) + 1
            name = max(counts, key=lambda name: weights[name] * drawn - counts[name] * total)  # the first of equal ones
            counts[name] += 1
            yield replace(next(rows[name]), dataset=self._names.index(name))

    def peek(self, count: int, in_flight: Collection[SampleIndex] = ()) -> list[SampleIndex]:
        """Return the next `count` rows (see `ahead`). Changes nothing."""
        return list(islice(self.ahead(in_flight), count))

    def commit(self, indices: Sequence[SampleIndex], rewards: Sequence[float | None] = ()) -> None:
        """Record that these rows have been trained on (see `Ledger.commit`)."""
        assert all(self.name_of(index) in self._ledgers for index in indices)
        for name, ledger in self._ledgers.items():
            chosen = [i for i, index in enumerate(indices) if self.name_of(index) == name]
            ledger.commit([_in_source(indices[i]) for i in chosen], [rewards[i] for i in chosen] if rewards else ())
            self._trained[name] += len(chosen)

    # ---------------------------------------------------------------------------------------------------
    # State

    def state_dict(self) -> dict[str, Any]:
        counts = {name: {"trained": self._trained[name], "since": self._since[name]} for name in self._ledgers}
        saved = {
            name: {"name": name, **counts[name], "ledger": one.state_dict()} for name, one in self._ledgers.items()
        }
        sources = [saved.get(name) or self._dropped[name] for name in self._names]
        return {"format": FORMAT_OF_MIX, "sources": sources, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken without a mix, a source had other rows or another seed, or the state is damaged.
        """
        if state.get("format") != FORMAT_OF_MIX:
            raise UserError(
                "data.mix: the run was saved without a mix, and its position in the data means nothing in one; restore "
                f"data.train_files or data.synthetic, or {HOW_TO_FORK}"
            )
        problem = mismatch(state, _STATE)
        if problem is None and len({one["name"] for one in state["sources"]}) < len(state["sources"]):
            problem = "it has a source twice"
        if problem is None and any(one["since"] > one["trained"] for one in state["sources"]):
            problem = "its counts contradict each other"
        if problem is not None:
            raise UserError(
                f"data: the checkpoint's position in the data is corrupt ({problem}); use another checkpoint"
            )
        saved = {one["name"]: one for one in state["sources"]}
        refused = []
        for name, ledger in self._ledgers.items():
            try:
                if name in saved:
                    ledger.load_state_dict(saved[name]["ledger"])
                else:
                    ledger.restart()
            except UserError as error:
                refused.append(str(error))
        if refused:
            raise UserError(as_list("the run cannot continue with this data.mix:", refused))
        self._begin()
        self._names = [*saved, *(name for name in self._ledgers if name not in saved)]
        self._dropped = {name: one for name, one in saved.items() if name not in self._ledgers}
        known = {name: saved[name] for name in self._ledgers if name in saved}
        self._trained.update({name: one["trained"] for name, one in known.items()})
        is_same = state["weights"] == self._weights
        self._since.update({name: one["since"] for name, one in known.items()} if is_same else self._trained)


def _in_source(index: SampleIndex) -> SampleIndex:
    """Return the index of a row in the ledger of its source."""
    return replace(index, dataset=0)
