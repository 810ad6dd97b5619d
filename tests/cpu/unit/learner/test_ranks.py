"""The ranks as the loop sees them."""

from __future__ import annotations

from tests.support.ranks import local_cluster
from trainer.cluster.launcher import HOST
from trainer.config import Config
from trainer.errors import Origin
from trainer.learner.ranks import Ranks


def test_each_rank_measures_its_own_speed_and_the_ranks_describe_their_axes():
    cfg = Config()
    cfg.trainer.context_parallel = 2
    with local_cluster(2, cfg, "cpu") as cluster:
        ranks = Ranks(cluster.cfg, cluster)
        speeds = ranks.speeds()
        assert list(speeds) == [Origin("policy rank 0", HOST), Origin("policy rank 1", HOST)]
        assert all(1e7 < speed < 1e14 for speed in speeds.values())
        axes = {"replicate": 1, "shard": 1, "context": 2, "tensor": 1}
        assert ranks.description == {"roles": ["policy"], "ranks": 2, "replicas": 1, "axes": axes}
