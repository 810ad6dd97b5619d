"""The smallest changes of a config that make a run fit its cluster, or the smallest cluster that it fits."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Config, validate
from trainer.config.fields import value_of
from trainer.errors import UserError
from trainer.plan.hardware import CONTEXT_BYTES, Cluster
from trainer.plan.levers import Change, Lever, joined, layouts, levers, micro_batches, splits
from trainer.plan.plan import BESIDE, Plan, make_plan
from trainer.plan.ranks import ENGINE_KINDS

_LARGEST_SHARE = 0.92
"""Largest share of a GPU that vLLM can take."""
_SHARES = 20
"""Shares of GPUs are multiples of 1 / 20, or the largest one."""
LARGEST_FACTOR = 64
"""How many times as many nodes a larger cluster may have."""
_STAGES = ((False, ()), (True, ("update", "scores")), (True, ("scores",)), (True, ()))
"""Whether activations count, and the passes that are not traced (see `make_plan`). Each stage traces more than the one
before, and what does not fit in one does not fit in the next."""
ENGINE = Lever(({},), {})
"""What engines take of a GPU; on CPU, their KV cache. The other changes decide of the value."""


def with_changes(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with new values of some keys.

    Raises:
        UserError: they contradict each other, or the rest of the config.
    """
    cfg = _changed(cfg, changes)
    validate(cfg)
    return cfg


def _changed(cfg: Config, changes: Mapping[str, Any]) -> Config:
    cfg = copy.copy(cfg)
    for key, value in changes.items():
        *sections, name = key.split(".")
        section: Any = cfg
        for one in sections:
            setattr(section, one, copy.copy(value_of(section, one)))
            section = getattr(section, one)
        setattr(section, name, value)
    return cfg


def find_changes(cfg: Config, cluster: Cluster) -> Change | None:
    """Return the fewest changes with which the run fits the cluster; None: none of those that are tried do.

    Of several that are as few, those with the shortest step. None of the changes can be left out. The keys that are
    tried are in `trainer.plan.levers`, and what engines take of their GPUs. Only if nothing else helps, context or
    tensor parallelism is among them, in the smallest size with which the run can fit: both make a step longer.
    """
    found = _Search(cfg, cluster).find()
    if found is not None:
        return found
    for split, search in _possible_splits(cfg, cluster):
        if (changes := search.find()) is not None:
            return {**split, **changes}
    return None


def _possible_splits(cfg: Config, cluster: Cluster) -> Iterator[tuple[Change, _Search]]:
    """Yield the sizes of context and tensor parallelism with which the run can fit, and a search for the rest.

    The larger the size, the less memory a rank takes. So if the largest one does not let a run fit, no other does.
    """
    for sizes in splits(cfg, cluster):
        searches = [(split, _Search(_changed(cfg, split), cluster)) for split in sizes]
        allowed = [(split, search) for split, search in searches if search.plan({}, traced=False) is not None]
        if allowed and allowed[-1][1].can_fit():
            yield from ((split, search) for split, search in allowed if search.can_fit())


def larger_cluster(cfg: Config, cluster: Cluster) -> tuple[Cluster, Change] | None:
    """Return the smallest cluster of such nodes on which the run fits, and the changes that it needs there.

    None: it does not even fit `LARGEST_FACTOR` times as many nodes.
    """
    if cluster.device.is_cpu:
        return None
    if (found := _smallest_larger(cfg, cluster)) is not None:
        return found
    largest = Cluster(LARGEST_FACTOR * cluster.nodes, cluster.per_node, cluster.device)
    for split, _ in _possible_splits(cfg, largest):
        if (found := _smallest_larger(_changed(cfg, split), cluster)) is not None:
            return found[0], {**split, **found[1]}
    return None


def _smallest_larger(cfg: Config, cluster: Cluster) -> tuple[Cluster, Change] | None:
    """Return what `larger_cluster` does, with the sizes of context and tensor parallelism of the config."""

    def of(nodes: int) -> Cluster:
        return Cluster(nodes, cluster.per_node, cluster.device)

    too_few, enough = cluster.nodes, 2 * cluster.nodes
    while not _Search(cfg, of(enough)).can_fit():
        too_few, enough = enough, 2 * enough
        if enough > LARGEST_FACTOR * cluster.nodes:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if _Search(cfg, of(middle)).can_fit() else (middle, enough)
    changes = _Search(cfg, of(enough)).find()
    assert changes is not None
    return of(enough), changes


