"""`trainer evaluate`: a model, an export or a checkpoint on validation data, without training."""
