"""Sweeps (`-m`): what Hydra calls before and after the jobs, and what continues a killed Optuna sweep."""