@dataclass(frozen=True)
class _Start:
    """A layout with which the run can fit."""

    layout: Change
    needed: tuple[Lever, ...]
    """Levers without which it does not fit."""
    others: tuple[Lever, ...]


class _Search:
    """The search for changes of a config that make it fit a cluster.

    A plan is first made without activations. Most do not even fit so, and then nothing is traced.
    """

    def __init__(self, cfg: Config, cluster: Cluster):
        self._cfg, self._cluster = cfg, cluster
        self._micro_batches = list(micro_batches(cfg))
        self._plans: dict[tuple[frozenset[tuple[str, Any]], bool, tuple[str, ...]], Plan | None] = {}

    def plan(self, changes: Change, traced: bool = True, bounded: tuple[str, ...] = ()) -> Plan | None:
        """Return the plan with these changes; None: they are not possible.

        Args:
            traced: False: activations count as nothing.
            bounded: passes that are not traced (see `make_plan`).
        """
        key = frozenset(changes.items()), traced, bounded
        if key not in self._plans:
            cfg = _changed(self._cfg, changes)
            try:
                plan: Plan | None = make_plan(cfg, self._cluster, traced, bounded)
                if plan is not None and plan.fits:
                    validate(cfg)
            except UserError:
                plan = None
            self._plans[key] = plan
        return self._plans[key]

    def fits(self, changes: Change, except_host: bool = False, traced: bool = True) -> bool:
        """Return whether the run fits with these changes.

        Args:
            except_host: the memory of hosts does not count.
            traced: False: activations count as nothing.
        """
        for with_traces, bounded in _STAGES if traced else _STAGES[:1]:
            plan = self.plan(changes, with_traces, bounded)
            allowed = int(except_host and plan is not None and plan.host > plan.cluster.device.host_memory)
            if plan is None or len(plan.problems) > allowed:
                return False
        return True

    def find(self) -> Change | None:
        """Return the changes of `find_changes`."""
        if self.fits({}):
            return {}
        known, starts = layouts(self._cfg, self._cluster), []
        for count in itertools.count(1):
            short = [layout for layout in known if len(layout) == count or count == 1 and not layout]
            starts += [start for layout in short if (start := self._start(layout)) is not None]
            found = [(s.layout, used) for s in starts for used in self._chosen(s, count)]
            if found:
                return self._without_unneeded(self._fastest(found))
            most = max((len(s.layout) + len(s.needed) + len(s.others) for s in starts), default=0)
            if count >= max((most, *map(len, known))):
                break
        return None

    def can_fit(self) -> bool:
        """Return whether there are changes with which the run fits."""
        known = layouts(self._cfg, self._cluster)
        known.sort(key=lambda layout: -layout.get("trainer.num_workers", 0))
        return any(self._is_possible(layout, self._levers(layout)) for layout in known)

    def _levers(self, layout: Change) -> list[Lever]:
        colocate = layout.get("rollout.colocate", self._cfg.rollout.colocate)
        return [*levers(self._cfg, self._cluster, colocate), ENGINE]

    def _start(self, layout: Change) -> _Start | None:
        every = self._levers(layout)
        if not self._is_possible(layout, every):
            return None
        needed = [lever for lever in every if not self._is_possible(layout, [one for one in every if one is not lever])]
        return _Start(layout, tuple(needed), tuple(lever for lever in every if lever not in needed))

    def _is_possible(self, layout: Change, usable: Sequence[Lever]) -> bool:
        """Return whether the run fits with a layout and some of the usable levers."""
        shares = (False, True) if ENGINE in usable else (False,)
        lightest = joined([layout, *(lever.lightest for lever in usable)])

        def fits_lightest(traced: bool) -> bool:
            return any(self._fits_settled(lightest, share, except_host=True, traced=traced) for share in shares)

        def fits_any(traced: bool) -> bool:
            return any(
                self._fits_settled({**layout, **values}, share, traced=traced)
                for values in self._strongest(usable, may_leave=True)
                for share in shares
            )

        # Many a layout takes too much of the host, which needs no trace.
        return fits_lightest(False) and fits_any(False) and fits_lightest(True) and fits_any(True)

    def _fits_settled(self, changes: Change, share: bool, except_host: bool = False, traced: bool = True) -> bool:
        settled = self._settled(changes) if share else changes
        return settled is not None and self.fits(settled, except_host, traced)

    @staticmethod
    def _strongest(used: Sequence[Lever], may_leave: bool) -> Iterator[Change]:
        """Yield the values of levers that decide whether a run fits with them.

        Args:
            may_leave: levers that take memory of the host may be left.
        """
        of_levers = [
            lever.options[-1:] if lever.spares_host else (*lever.options[::-1], *([{}] if may_leave else []))
            for lever in used
            if lever is not ENGINE
        ]
        yield from map(joined, itertools.product(*of_levers))

    def _chosen(self, start: _Start, count: int) -> Iterator[tuple[Lever, ...]]:
        """Yield the levers with which the run fits, so that they and the layout are `count` changes."""
        more = count - len(start.layout) - len(start.needed)
        if more < 0:
            return
        for others in itertools.combinations(start.others, more):
            used = (*start.needed, *others)
            if any(
                self._fits_settled({**start.layout, **values}, ENGINE in used)
                for values in self._strongest(used, may_leave=False)
            ):
                yield used

    def _settled(self, changes: Change) -> Change | None:
        """Return the changes with the best other size of engines; None: there is none.

        That is the largest share of a GPU that ranks leave. On CPU it is the KV cache that the longest sequence needs.
        """
        plan, r = self.plan(changes, traced=False), self._cfg.rollout
        if plan is None or plan.engine is None or not self._cfg.engine.streaming:
            return None
        device = plan.cluster.device
        if device.is_cpu:
            longest = plan.workload.longest
            cache = math.ceil(plan.engine.cache.size(longest, in_flight=longest) / 2**20)
            return {**changes, "rollout.kv_cache_mb": cache} if cache > r.kv_cache_mb else None
        rooms = [
            member.capacity - phase.total + sum(phase.sizes[kind] for kind in ENGINE_KINDS) + CONTEXT_BYTES
            for member in plan.members
            for phase in member.phases
            if phase.name == "rollout" and member.name.endswith(BESIDE)
        ]
        left = min(rooms, default=device.memory) / device.memory
        share = _LARGEST_SHARE if left >= _LARGEST_SHARE else math.floor(left * _SHARES) / _SHARES
        if share <= 0 or share == r.gpu_memory_utilization:
            return None
        return {**changes, "rollout.gpu_memory_utilization": share}

    def _fastest(self, found: Sequence[tuple[Change, Sequence[Lever]]]) -> Change:
        """Return the values of changes with the shortest step; of those, the ones that change least."""
        candidates = []
        for layout, used in found:
            options = [tuple(enumerate(lever.options)) for lever in used if lever is not ENGINE]
            for values in itertools.product(*options):
                changes: Change | None = joined([layout, *(change for _, change in values)])
                if ENGINE in used:
                    changes = self._settled(changes)
                plan = None if changes is None else self.plan(changes, self._cluster.device.is_cpu)
                if plan is not None and plan.fits:
                    strength = sum(place for place, _ in values)
                    seconds = plan.time.total + plan.saves.blocked_s / plan.saves.interval_steps
                    candidates.append((seconds, plan.gpus, strength, len(candidates), changes))
        fastest = (changes for *_, changes in sorted(candidates, key=lambda one: one[:-1]))
        return next(changes for changes in fastest if self._fits_in_small(changes) and self.fits(changes))

    def _fits_in_small(self, changes: Change) -> bool:
        """Return whether the run can fit, by an update of the smallest micro-batch: one trace may refuse many sizes."""
        smallest = self._micro_batches[-1:] if self.fits(changes, traced=False) else []
        for smaller in smallest:
            self.plan({**changes, **smaller}, bounded=("scores",))
        plan = self.plan(changes, bounded=("update", "scores"))
        return plan is not None and plan.fits

    def _without_unneeded(self, changes: Change) -> Change:
        """Return the fewest of the changes with which the run fits."""
        for count in range(1, len(changes)):
            for keys in itertools.combinations(changes, count):
                if self.fits(fewer := {key: changes[key] for key in keys}):
                    return fewer
        return changes
