"""Checkpoints: writing them so that only whole ones count, finding and loading them."""
