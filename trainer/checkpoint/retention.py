"""The rules that decide which checkpoints are deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep besides the newest: see `trainer.max_ckpts_to_keep`, `keep_every` and `keep_best`."""

    newest: int = -1
    every: int = -1
    best: int = 0
    best_mode: str = "max"
    best_metric: str = ""
    instead: str = ""
    """The metric that checkpoints are compared by if none of them has `best_metric`."""

    def disposable(self, scores: Mapping[int, float | None], protected: Collection[int] = ()) -> list[int]:
        """Return the steps that no rule keeps, oldest first.

        Args:
            scores: the metric of `keep_best` for each committed step; None: it was not measured at the step.
            protected: steps to keep regardless of the rules. The newest step is always kept.
        """
        if self.newest < 0:
            return []
        steps = sorted(scores)
        keep = set(protected) | set(steps[-max(1, self.newest) :])
        if self.every > 0:
            keep |= {step for step in steps if step % self.every == 0}
        if self.best > 0:
            sign = 1 if self.best_mode == "max" else -1
            measured = [step for step in steps if scores[step] is not None]
            # Of two equal scores keep the earlier step, which had less time to overfit.
            keep |= set(sorted(measured, key=lambda step: (-sign * scores[step], step))[: self.best])  # type: ignore
        return [step for step in steps if step not in keep]
