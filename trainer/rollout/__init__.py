"""Generation: the engine protocol, its engines, per-request seeds and weight sync."""
