"""Process groups, layout of the ranks, fully_shard, and the split of a batch over ranks and packed rows."""
