"""Verify a resume: compare replayed steps with the lines that the killed run had logged."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from trainer.config import TrainerConfig
from trainer.files.atomic_io import write_file
from trainer.metrics.names import set_of_metric
from trainer.metrics.tracker import METRICS_FILE, as_lines, read_metrics
from trainer.run.compatibility import ALL_METRICS, OF_VALIDATION

LOG = logging.getLogger(__name__)

REPLAY_FILE = "metrics.replay.jsonl"
_ROUNDING = 1e-3  # relative difference that another number of ranks may cause in one step
_GPU_TOLERANCE = 1e-2  # kernels that add with atomics differ from run to run in the last bits
_OF_EPISODES = ("data/", "reward/", "response_length/", "episode/", "environment/", "sampling/", "progress/")
_OF_EPISODES += ("val/reward/", "val/accuracy", "val/pass@", "val/failures")
"""Metrics, by the beginnings of their names, that the driver computes from episodes alone."""


def audit_of(
    trainer: TrainerConfig,
    device: str,
    step: int,
    same_layout: bool,
    altered: tuple[str, ...],
    same_episodes: bool,
) -> ReplayAudit:
    """Return the audit of a run that resumed from `step` on `cpu` or `cuda` (see `ReplayAudit` for the rest).

    Args:
        same_episodes: the source gives the same episodes again (`EpisodeSource.repeats`).
    """
    exact = device == "cpu" or trainer.deterministic
    tolerance = 0.0 if exact else _GPU_TOLERANCE
    return ReplayAudit(trainer.run_dir, step, tolerance, same_layout, altered, exact, same_episodes)


class ReplayAudit:
    """Compares the first steps after a resume with the lines that the killed run logged after the checkpoint.

    The lines are kept in `metrics.replay.jsonl` until they are replayed, so that a run that is killed during the replay
    still has them.

    Args:
        step: step of the checkpoint that the run resumed from.
        tolerance: relative difference that counts as equal.
        same_layout: the work is split as it was when the lines were logged. If not, sums are rounded differently,
            sampling soon diverges, and only the first step is compared.
        altered: metrics, by the beginning of their names, that a changed config alters (see
            `compatibility.altered_metrics`). They are not compared. If they are more than the validation, only the
            first step is compared, because the later ones start from other weights.
        exact: a step computes the same bits again from the same episodes. If not, only the first step is compared.
        same_episodes: the source gives the same episodes again. If not, the comparison ends at the first step whose
            episodes the journal does not have. Of a step that it has, if the bits may differ, what the episodes decide
            and the learning rates are compared.
    """

    def __init__(
        self,
        run_dir: str,
        step: int,
        tolerance: float,
        same_layout: bool,
        altered: tuple[str, ...] = (),
        exact: bool = True,
        same_episodes: bool = True,
    ) -> None:
        self._path = os.path.join(run_dir, REPLAY_FILE)
        self._tolerance = tolerance if same_layout else max(tolerance, _ROUNDING)
        self._altered = altered
        self._all_steps = same_layout and set(altered) <= set(OF_VALIDATION) and exact
        self._compares_all = exact or same_episodes
        self._same_episodes = same_episodes
        self._matched = 0
        rows = [*read_metrics(self._path), *read_metrics(os.path.join(run_dir, METRICS_FILE))]
        merged = {row["step"]: row for row in rows if row["step"] > step}
        self._expected = merged if self._all_steps else {n: row for n, row in merged.items() if n == step + 1}
        if altered == ALL_METRICS:
            self._expected = {}
            self.discard()
        elif merged:
            write_file(self._path, as_lines(merged[n] for n in sorted(merged)))

    def check(self, step: int, metrics: Mapping[str, float], from_journal: bool = False) -> str | None:
        """Compare the metrics of a new step with its logged line; returns a sentence if they differ, else None.

        The logged lines are kept if they differ: who stops the run leaves them to the next start. See `discard`.

        Args:
            from_journal: all episodes of the step, those of its evaluation too, are those that were logged.
        """
        if not self._expected:
            return None
        row = self._expected.pop(step, None)
        if not self._same_episodes and not from_journal:
            row, self._expected, self._all_steps = None, {}, False  # the weights are others from now on
        if row is not None:
            tolerance = self._tolerance if self._compares_all else 0.0
            difference = first_difference(self._comparable(row), metrics, tolerance)
            if difference is not None:
                self._expected, self._all_steps = {}, False
                return f"step {step} was not replayed as it had been logged: {difference}"
            self._matched += 1
        if not self._expected:
            self.discard()
            if self._matched:
                self._log_verified()
        return None

    def _comparable(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a line that this run computes again."""
        same = {name: value for name, value in row.items() if not name.startswith(self._altered)}
        return same if self._compares_all else {name: same[name] for name in same if _is_exact(name)}

    def _log_verified(self) -> None:
        how = "identical" if self._tolerance == 0 or not self._compares_all else f"equal to {self._tolerance:g}"
        limits = [f"without {', '.join(self._altered)}, which the new config alters"] if self._altered else []
        steps, these = ("step", "the first step") if self._matched == 1 else ("steps", "these steps")
        limits += [] if self._all_steps else [f"{these} alone can be compared with this config"]
        shown = f" ({'; '.join(limits)})" if limits else ""
        LOG.info("resume verified: %d replayed %s %s%s", self._matched, steps, how, shown)

    def discard(self) -> None:
        """Delete the logged lines: they are compared, or are given up."""
        if os.path.exists(self._path):
            os.remove(self._path)


def first_difference(logged: Mapping[str, Any], now: Mapping[str, float], tolerance: float) -> str | None:
    """Return the first metric, by name, that differs by more than `tolerance`. Measured times are not compared."""
    for name in sorted(set(logged) & set(now)):
        if name.startswith(("time/", "perf/")) or name == "step":
            continue
        before, after = logged[name], float(now[name])
        after_or_none = after if math.isfinite(after) else None
        if before is None or after_or_none is None:
            same = before is after_or_none
        else:
            same = abs(before - after) <= tolerance * max(abs(before), abs(after), 1e-3)
        if not same:
            return f"{name} is {now[name]} and was {before}"
    return None


def _is_exact(name: str) -> bool:
    """Return whether the driver computes a metric from episodes or the step alone."""
    return name.startswith(_OF_EPISODES) or name.endswith("/lr") or set_of_metric(name) is not None
