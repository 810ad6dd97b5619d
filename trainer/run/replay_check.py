"""Verify a resume: compare replayed steps with the lines that the killed run had logged."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.manifest import Checkpoint
from trainer.errors import UserError
from trainer.files.atomic_io import write_file
from trainer.metrics.tracker import METRICS_FILE, MetricsLines, as_lines

LOG = logging.getLogger(__name__)

REPLAY_FILE = "metrics.replay.jsonl"
_ROUNDING = 1e-3  # relative difference that another number of ranks may cause in one step
_GPU_TOLERANCE = 1e-2  # kernels that add with atomics differ from run to run in the last bits


class ReplayAudit:
    """Compares the first steps after a resume with the lines that the killed run logged after the checkpoint.

    It compares until all logged steps are verified, or one differs, or the episodes are others. The lines are kept in
    `metrics.replay.jsonl` until then, so that a run that is killed during the replay still has them.

    Forbidden: to compare again after a difference was accepted; to delete the lines when a difference stops the run, so
    that the next start stops, too.

    Args:
        checkpoint: the run resumed from it.
        exact: a step computes the same bits again from the same episodes. If not, only the first step is compared.
        same_layout: the work is split as it was when the lines were logged. If not, sums are rounded differently,
            sampling soon diverges, and only the first step is compared.
        altered: the config has changed so that steps have other metrics. Then nothing is compared.
        same_episodes: the source gives the same episodes again. If not, the comparison ends at the first step whose
            episodes the journal does not have.
        stops: a difference stops the run (`trainer.on_resume_mismatch=stop`). If not, it is logged.
    """

    def __init__(
        self,
        run_dir: str,
        checkpoint: Checkpoint,
        *,
        exact: bool = True,
        same_layout: bool = True,
        altered: bool = False,
        same_episodes: bool = True,
        stops: bool = False,
    ) -> None:
        self._path = os.path.join(run_dir, REPLAY_FILE)
        self._checkpoint = checkpoint
        self._tolerance = max(0.0 if exact else _GPU_TOLERANCE, 0.0 if same_layout else _ROUNDING)
        self._all_steps = same_layout and exact
        self._same_episodes = same_episodes
        self._stops = stops
        self._matched = 0
        step = checkpoint.step
        files = (self._path, os.path.join(run_dir, METRICS_FILE))
        merged = {row["step"]: row for file in files for row in MetricsLines(file).after(step)}
        self._expected = merged if self._all_steps else {n: row for n, row in merged.items() if n == step + 1}
        if altered:
            self._expected = {}
            self._discard()
        elif merged:
            write_file(self._path, as_lines(merged[n] for n in sorted(merged)))

    def check(self, step: int, metrics: Mapping[str, float], from_journal: bool = False) -> None:
        """Compare the metrics of a new step with its logged line, and log when all steps are verified.

        Args:
            from_journal: all episodes of the step, those of its evaluation too, are those that were logged.

        Raises:
            UserError: the step differs, and a difference stops the run.
        """
        if not self._expected:
            return
        row = self._expected.pop(step, None)
        if not self._same_episodes and not from_journal:
            row, self._expected, self._all_steps = None, {}, False  # the weights are others from now on
        if row is not None:
            difference = first_difference(row, metrics, self._tolerance)
            if difference is not None:
                self._expected, path = {}, self._checkpoint.path
                problem = f"resumed from {path}, but step {step} was not replayed as it had been logged: {difference}"
                if self._stops:
                    raise UserError(f"trainer.on_resume_mismatch=stop: {problem}")
                LOG.warning("%s", problem)
                self._discard()
                return
            self._matched += 1
        if not self._expected:
            self._discard()
            if self._matched:
                how = f"equal to {self._tolerance:g}" if self._tolerance else "identical"
                alone = "" if self._all_steps else " (the first step alone can be compared)"
                steps = "step" if self._matched == 1 else "steps"
                LOG.info("resume verified: %d replayed %s %s%s", self._matched, steps, how, alone)

    def _discard(self) -> None:
        if os.path.exists(self._path):
            os.remove(self._path)


def first_difference(logged: Mapping[str, Any], now: Mapping[str, float], tolerance: float) -> str | None:
    """Return the first metric, by name, that differs by more than `tolerance`. Measured times are not compared."""
    for name in sorted(set(logged) & set(now)):
        if name.startswith(("time/", "perf/", "journal/")) or name == "step":
            continue
        before, after = logged[name], float(now[name])
        if before is None or not math.isfinite(after):
            is_same = before is None and not math.isfinite(after)
        else:
            is_same = abs(before - after) <= tolerance * max(abs(before), abs(after), 1e-3)
        if not is_same:
            return f"{name} is {now[name]} and was {before}"
    return None
