"""The axes along which the ranks of a run are arranged, and what each means.

Whatever depends on an axis asks this table, so that a new axis is one more entry here and the key of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """One axis. The defaults are those of ranks that repeat each other's work."""

    key: str = ""
    """The key of its size in the section `trainer`. Empty: the ranks that the other axes leave."""
    same_rows: bool = True
    """Ranks along it compute the same rows of a batch."""
    shards_weights: bool = False
    """FSDP2 shards the weights along it."""
    joins_blocks: bool = False
    """Ranks along it communicate inside a block. Then blocks are compiled only if the user says so."""
    uncompilable: str = ""
    """Why blocks cannot be compiled, as the end of a sentence. Empty: they can."""
    attention: str = ""
    """The `model.attn_implementation` that it needs. Empty: any."""


AXES: dict[str, Axis] = {
    "dp_replicate": Axis("dp_replicate", same_rows=False),
    "dp_shard": Axis(same_rows=False, shards_weights=True),
    "cp": Axis(
        "context_parallel_size",
        shards_weights=True,
        joins_blocks=True,
        attention="sdpa",
    ),
    "tp": Axis(
        "tensor_parallel_size",
        joins_blocks=True,
        # Sizes of their DTensors are maxima of symbols, for which Inductor has no code ("_nary_sym_max is not an
        # OpOverload").
        uncompilable="torch 2.13 fails to compile blocks that several ranks share for any number of tokens",
    ),
}
"""The axes, by the names that PyTorch gives them."""


def axis_sizes(trainer: Any, ranks: int | None = None) -> dict[str, int]:
    """Return the size of each axis, by name.

    Args:
        trainer: the section `trainer`.
        ranks: number of ranks of a role. None: as few as the sizes in the config allow.
    """
    for name, axis in AXES.items():
        assert not axis.key or hasattr(trainer, axis.key), f"the axis {name}: TrainerConfig has no key {axis.key}"
    least = math.prod(getattr(trainer, axis.key) for axis in AXES.values() if axis.key)
    ranks = least if ranks is None else ranks
    assert ranks % least == 0, f"{ranks} ranks cannot form axes of {least}"
    return {name: getattr(trainer, axis.key) if axis.key else ranks // least for name, axis in AXES.items()}


def weight_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks over which FSDP2 shards a parameter. `sizes`: of each axis."""
    return math.prod(size for name, size in sizes.items() if AXES[name].shards_weights)


def axes_in_rank_order() -> list[str]:
    """Return the names of the axes in the order in which ranks are numbered, the fastest axis last.

    Axes with the same rows are the fastest, so ranks with the same rows are neighbours. Axes that FSDP2 shards over are
    neighbours, too. Among axes of one kind, the order is that of the table.
    """
    return sorted(AXES, key=lambda name: (AXES[name].same_rows, AXES[name].same_rows != AXES[name].shards_weights))
