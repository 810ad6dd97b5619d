"""The axes of the mesh and sums over the data."""

from __future__ import annotations

from tests.support.ranks import run_ranks
from tests.support.tables import table
from trainer.config import Config
from trainer.workers.rank import Rank


def layout_of(rank: Rank) -> dict:
    layout = rank.layout
    return {
        "sizes": layout.sizes,
        "data": (layout.dp_rank, layout.dp_size),
        "reports": layout.is_main_rank,
        "described": layout.describe(),
        "sum": layout.sum_over_data({"b": rank.rank, "a": 0.5}),
    }


@table(
    "ranks, replicas, context, names, shape",
    [
        (1, 1, 1, ["dp_shard"], [1]),
        (2, 1, 1, ["dp_shard"], [2]),
        (4, 2, 1, ["dp_replicate", "dp_shard"], [2, 2]),
        (4, 1, 2, ["dp_shard_cp"], [4]),
    ],
)
def test_dp_ranks_and_meshes(ranks, replicas, context, names, shape):
    cfg, shares = Config(), ranks // context
    cfg.trainer.dp_replicate, cfg.trainer.context_parallel_size = replicas, context
    for number, found in enumerate(run_ranks(ranks, layout_of, cfg=cfg)):
        sizes = {"dp_replicate": replicas, "dp_shard": shares // replicas, "cp": context, "tp": 1}
        assert found == {
            "sizes": sizes,
            "data": (number // context, shares),
            "reports": number == 0,
            "described": {"world_size": ranks, "dp_size": shares, "mesh_shape": shape, "mesh_dim_names": names},
            "sum": {"a": 0.5 * shares, "b": sum(range(0, ranks, context))},
        }
