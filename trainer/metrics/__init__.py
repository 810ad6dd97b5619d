"""Metrics of a run: their names, the tracker (JSON lines, W&B, TensorBoard), progress display, report, timing."""
