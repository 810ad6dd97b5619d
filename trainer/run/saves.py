"""The saves of a run: when they are due, and how they ended."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.checkpoint.components import Component
from trainer.checkpoint.manager import CheckpointManager, SaveResult
from trainer.errors import DivergedError, NonFiniteError, NotSavedError, UserError
from trainer.process.signals import CONTINUES

LOG = logging.getLogger(__name__)
_LAST_TRIES = 4
MEAN_TIME_BETWEEN_FAILURES_S = 4 * 3600.0  # what `auto` expects
FAILURES_ALLOWED = 3
"""Saves in a row that may fail before the run stops. Until then training continues."""


class Saves:
    """The saves of a run. One that is begun is under way, until it is committed or has failed.

    Forbidden: two saves under way (`begin` waits for the one before); a second save of a step whose save has not
    failed; training after more than `FAILURES_ALLOWED` failures in a row (`collect`); an end of the run whose last step
    is not committed (`save_last`).

    Args:
        interval: number of steps between saves, -1 (do not save by steps) or `auto` (Young's optimal interval).
        ckpt_path: of the config, for messages.
    """

    def __init__(self, interval: int | str, ckpt_path: str, checkpoints: CheckpointManager):
        self._interval = interval
        self._begun_at = time.monotonic()
        self._cost_s = 0.0
        self._ckpt_path = ckpt_path
        self._checkpoints = checkpoints
        self.restart()

    def restart(self) -> None:
        """Forget the saves: the run begins, or continues from its last commit."""
        self._failures = 0
        self.failure = ""  # why the last failed save failed
        self.last_good = ""
        """The newest checkpoint of the run that is committed and known to this object; empty: none."""
        self.seconds = 0.0  # seconds from begin to commit of the last save
        self._blocked_s: Counter[int] = Counter()  # by the steps of saves
        self.begun: int | None = None  # the step of the newest save, unless it has failed

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        if self._interval == "auto":
            return time.monotonic() - self._begun_at >= self.best_interval_s()
        assert isinstance(self._interval, int)
        return self._interval > 0 and step % self._interval == 0

    def best_interval_s(self) -> float:
        """Return sqrt(2 C M) (Young, 1974), with C the cost of a save in seconds and M the mean time between failures.

        The interval is at least twice the duration of a save, because only one save is under way at a time. Before the
        first save C is unknown and counts as 0, so the first save is due immediately: it is worth the most.
        """
        return max(math.sqrt(2 * self._cost_s * MEAN_TIME_BETWEEN_FAILURES_S), 2 * self.seconds)

    def begin(
        self,
        step: int,
        components: Sequence[Component],
        description: dict[str, Any],
        before: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Begin to save `step`, unless its save has begun (see `CheckpointManager.save`)."""
        if self.begun == step:
            return
        with self._blocking(self.begun):
            self._checkpoints.wait()
        with self._blocking(step):
            self._checkpoints.save(step, components, description, before)
        self.begun, self._begun_at = step, time.monotonic()

    def wait(self, last: bool = False) -> None:
        """Wait until no save is under way, and collect the results. `last`: see `collect`."""
        self._checkpoints.wait()
        self.collect(self._checkpoints.results(), last)

    @contextlib.contextmanager
    def completed(self) -> Iterator[None]:
        """Complete the saves that are under way before a sentence to the user ends the block."""
        try:
            yield
        except (UserError, NonFiniteError, DivergedError):
            self.wait(last=True)  # the sentence may be why a save has failed
            raise

    def add_blocked(self, step: int | None, seconds: float) -> None:
        """Count seconds that training has waited for the save of `step`; None: there is none."""
        if step is not None:
            self._blocked_s[step] += seconds  # type: ignore[assignment]

    @contextlib.contextmanager
    def _blocking(self, step: int | None) -> Iterator[None]:
        """Count the time of the block as time that training waits for the save of `step`."""
        started = time.monotonic()
        yield
        self.add_blocked(step, time.monotonic() - started)

    def collect(self, results: Sequence[SaveResult], last: bool = False) -> None:
        """Log the results of saves, and count the failures.

        Args:
            last: the results are tries of the last save of this process. They do not count as too many failures.

        Raises:
            UserError: more than `FAILURES_ALLOWED` saves failed in a row.
        """
        for result in results:
            blocked_s = self._blocked_s.pop(result.step, 0.0)
            if result.error is None:
                self._failures = 0
                self.last_good = result.path
                self.seconds = result.seconds
                self._cost_s = max(blocked_s, self._cost_s / 2)  # halving forgets an outlier within a few saves
                continue
            self._failures += 1
            self.failure = result.error
            if self.begun == result.step:
                self.begun = None
            good = self.last_good or "none yet"
            message = f"the checkpoint of step {result.step} FAILED ({result.error}); the last good one is {good}"
            if self._failures > FAILURES_ALLOWED and not last:
                raise UserError(
                    f"trainer.ckpt_path={self._ckpt_path}: {message}; {self._failures} failed in a row; free space "
                    f"or raise the quota there, or repair it, and then {CONTINUES}"
                )
            LOG.warning(message if last else f"{message}; training continues")

    def save_last(self, step: int, save: Callable[[], None]) -> None:
        """Save the last state of this process; try again if that fails. Raises NotSavedError: every try failed."""
        import tenacity  # seldom needed, and slow to import

        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NotSavedError),
            stop=tenacity.stop_after_attempt(_LAST_TRIES),
            wait=tenacity.wait_exponential(multiplier=0.5),
            reraise=True,
        ):
            with attempt:
                save()
                self.wait(last=True)
                if self.begun != step:
                    raise NotSavedError(
                        f"step {step} is trained but not saved: trainer.ckpt_path={self._ckpt_path}: {self.failure}; "
                        f"the last good checkpoint is {self.last_good or 'none yet'}. Repair that, then give the same "
                        "command with trainer.resume_mode=latest: it trains again what is not saved."
                    )
