"""Which rank sends which shard to which rank, so that other nodes have copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.manifest import FileEntry
from trainer.checkpoint.replication import plan_copies


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=8), st.integers(0, 4))
def test_each_shard_has_copies_on_as_many_other_nodes_as_there_are(nodes, replicas):
    """A rank whose disk fails (its node has no name) neither sends nor receives."""
    shards = [[FileEntry(f"policy/__{rank}_0.distcp", rank + 1, "0")] for rank in range(len(nodes))]
    transfers = plan_copies(nodes, shards, replicas)
    others = len(set(nodes) - {""}) - 1
    for rank, node in enumerate(nodes):
        sent = [transfer for transfer in transfers if transfer.source == rank]
        targets = [nodes[transfer.target] for transfer in sent]
        assert len(targets) == len(set(targets)) == (min(replicas, others) if node else 0)
        assert node not in targets and "" not in targets
        assert all((one.path, one.start, one.end) == (shards[rank][0].path, 0, rank + 1) for one in sent)
