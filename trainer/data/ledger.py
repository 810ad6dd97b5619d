"""Which rows of the data come next, and which have been trained on. One ledger for prompts and examples.

In a mix, each source has a ledger of its own, and weights say whose turn it is.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from types import NoneType
from typing import Any

import numpy as np
import xxhash

from trainer.errors import UserError, as_list
from trainer.files.documents import Shape, is_count, is_number, mismatch
from trainer.import_utils import import_function, user_code
from trainer.seeding import permutation

_FORMAT = 1  # of `state_dict`
_FORMAT_OF_MIX = 2  # of the state of a `MixLedger`
_HOW_TO_FORK = (
    "fork the checkpoint (trainer.resume_mode=from_path) with "
    "trainer.load_components=[weights,optimizer,rng,state], which begins the new data at its first row"
)
_LONGEST_FINGERPRINT = 100
_STATE: dict[Any, Shape] = {
    "epoch": is_count,
    "position": is_count,
    "trained_ahead": [{"epoch": is_count, "index": is_count}],
    "curriculum": (NoneType, {"name": str, "order": (NoneType, [is_count]), "rewards": [(is_number, NoneType)]}),
}
_STATE_OF_MIX: dict[Any, Shape] = {
    "sources": [{"name": str, "trained": is_count, "since": is_count, "ledger": dict}],
    "weights": {str: is_number},
}

Curriculum = Callable[[Sequence[Any], int, Mapping[int, float]], Sequence[int]]
"""(prompts, epoch, rewards) -> the indices of `prompts` that the epoch samples, in their order, none twice. `rewards`
has, by index, the mean reward of a prompt's completions in the last committed step that trained on it. The function is
called when the run comes to the epoch, and again after a restart from a step before it: its result must depend on its
arguments alone."""


def find_curriculum(path: str, key: str) -> Curriculum:
    """Import the curriculum that the config key `key` names.

    Raises:
        UserError: it cannot be imported, or does not take (prompts, epoch, rewards).
    """
    curriculum = import_function(path, key)
    try:
        inspect.signature(curriculum, follow_wrapped=False).bind([], 0, {})  # a decorator may pass more
    except TypeError as error:
        raise UserError(f"{key}={path}: {error}; it gets prompts, epoch and rewards") from error
    except ValueError:  # some functions in C have no signature
        pass
    return curriculum


@dataclass(frozen=True)
class SampleIndex:
    """Names one row, as one epoch draws it."""

    dataset: int  # number of the source in a mix; 0 without one
    epoch: int
    index: int  # of the row in the data set


class Ledger:
    """Orders rows in epochs, each a permutation keyed by seed and epoch, or the curriculum's order.

    All rows before the position are trained. Steps may finish in any order: a trained row behind a gap is remembered by
    name, and the position passes it when the gap is closed. `ahead` changes nothing; `commit` records rows once the
    step that trained on them is done. So a row in flight when a run dies comes again, and none is skipped or trained
    twice.

    Args:
        rows: the data set.
        seed: of the run.
        kind: `prompts` or `examples`: keys the permutations, and names the rows in messages.
        fingerprint: returns a digest of the rows: of what the policy sees, and of all that rewards read. It is called
            at the first save or load. A longer text is digested here.
        source: name of the source of `data.mix` that has the rows; keys the permutations, too. Empty: there is no mix.
        curriculum: chooses and orders the rows of an epoch.
        curriculum_name: its import path. A run continues with no other.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        seed: int,
        kind: str,
        fingerprint: Callable[[], str],
        curriculum: Curriculum | None = None,
        curriculum_name: str = "",
        source: str = "",
    ):
        assert rows, "a data set has rows"
        self._rows, self.size = rows, len(rows)
        self._seed = seed
        self._kind = kind
        self._compute_fingerprint = fingerprint
        self._curriculum = curriculum
        self._name = curriculum_name
        self._source = source
        self._section = f"data.mix.{source}" if source else "data"
        self._ordering = threading.Lock()  # rows are drawn on other threads, too
        self.restart()

    def restart(self) -> None:
        """Go back to the first row."""
        self._position = (0, 0)  # epoch, and index in its order, of the next row
        self._trained_ahead: set[SampleIndex] = set()  # rows behind a gap
        self._orders: dict[int, Sequence[int] | np.ndarray] = {}
        self._rewards: dict[int, float] = {}

    def row(self, index: SampleIndex) -> Any:
        """Return a row."""
        return self._rows[index.index]

    @property
    def epoch(self) -> float:
        """Epochs trained, with the fraction of the current one."""
        epoch, position = self._position
        trained = position + len(self._trained_ahead)
        if self._kind == "prompts":
            return epoch + (trained / len(self._order(epoch)) if trained else 0)
        return (epoch * len(self._rows) + trained) / len(self._rows)

    def ahead(self, in_flight: Collection[SampleIndex] = ()) -> Iterator[SampleIndex]:
        """Yield the rows to train on next, without end. Changes nothing.

        Args:
            in_flight: rows that steps under way will train on. They are left out.
        """
        left_out = self._trained_ahead.union(in_flight)
        return (index for index, _ in self._walk() if index not in left_out)

    def peek(self, count: int, in_flight: Collection[SampleIndex] = ()) -> list[SampleIndex]:
        """Return the next `count` rows (see `ahead`). Changes nothing."""
        return list(islice(self.ahead(in_flight), count))

    def commit(self, indices: Sequence[SampleIndex], rewards: Sequence[float | None] = ()) -> None:
        """Record that these rows have been trained on.

        Args:
            indices: in any order, and with gaps.
            rewards: of each, the mean over its completions, for the curriculum. None: all of them failed.
        """
        assert len(set(indices)) == len(indices) and self._trained_ahead.isdisjoint(indices), "a row is trained twice"
        self._trained_ahead.update(indices)
        walk = self._walk()
        while self._trained_ahead:  # move the position to the first row that is not trained
            index, position_after = next(walk)
            if index not in self._trained_ahead:
                break
            self._trained_ahead.remove(index)
            self._position = position_after
        epoch, position = self._position
        for index in self._trained_ahead.intersection(indices):
            passed = self._order(epoch)[:position] if position and index.epoch == epoch else ()
            assert index.index not in passed, "a row is trained twice"
            assert index.epoch >= epoch or self._curriculum is not None, "a row is trained twice"
        # A curriculum may have left out rows of an epoch that it has ordered again after they had been sampled.
        self._trained_ahead = {row for row in self._trained_ahead if row.epoch >= epoch}
        if self._curriculum is not None:
            known = zip(indices, rewards, strict=True)
            self._rewards |= {index.index: reward for index, reward in known if reward is not None}
        # An epoch that has begun keeps its order; the curriculum may order those ahead in another way now.
        has_begun = position or self._trained_ahead
        self._orders = {epoch: self._orders[epoch]} if has_begun and epoch in self._orders else {}

    def _walk(self) -> Iterator[tuple[SampleIndex, tuple[int, int]]]:
        """Yield each row from the position on, and the position after it."""
        epoch, position = self._position
        while True:
            order = self._order(epoch)
            index = SampleIndex(0, epoch, int(order[position]))
            epoch, position = (epoch + 1, 0) if position + 1 == len(order) else (epoch, position + 1)
            yield index, (epoch, position)

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray:
        with self._ordering:
            if epoch not in self._orders:
                if self._curriculum is not None:
                    self._orders[epoch] = self._ask_curriculum(self._curriculum, epoch)
                else:
                    of_kind = ("epoch",) if self._kind == "prompts" else ("sft", 0)
                    name = ("mix", self._source) if self._source else of_kind
                    self._orders[epoch] = permutation(len(self._rows), self._seed, *name, epoch)
            return self._orders[epoch]

    def _ask_curriculum(self, curriculum: Curriculum, epoch: int) -> list[int]:
        rows = self._rows
        with user_code(f"{self._section}.curriculum={self._name}: failed for epoch {epoch} ({{}})"):
            order = [int(row) for row in curriculum(rows, epoch, dict(self._rewards))]
        if not order or len(set(order)) < len(order) or not 0 <= min(order) <= max(order) < len(rows):
            raise UserError(
                f"{self._section}.curriculum: for epoch {epoch} it returned {len(order)} indices; it must return at "
                f"least one, each once, from 0 to {len(rows) - 1}"
            )
        return order

    # ---------------------------------------------------------------------------------------------------
    # State

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self._position
        state: dict[str, Any] = {
            "format": _FORMAT,
            "seed": self._seed,
            "rows": len(self._rows),
            "fingerprint": self._fingerprint,
            "epoch": epoch,
            "position": position,
            "trained_ahead": [
                {"epoch": index.epoch, "index": index.index} for index in sorted(self._trained_ahead, key=astuple)
            ],
        }
        if self._curriculum is not None:
            state["curriculum"] = {
                "name": self._name,
                "order": self._order(epoch) if position or self._trained_ahead else None,
                "rewards": [self._rewards.get(row) for row in range(len(self._rows))],
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken with other data or another seed, is damaged, or is written in another format.
        """
        self._check_data(state)
        problem = self._problem(state)
        if problem is not None:
            raise UserError(
                f"{self._section}: the checkpoint's position in the data is corrupt ({problem}); use another checkpoint"
            )
        saved = state.get("curriculum")
        before, now = saved and saved["name"], None if self._curriculum is None else self._name
        if before != now:
            raise UserError(
                f"{self._section}.curriculum={now}: the run was saved with {before}, and its position in the data "
                "means nothing otherwise; restore the key"
            )
        self._position = state["epoch"], state["position"]
        self._trained_ahead = set(_saved_indices(state))
        self._orders = {}
        if saved is not None:
            self._rewards = {row: reward for row, reward in enumerate(saved["rewards"]) if reward is not None}
            if saved["order"] is not None:
                self._orders = {state["epoch"]: saved["order"]}

    def _check_data(self, state: dict[str, Any]) -> None:
        """Check that `state` was saved with this seed and these rows."""
        if state.get("format") == _FORMAT_OF_MIX:
            raise UserError(
                "data.mix: the run was saved with a mix of sources, and its position in the data means nothing "
                f"otherwise; restore the key, or {_HOW_TO_FORK}"
            )
        if state.get("format") != _FORMAT:
            raise UserError(
                f"{self._section}: the checkpoint's position in the data has format {state.get('format')}, this "
                f"version reads {_FORMAT}; resume with the version that wrote it"
            )
        compared = (
            ("seed", "trainer.seed", f"the order of the {self._kind}", self._seed),
            ("rows", self._section, f"the number of {self._kind}", len(self._rows)),
            ("fingerprint", self._section, f"the {self._kind}' content", self._fingerprint),
        )
        for name, key, meaning, own in compared:
            saved = state.get(name)
            if saved != own:
                other_name = "give the source another name, or " if self._source and key == self._section else ""
                raise UserError(
                    f"{key}: {meaning} is not that of the checkpoint ({name} {own} instead of {saved}); "
                    f"restore the data and seed of the run, or {other_name}{_HOW_TO_FORK}"
                )

    def _problem(self, state: dict[str, Any]) -> str | None:
        """Return why `state` cannot be a position in these rows; None: it can."""
        problem = mismatch({"curriculum": None, **state}, _STATE)
        if problem is not None:
            return problem
        saved, count = state.get("curriculum"), len(self._rows)
        order: Sequence[int] = range(count)
        if saved is not None:
            if len(saved["rewards"]) != count:
                return f"curriculum.rewards has {len(saved['rewards'])} entries"
            order = saved["order"] if saved["order"] is not None else order
            if not order or len(set(order)) < len(order) or max(order) >= count:
                return f"curriculum.order is no order of the {self._kind}"
        if state["position"] >= len(order):
            return f"position is {state['position']}"
        ahead = _saved_indices(state)
        for index in ahead:
            if index.index >= count:
                return f"trained_ahead has {index}"
            if index.epoch < state["epoch"]:
                return f"trained_ahead has {index} of an epoch that is over"
        return None if len(set(ahead)) == len(ahead) else "trained_ahead has a row twice"

    @cached_property
    def _fingerprint(self) -> str:
        """The fingerprint of the rows, or a digest of one that is too long for checkpoints and messages."""
        text = self._compute_fingerprint()
        is_short = len(text) <= _LONGEST_FINGERPRINT
        return text if is_short else xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


class MixLedger:
    """Draws rows of several sources in exact proportion to their weights.

    The next row comes from the source that is furthest behind its share of the rows drawn so far. How many rows are
    trained or in flight decides that, and nothing else. So no source is ever a whole row ahead of its share, and a run
    that is killed draws what it would have drawn. `SampleIndex.dataset` is the number of a source. A source keeps its
    number for the whole run.

    A resume may change weights and the set of sources: then shares count from the step of the resume on. A new source
    begins with its first row. A source that is dropped keeps its place, and continues there if it comes back.
    """

    def __init__(self, ledgers: Mapping[str, Ledger], weights: Mapping[str, float]):
        assert ledgers and ledgers.keys() == weights.keys()
        self._ledgers = dict(sorted(ledgers.items()))
        self._weights = {name: float(weights[name]) for name in self._ledgers}
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
        return sum(self._trained[name] for name in self._ledgers) / sum(one.size for one in self._ledgers.values())

    def progress(self, indices: Sequence[SampleIndex]) -> dict[str, tuple[int, float]]:
        """Return the rows of each source that are trained once these are, and their number in epochs."""
        counts = self._trained + Counter(map(self.name_of, indices))
        return {name: (counts[name], counts[name] / ledger.size) for name, ledger in self._ledgers.items()}

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
        return {"format": _FORMAT_OF_MIX, "sources": sources, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken without a mix, a source had other rows or another seed, or the state is damaged.
        """
        if state.get("format") != _FORMAT_OF_MIX:
            raise UserError(
                "data.mix: the run was saved without a mix, and its position in the data means nothing in one; restore "
                f"data.train_files or data.synthetic, or {_HOW_TO_FORK}"
            )
        problem = mismatch(state, _STATE_OF_MIX)
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


def _saved_indices(state: Mapping[str, Any]) -> list[SampleIndex]:
    return [SampleIndex(0, index["epoch"], index["index"]) for index in state["trained_ahead"]]
