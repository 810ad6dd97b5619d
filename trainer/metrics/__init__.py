"""What a run measures: names, tracker (JSON lines, W&B, TensorBoard), progress display, report, timing."""
