"""Evaluations of the checkpoints of a run, and what the run itself has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.forks import run_forked
from tests.support.jobs import environment, metrics


def evaluate(subject: Path, *words: str, cwd: Path) -> dict[str, Any]:
    """Run `trainer evaluate SUBJECT WORDS` to its end; return its results."""
    done = run_forked(
        "trainer", ["evaluate", str(subject), "trainer.run_dir=evaluated", *words], cwd, environment(), 300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((cwd / "evaluated/evaluation.json").read_text())


def validation_of(run: Path, step: int) -> dict[str, float]:
    """The metrics of the run's own validation at a step."""
    row = next(row for row in metrics(run) if row["step"] == step)
    return {name: value for name, value in row.items() if name.startswith("val/")}
