"""What a run has done so far, the shape in which a checkpoint holds it, and whether the run stops early."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any

from trainer.files.documents import Shape, is_count, is_number
from trainer.process.signals import SIGNALS

SHAPE_OF_STATE: dict[Any, Shape] = {
    "step": is_count,
    "counters": {"prompts": is_count, "samples": is_count, "tokens": is_count},
    "kl_controller": {"kind": str, "coef": is_number},
    "best": {str: is_number},
    "tracker": {"wandb_run_id": (str, NoneType), str: (str, NoneType)},
    "rng": {str: str},
    "history": str,
}
"""The shape of `trainer_state.json`."""


@dataclass
class TrainerState:
    """The state of a run, besides its models and its position in the data."""

    step: int = 0  # the last finished step
    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    best: dict[str, float] = field(default_factory=dict)
    """The best value so far of the metric that is compared (see `trainer.metrics.best`), and its step."""
    run_ids: dict[str, str | None] = field(default_factory=dict)
    """The runs of services such as W&B (see `Tracker.state_dict`)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what of it a checkpoint holds. The tracker saves `run_ids`."""
        return {
            "step": self.step,
            "counters": {"prompts": self.prompts, "samples": self.samples, "tokens": self.tokens},
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, whose shape is `SHAPE_OF_STATE`."""
        counters = state["counters"]
        self.step, self.best = state["step"], state["best"]
        self.prompts, self.samples, self.tokens = (counters[name] for name in ("prompts", "samples", "tokens"))
        self.run_ids = dict(state["tracker"])


OnStep = Callable[[dict[str, float]], Any]
"""Called with the metrics of a finished step and `step`; returns something true to stop the run after this step."""


class StopRequest:
    """Whether, and why, the run should stop after the current step. Without a `deadline` (an ISO 8601 time), it stops
    before the end of the Slurm job, if it is one. `on_step` is the user's."""

    def __init__(self, deadline: str | None, on_step: OnStep | None = None):
        self._on_step = on_step
        self._deadline: float | None = None
        self._asked: str | None = None
        slurm = os.environ.get("SLURM_JOB_END_TIME")
        if deadline is not None:
            self._deadline, self._source = datetime.fromisoformat(deadline).timestamp(), f"trainer.deadline={deadline}"
        elif slurm and slurm.isdigit():
            self._deadline, self._source = float(slurm), "the end of the Slurm job"

    @property
    def reason(self) -> str | None:
        """The reason to stop; None: continue."""
        return SIGNALS.first or self._asked

    def ask(self, reason: str) -> None:
        """Ask to stop after the current step."""
        self._asked = reason

    def consider(self, metrics: dict[str, float], seconds_needed: float) -> None:
        """Ask to stop if the user's callback says so, or if another step and a save, together `seconds_needed`, would
        end after the deadline. `metrics`: of the finished step, with `step`."""
        if self._on_step is not None and self._on_step(metrics):
            self.ask("on_step returned true")
        if self._deadline is not None and time.time() + seconds_needed > self._deadline:
            self.ask(self._source)
