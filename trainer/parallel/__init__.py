"""Process groups, the layout of the ranks, sharding, and the split of a batch over ranks and packed rows."""
