"""Generation: the engine protocol, its engines and weight sync."""
