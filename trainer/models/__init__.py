"""Hugging Face models in and out of sharded modules."""
