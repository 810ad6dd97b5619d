"""A redo log of rollouts: a resumed run trains again on the episodes that it had, and generates only the others."""
