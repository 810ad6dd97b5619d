"""What `trainer plan` may change in a config: where ranks and engines run, and what takes less memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.cluster.resources import rank_groups
from trainer.config import Config, FSDPConfig, RoleSpec
from trainer.config.axes import AXES, axis_sizes, weight_shards
from trainer.parallel.shard import frees_after_forward
from trainer.plan.engines import most_engines
from trainer.plan.hardware import Cluster
from trainer.plan.model_shape import shape_of
from trainer.plan.shared_memory import caches_in_memory, shared_weights

Change = dict[str, Any]
"""New values of keys."""
_SIZES = (1, 2, 4, 8)
"""GPUs of an engine."""
_FEWEST_TOKENS = 1024
_MOST_CONTEXT = 64
"""Ranks that have a slice of a sequence each, at most: as many as large models have attention heads."""


@dataclass(frozen=True)
class Lever:
    """One thing to change, with its possible values."""

    options: tuple[Change, ...]
    """The values, by the memory of a GPU that they take, the least last."""
    lightest: Change
    """The value that takes least memory of a GPU. Empty: that of the config."""
    spares_host: bool = False
    """No value takes more memory of the host. So if any value lets a run fit, the last one does."""


def joined(changes: Sequence[Change]) -> Change:
    """Return several changes as one."""
    return {key: value for change in changes for key, value in change.items()}


def has_gpus(cfg: Config, cluster: Cluster) -> bool:
    """Return whether the cluster has a GPU for each rank and engine of the config that needs one."""
    r = cfg.rollout
    return cluster.device.is_cpu or _are_enough(
        cfg, cluster, r.colocate, cfg.trainer.num_workers, r.num_engines, r.tensor_parallel_size
    )


def _are_enough(cfg: Config, cluster: Cluster, colocate: bool, ranks: int, engines: int, size: int) -> bool:
    of_ranks, of_engines = ranks * rank_groups(cfg), _gpus_of_engines(cfg, engines, size)
    if of_engines and engines > most_engines(cluster, size, ranks if colocate else None):
        return False
    if colocate:
        return of_engines <= ranks and of_ranks <= cluster.gpus
    return of_ranks + of_engines <= cluster.gpus


def _gpus_of_engines(cfg: Config, engines: int, size: int) -> int:
    return engines * size if cfg.num_engines and cfg.engine.gpus else 0


def layouts(cfg: Config, cluster: Cluster) -> list[Change]:
    """Return the layouts for which the cluster has enough GPUs, as changes; the one of the config is empty.

    A layout is the number of ranks, the number and the size of engines, and whether they share GPUs. More ranks take
    as many GPUs as there are. Fewer ranks or engines are among the layouts where GPUs are too few for those of the
    config; on CPU, always, because they take less memory.
    """
    t, r = cfg.trainer, cfg.rollout
    found: dict[tuple[object, ...], Change] = {}
    for colocate, size in itertools.product(_places(cfg, cluster), _engine_sizes(cfg, cluster)):
        for ranks in _rank_counts(cfg, cluster, colocate, size):
            for engines in _engine_counts(cfg, cluster, colocate, size, ranks):
                if not cluster.device.is_cpu and not _are_enough(cfg, cluster, colocate, ranks, engines, size):
                    continue
                values = {
                    "rollout.colocate": (r.colocate, colocate),
                    "trainer.num_workers": (t.num_workers, ranks),
                    "rollout.num_engines": (r.num_engines, engines),
                    "rollout.tensor_parallel_size": (r.tensor_parallel_size, size),
                }
                changes = {key: new for key, (old, new) in values.items() if new != old}
                found[tuple(changes.items())] = changes
    return list(found.values())


def _places(cfg: Config, cluster: Cluster) -> list[bool]:
    """Return the possible values of `rollout.colocate`."""
    r = cfg.rollout
    if cluster.device.is_cpu or not cfg.num_engines or not cfg.engine.gpus:
        return [r.colocate]
    return [False] if r.works_ahead else [r.colocate, not r.colocate]


def _engine_sizes(cfg: Config, cluster: Cluster) -> list[int]:
    """Return the possible values of `rollout.tensor_parallel_size`."""
    now = cfg.rollout.tensor_parallel_size
    if cluster.device.is_cpu or not cfg.num_engines or not cfg.engine.tensor_parallel:
        return [now]
    heads = shape_of(cfg, cfg.roles[0], dict.fromkeys(AXES, 1)).config.get_text_config().num_attention_heads
    return [now, *(size for size in _SIZES if size != now and size <= cluster.per_node and heads % size == 0)]


def _rank_counts(cfg: Config, cluster: Cluster, colocate: bool, size: int) -> list[int]:
    """Return the possible values of `trainer.num_workers`."""
    now, unit = cfg.trainer.num_workers, cfg.trainer.layout_size
    groups = rank_groups(cfg)
    if not groups:
        return [now]
    if cluster.device.is_cpu:
        return [now, *_halves(now, unit)]
    most = cluster.gpus // groups
    taken = 0 if colocate else _gpus_of_engines(cfg, cfg.rollout.num_engines, size)
    one = 0 if colocate else _gpus_of_engines(cfg, 1, size)
    doubled = [now * 2**i for i in range(1, cluster.gpus.bit_length()) if now * 2**i <= most]
    largest = [(cluster.gpus - gpus) // groups // unit * unit for gpus in (taken, one)]
    fewer = [] if has_gpus(cfg, cluster) else list(_halves(now, unit))
    larger = [count for count in largest if count > now]
    smaller = [count for count in largest if 0 < count < now] if fewer else []
    return list(dict.fromkeys([now, *doubled, *larger, *smaller, *fewer]))


def _engine_counts(cfg: Config, cluster: Cluster, colocate: bool, size: int, ranks: int) -> list[int]:
    """Return the possible values of `rollout.num_engines`."""
    now = cfg.rollout.num_engines
    if not cfg.num_engines or cfg.rollout.urls:
        return [now]
    if cluster.device.is_cpu:
        return [now, *_halves(now, 1)]
    left = ranks if colocate else cluster.gpus - ranks * rank_groups(cfg)
    most = min(left // size, most_engines(cluster, size, ranks if colocate else None))
    return [now, most] if 0 < most < now else [now]


def _halves(count: int, unit: int) -> Iterator[int]:
    """Yield halves of the count, as multiples of the unit."""
    while (count := count // 2 // unit * unit) > 0:
        yield count


def splits(cfg: Config, cluster: Cluster) -> list[list[Change]]:
    """Return larger sizes of context parallelism of the ranks, then those of tensor parallelism, the smallest first.

    Context parallelism exchanges the tokens of attention alone, so it comes first. The ranks of tensor parallelism are
    on one node. Each change has as many ranks as the size needs; the model may not allow it.
    """
    t, groups = cfg.trainer, rank_groups(cfg)
    if cluster.device.is_cpu or not groups:
        return []
    sizes = {
        "context_parallel_size": _doubles(t.context_parallel_size, min(_MOST_CONTEXT, cluster.gpus)),
        "tensor_parallel_size": _doubles(t.tensor_parallel_size, cluster.per_node),
    }
    found: list[list[Change]] = []
    for key, larger in sizes.items():
        found.append([])
        for size in larger:
            unit = t.layout_size // getattr(t, key) * size
            ranks = min(-(-t.num_workers // unit), cluster.gpus // groups // unit) * unit
            if ranks:
                more = {} if ranks == t.num_workers else {"trainer.num_workers": ranks}
                found[-1].append({f"trainer.{key}": size, **more})
    return found


def _doubles(now: int, most: int) -> Iterator[int]:
    """Yield the doubles of a size, up to the most."""
    while (now := 2 * now) <= most:
        yield now


def levers(cfg: Config, cluster: Cluster, colocate: bool) -> list[Lever]:
    """Return what takes less memory, beside the layout and the engines' share of GPUs.

    Args:
        colocate: ranks and engines share GPUs.
    """
    on_cpu = cluster.device.is_cpu
    found = [_offload(cfg, colocate), _sparing_host(_recomputations(cfg)), _sparing_host(micro_batches(cfg))]
    found += [_sparing_host(_fewer_checkpoints(cfg)), _sparing_host(_broadcast(cfg, cluster))]
    sections = [role for role in cfg.roles if role.section and not role.is_policy_base] if cfg.task.trains else []
    to_host = {f"{role.section}.fsdp.cpu_offload": True for role in sections if not role.sharding.cpu_offload}
    stays = {f"{role.section}.fsdp.cpu_offload": False for role in sections if role.sharding.cpu_offload}
    if not on_cpu:
        fewest = cfg.trainer.num_workers if has_gpus(cfg, cluster) else cfg.trainer.layout_size
        found.append(_sparing_host(_freeing(cfg, sections, fewest)))
        found += [Lever((change,), lightest) for change, lightest in ((to_host, to_host), (stays, {})) if change]
    return [lever for lever in found if lever.options]


def _offload(cfg: Config, colocate: bool) -> Lever:
    values, now = ("none", "optimizer", "all") if colocate and cfg.num_engines else ("none",), cfg.trainer.offload
    others = tuple({"trainer.offload": value} for value in values if value != now)
    return Lever(others, {} if now == values[-1] else others[-1])


def _sparing_host(options: Iterator[Change]) -> Lever:
    found = tuple(options)
    return Lever(found, found[-1] if found else {}, spares_host=True)


def _fewer_checkpoints(cfg: Config) -> Iterator[Change]:
    """Yield what leaves fewer checkpoints in shared memory."""
    if caches_in_memory(cfg):
        if cfg.trainer.max_ckpts_to_keep != 1:
            yield {"trainer.max_ckpts_to_keep": 1}
        yield {"trainer.ckpt_cache_dir": None, **({"trainer.ckpt_replicas": 0} if cfg.trainer.ckpt_replicas else {})}


def _broadcast(cfg: Config, cluster: Cluster) -> Iterator[Change]:
    """Yield a way for weights that are too large for shared memory."""
    if not cfg.num_engines or cfg.rollout.colocate or "broadcast" not in cfg.engine.transports:
        return
    policy = shape_of(cfg, cfg.roles[0], dict.fromkeys(AXES, 1))
    if shared_weights(cfg, policy, cluster.device) > cluster.device.shared_limit:
        yield {"rollout.weight_sync": "broadcast"}


def _freeing(cfg: Config, roles: Sequence[RoleSpec], fewest: int) -> Iterator[Change]:
    """`fewest`: ranks of the layouts that are tried."""
    shards = weight_shards(axis_sizes(cfg.trainer, fewest))
    kept = [r.section for r in roles if not frees_after_forward(r.sharding, "cuda", shards, r.trained_whole)]
    if kept:
        yield {f"{section}.fsdp.reshard_after_forward": True for section in kept}


def _recomputations(cfg: Config) -> Iterator[Change]:
    modes = ("none", "selective", "full")
    trained = [role for role in cfg.roles if role.trained and role.section] if cfg.task.trains else []
    for mode in modes[1:]:
        change = {}
        for role in trained:
            assert isinstance(role.sharding, FSDPConfig)
            if modes.index(role.sharding.activation_checkpointing) < modes.index(mode):
                change[f"{role.section}.fsdp.activation_checkpointing"] = mode
        if change:
            yield change


def micro_batches(cfg: Config) -> Iterator[Change]:
    """Yield smaller sizes of micro-batches, the smallest last."""
    t = cfg.trainer
    longest = cfg.longest_row
    fewest = max(_FEWEST_TOKENS, -(-longest // t.context_parallel_size))
    tokens = t.max_tokens_per_micro_batch
    while tokens > fewest and cfg.task.trains:
        tokens = max(tokens // 2, fewest)
        yield {"trainer.max_tokens_per_micro_batch": tokens}
