"""Metrics to log in tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker

ROOT = Path(__file__).parents[2]


def run_python(code: str, *args: str, **kwargs) -> subprocess.CompletedProcess:
    """Run code in a Python of its own, from the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs
    )


def make_tracker(run_dir: Path, **logger: object) -> Tracker:
    return Tracker(str(run_dir), LoggerConfig(**logger), config={"seed": 1})


def step_metrics(step: int) -> dict[str, float]:
    metrics = {
        "reward/mean": 0.5 + step / 100,
        "response_length/mean": 12.25,
        "policy/kl": 1.5e-4,
        "policy/grad_norm": 0.42,
        "perf/tokens_per_s": 6400.0,
        "time/step": 2.0,
        "time/rollout": 1.0,
        "time/update": 0.5,
    }
    return metrics | ({"val/accuracy": 0.7 if step == 2 else 0.6} if step % 2 == 0 else {})
