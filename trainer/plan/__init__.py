"""What a config needs of a cluster: memory, time and disk, computed without a GPU."""
