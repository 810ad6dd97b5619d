"""Checkpoints: save them in a transaction, find them, verify them and load them."""
