"""Verify a resume: compare replayed steps with the lines that the killed run had logged."""

from __future__ import annotations

import logging
import math
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import TrainerConfig
from trainer.config.tasks import find_task
from trainer.files.atomic_io import write_file
from trainer.metrics.names import set_of_metric
from trainer.metrics.tracker import METRICS_FILE, as_lines, read_metrics, values_of
from trainer.run.compatibility import ALL_METRICS, OF_VALIDATION

LOG = logging.getLogger(__name__)

REPLAY_FILE = "metrics.replay.jsonl"
WATCHED = ("policy/loss", "policy/kl", "policy/grad_norm", "reward/mean", "critic/loss")
_WATCHED_STEPS = 3
_HISTORY = 20
_FEWEST = 5
"""Steps of history below which nothing is far from it."""
_SMALL = 1e-3
"""A metric that was 0 may leave it by this much: when rewards begin to differ, the policy begins to move."""
_ROUNDING = 1e-3  # relative difference that another number of ranks may cause in one step
_RATE_ROUNDING = 1e-6
_OF_EPISODES = ("data/", "reward/", "response_length/", "episode/", "environment/", "sampling/", "progress/")
_OF_EPISODES += ("val/reward/", "val/accuracy", "val/pass@", "val/failures")
"""Metrics, by the beginnings of their names, that the driver computes from episodes alone."""
_GPU_TOLERANCE = 1e-2  # kernels that add with atomics differ from run to run in the last bits


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
    exact, tolerance = device == "cpu" or trainer.deterministic, trainer.resume_tolerance
    return ReplayAudit(
        trainer.run_dir,
        step,
        tolerance if tolerance is not None else 0.0 if exact else _GPU_TOLERANCE,
        same_layout,
        altered,
        exact,
        same_episodes,
        chance=tolerance is None,
        watched=find_task(trainer.task).watched,
    )


