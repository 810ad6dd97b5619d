"""What a run has done so far: its counters, its best step, and the shape in which a checkpoint holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from trainer.files.documents import Shape, is_count, is_number

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

    step: int = 0
    """The last finished step."""
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
            "weight_version": self.step + 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, whose shape is `SHAPE_OF_STATE`."""
        counters = state["counters"]
        self.step, self.best = state["step"], state["best"]
        self.prompts, self.samples, self.tokens = (counters[name] for name in ("prompts", "samples", "tokens"))
        self.run_ids = dict(state["tracker"])
