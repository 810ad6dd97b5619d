"""The axes along which the ranks of a run are arranged. Cheap to import."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import TrainerConfig


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh of ranks. The defaults are those of ranks that repeat each other's work."""

    key: str = ""  # the key of its size in the section `trainer`. Empty: the ranks that the other axes leave.
    same_rows: bool = True  # ranks along it compute the same rows of a batch
    shards_weights: bool = False  # FSDP2 shards the weights along it
    joins_blocks: bool = False
    """Ranks along it communicate inside a block. Then blocks are compiled only if the user says so."""


AXES: dict[str, Axis] = {
    "dp_replicate": Axis("dp_replicate", same_rows=False),
    "dp_shard": Axis(same_rows=False, shards_weights=True),
    "cp": Axis("context_parallel_size", shards_weights=True, joins_blocks=True),
    "tp": Axis("tensor_parallel_size", joins_blocks=True),
}
"""The axes, by the names that PyTorch gives them, in the order in which ranks are numbered, the fastest axis last: axes
with the same rows are the fastest, and axes that FSDP2 shards over are neighbours."""


def axis_sizes(trainer: TrainerConfig, ranks: int | None = None) -> dict[str, int]:
    """Return the size of each axis for a number of ranks. None: for as few as the sizes in the config allow."""
    least = math.prod(getattr(trainer, axis.key) for axis in AXES.values() if axis.key)
    ranks = least if ranks is None else ranks
    assert ranks % least == 0, f"{ranks} ranks cannot form axes of {least}"
    return {name: getattr(trainer, axis.key) if axis.key else ranks // least for name, axis in AXES.items()}