class ReplayAudit:
    """Compares the first steps after a resume with the lines that the killed run logged after the checkpoint.

    The lines are kept in `metrics.replay.jsonl` until they are replayed, so that a run that is killed during the replay
    still has them. Without such lines, the first steps are compared with their recent history.

    Args:
        step: step of the checkpoint that the run resumed from.
        tolerance: relative difference that counts as equal.
        same_layout: the work is split as it was when the lines were logged. If not, sums are rounded differently,
            sampling soon diverges, and only the first step is compared.
        altered: metrics, by the beginning of their names, that a changed config alters (see
            `compatibility.altered_metrics`). They are not compared. If they are more than the validation, only the
            first step is compared, because the later ones start from other weights.
        exact: a step computes the same bits again from the same episodes. If not, only the first step is compared.
        same_episodes: the source gives the same episodes again. If not, the last bits have changed some sampled tokens,
            and after them whole completions. Then the first step is compared whose episodes the journal does not have,
            and none after it.
        chance: where other episodes were sampled, metrics may differ as far as chance explains (see `beyond_chance`).
        watched: metrics of the task that are watched besides `WATCHED`.
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
        chance: bool = True,
        watched: Sequence[str] = (),
    ) -> None:
        self._path = os.path.join(run_dir, REPLAY_FILE)
        self._tolerance = tolerance if same_layout else max(tolerance, _ROUNDING)
        self._altered = altered
        same_steps = set(altered) <= set(OF_VALIDATION)
        self._all_steps = same_layout and same_steps and exact
        self._exact = exact
        self._same_episodes = same_episodes
        self._chance = chance
        self._by_chance = False  # a step was compared so
        self._watched = (*WATCHED, *watched)
        self._start = step
        rows = read_metrics(os.path.join(run_dir, METRICS_FILE))
        earlier = read_metrics(self._path)
        merged = {row["step"]: row for row in [*earlier, *rows] if row["step"] > step}
        self._expected = merged if self._all_steps else {n: row for n, row in merged.items() if n == step + 1}
        self._history = [row for row in rows if row["step"] <= step][-_HISTORY:] if same_steps else []
        self._matched = 0
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
            # A step that computes the same bits jumps where the undisturbed run does.
            is_exact = self._all_steps and self._same_episodes
            if step <= self._start + _WATCHED_STEPS and not (is_exact or self._matched):
                self._warn_of_jumps(metrics)
            return None
        row = self._expected.pop(step, None)
        if row is not None:
            same = {name: value for name, value in row.items() if not name.startswith(self._altered)}
            difference = self._difference(same, metrics, from_journal)
            if difference is not None:
                self._expected, self._all_steps = {}, False
                return f"step {step} was not replayed as it had been logged: {difference}"
            self._matched += 1
        if not self._same_episodes and not from_journal and self._expected:
            self._expected, self._all_steps = {}, False  # the weights are others from now on
        if not self._expected:
            self.discard()
            if self._matched:
                self._log_verified()
        return None

    def _warn_of_jumps(self, metrics: Mapping[str, float]) -> None:
        for jump in jumps(metrics, self._history, self._watched):
            LOG.warning(
                "after the resume, %s; if the next steps do not return to what was before, go back with "
                "`trainer checkpoint rollback %s --to` and a step before that",
                jump,
                shlex.quote(os.path.dirname(self._path)),
            )

    def _log_verified(self) -> None:
        how = "identical" if self._tolerance == 0 else f"equal to {self._tolerance:g}"
        limits = [f"without {', '.join(self._altered)}, which the new config alters"] if self._altered else []
        steps, these = ("step", "the first step") if self._matched == 1 else ("steps", "these steps")
        limits += [] if self._all_steps else [f"{these} alone can be compared with this config"]
        limits += ["sampled values as far as chance allows"] if self._by_chance else []
        shown = f" ({'; '.join(limits)})" if limits else ""
        LOG.info("resume verified: %d replayed %s %s%s", self._matched, steps, how, shown)

    def _difference(self, logged: Mapping[str, Any], now: Mapping[str, float], from_journal: bool) -> str | None:
        """Return the first metric that differs by more than it may."""
        if not self._chance or self._same_episodes or (from_journal and self._exact):
            return first_difference(logged, now, self._tolerance)
        self._by_chance = True
        of_episodes = {name: value for name, value in logged.items() if _is_of_episodes(name)}
        return (first_difference(of_episodes, now, 0.0) if from_journal else None) or beyond_chance(
            logged, now, self._history, self._watched
        )

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


def _is_of_episodes(name: str) -> bool:
    """Return whether the driver computes a metric from episodes alone."""
    return name.startswith(_OF_EPISODES) or set_of_metric(name) is not None


def beyond_chance(
    logged: Mapping[str, Any],
    now: Mapping[str, float],
    history: Sequence[Mapping[str, Any]],
    watched: Sequence[str],
) -> str | None:
    """Return the first metric that differs although some tokens may have been sampled differently.

    Learning rates must be equal. A `watched` metric differs if it leaves the logged value by a tenth and by eight times
    the deviation of this value and those of the steps before. With fewer than five steps before, it is not compared.
    """
    rates = {name: value for name, value in logged.items() if name.endswith("/lr")}
    difference = first_difference(rates, now, _RATE_ROUNDING)
    if difference is not None:
        return difference
    for name in watched:
        before, past = logged.get(name), values_of(history, name)
        if name not in now or before is None or len(past) < _FEWEST:
            continue
        if _is_far(now[name], before, [*past, before]):
            return f"{name} is {now[name]} and was {before}"
    return None


def jumps(
    metrics: Mapping[str, float], history: Sequence[Mapping[str, Any]], watched: Sequence[str] = WATCHED
) -> list[str]:
    """Return a sentence for each watched metric that is far outside its recent history."""
    sentences = []
    for name in watched:
        value, past = metrics.get(name), values_of(history, name)
        if value is not None and len(past) >= _FEWEST and _is_far(value, mean := sum(past) / len(past), past):
            sentences.append(
                f"{name} jumped to {value:.4g}; over the {len(past)} steps before it was {mean:.4g} ± "
                f"{statistics.pstdev(past):.2g}"
            )
    return sentences


def _is_far(value: float, centre: float, values: Sequence[float]) -> bool:
    """Return whether `value` is further from `centre` than chance explains. NaN is."""
    return not abs(value - centre) <= 8 * statistics.pstdev(values) + 0.1 * abs(centre) + _SMALL
