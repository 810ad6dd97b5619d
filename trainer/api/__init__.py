"""Runs from Python: `train`, its result, and saved checkpoints. See docs/python.md."""
