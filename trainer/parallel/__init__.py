"""Process groups, device mesh, fully_shard and the split of a batch over ranks."""
