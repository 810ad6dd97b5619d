"""Batches of steps ahead: each is made on a thread of its own, one after another, while the ranks train.

Staleness is a function of the step. With `rollout.ahead=k`, version v are the weights after step v - 1, and step t is
sampled by version t - k, or by the first version of this start if that is newer. The rows of a batch depend on the
steps that are committed when its weights arrive, and on the steps in flight; never on time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext

from trainer.data.ledger import SampleIndex
from trainer.environments.episode_runner import PhaseTimer, RolloutRequest
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.signals import SIGNALS
from trainer.process.tracing import TRACER
from trainer.sources.batches import StepBatch
from trainer.sources.recorded import RecordedEpisodes

LOG = logging.getLogger(__name__)


class CancelledBatch(Exception):
    """The run does not need the batch any more: it ends, or goes back to a checkpoint."""


def steps_to_begin(version: int, ahead: int, total: int, known: Collection[int]) -> list[int]:
    """Return the steps whose batches begin now, in the order in which they are made.

    Args:
        version: of the weights that the engines have: the step that is trained next.
        ahead: `rollout.ahead`.
        total: the last step of the run.
        known: the steps whose batch is there, or has begun.
    """
    return [step for step in range(version, min(version + ahead, total) + 1) if step not in known]


class BatchProgress:
    """A batch while it is made: for the code that makes it.

    Args:
        step: the one that trains on it.
        version: of the weights that sample it.
        history: of these weights (see `Journal.history`). None: they are those of now.
        timer: of the phases.
    """

    def __init__(self, step: int, version: int, history: str | None, timer: PhaseTimer = nullcontext):
        self.step = step
        self.version = version
        self.history = history
        self.timer = timer
        self.rows: list[SampleIndex] = []
        """The rows that have been drawn so far; once all episodes are generated, those that the step uses up."""

    def records(
        self, journal: Journal, requests: Sequence[RolloutRequest], are_single: Callable[[str], bool]
    ) -> RecordedEpisodes:
        """Return what the journal has of the episodes of these requests, and what it gets.

        Args:
            are_single: whether the episodes of a source are recorded one by one.
        """
        return RecordedEpisodes(journal, requests, self.history, are_single=are_single)

    def check(self) -> None:
        """Raise if the batch is not needed any more. Called often.

        Raises:
            CancelledBatch: it is not needed.
        """

    def mark_generated(self) -> None:
        """Note that the engines have nothing more to do for the batch, and that its rows are chosen."""


class BatchThread(BatchProgress):
    """A batch that is made on a thread.

    Args:
        make: makes it.
        before: the batch that is generated first; None: there is none.
    """

    def __init__(
        self,
        step: int,
        version: int,
        history: str,
        make: Callable[[BatchProgress], StepBatch],
        before: BatchThread | None,
    ):
        super().__init__(step, version, history)
        self.began_at = self.generated_at = 0.0
        self._make = make
        self._before = before
        self._generated, self._done = threading.Event(), threading.Event()
        self._is_cancelled = False
        self._batch: StepBatch | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"batch of step {step}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the rollouts of step {self.step}"

    def check(self) -> None:
        SIGNALS.check()
        if self._is_cancelled:
            raise CancelledBatch(f"{self.name}: not needed any more")

    def mark_generated(self) -> None:
        if not self._generated.is_set():
            failpoint("ahead:generated")
            self._end_generation()

    def _end_generation(self) -> None:
        if not self._generated.is_set():
            self.generated_at = time.monotonic()
            self._generated.set()

    def wait_generated(self) -> None:
        """Wait until the engines have nothing more to do for the batch. `result` raises its error."""
        self._wait(self._generated)

    def result(self) -> StepBatch:
        """Wait for the batch, and return it. Raises the error that has ended the thread."""
        self._wait(self._done)
        if self._error is not None:
            raise self._error
        assert self._batch is not None
        return self._batch

    def cancel(self) -> None:
        """Let the thread end."""
        self._is_cancelled = True

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        return self._done.wait(timeout_s) if timeout_s else self._done.is_set()  # many are asked, often

    def _wait(self, event: threading.Event) -> None:
        """Wait. The main thread makes progress only as far as the thread of the batch does."""
        with SIGNALS.waiting_for(self.name):
            while not event.wait(time_limits.POLL_INTERVAL_S):
                self.check_behind()

    def check_behind(self) -> None:
        """Check signals on a thread that waits for this one: it makes progress only as far as this one does."""
        SIGNALS.check_behind(self._thread.ident or 0)

    def _run(self) -> None:
        try:
            while self._before is not None and not self._before._generated.wait(time_limits.POLL_INTERVAL_S):
                self.check()
            self.check()
            if self._before is not None and self._before._error is not None:
                raise CancelledBatch(f"{self._before.name} have failed")
            self._before = None
            self.began_at = time.monotonic()
            failpoint("ahead:begun")
            with TRACER.span(f"rollouts of step {self.step}", "batches*"):
                self._batch = self._make(self)
            self.mark_generated()
        except BaseException as error:  # the thread that trains raises it
            self._error = error
        self._end_generation()
        self._done.set()


class BatchesAhead:
    """The batches of the steps that are not committed, in the order of the steps."""

    def __init__(self) -> None:
        self._held: dict[int, StepBatch] = {}  # of a checkpoint
        self._threads: dict[int, BatchThread] = {}

    @property
    def steps(self) -> set[int]:
        """The steps whose batch is there, or has begun."""
        return {*self._held, *self._threads}

    @property
    def newest(self) -> BatchThread | None:
        return self._threads[max(self._threads)] if self._threads else None

    def begin(self, step: int, version: int, history: str, make: Callable[[BatchProgress], StepBatch]) -> None:
        """Begin to make the batch of a step. Earlier batches are generated first."""
        self._threads[step] = BatchThread(step, version, history, make, self.newest)

    def hold(self, batches: Mapping[int, StepBatch]) -> None:
        """Take the batches that a checkpoint holds."""
        self._held = dict(batches)

    def thread(self, step: int) -> BatchThread | None:
        """Return the batch of a step if a thread makes it or has made it."""
        return self._threads.get(step)

    def wait_generated(self) -> None:
        """Wait until all batches are generated. One that has failed costs no step before its own."""
        for step in sorted(self._threads):
            self._threads[step].wait_generated()

    def held(self, step: int) -> StepBatch | None:
        """Return the batch of a step if a checkpoint has held it."""
        return self._held.get(step)

    def rows_before(self, step: int) -> list[SampleIndex]:
        """Return the rows in flight: those of the steps before this one that are not committed. Any thread may ask."""
        threads = list(self._threads.values())  # the thread that trains may begin others meanwhile
        held = [row.index for other, batch in self._held.items() if other < step for row in batch.used]
        return held + [row for thread in threads if thread.step < step for row in thread.rows]

    def older_than(self, version: int) -> dict[int, Callable[[], StepBatch]]:
        """Return the batches of weights before this version, by step: functions that wait for them."""
        waits: dict[int, Callable[[], StepBatch]] = {step: lambda b=batch: b for step, batch in self._held.items()}  # type: ignore[misc]
        waits |= {step: thread.result for step, thread in self._threads.items() if thread.version < version}
        return dict(sorted(waits.items()))

    def commit(self, step: int) -> None:
        """Forget the batch of a step that is trained."""
        self._held.pop(step, None)
        self._threads.pop(step, None)

    def cancel(self, abort: Callable[[], None]) -> None:
        """Forget all batches, and end their threads.

        Args:
            abort: ends the requests to the engines.
        """
        threads = list(self._threads.values())
        self._held, self._threads = {}, {}
        end_threads(threads, abort)


def end_threads(threads: Sequence[BatchThread], abort: Callable[[], None]) -> None:
    """Cancel threads, and wait until they have ended.

    Args:
        abort: ends the requests to the engines.
    """
    threads = [thread for thread in threads if not thread.has_ended()]
    for thread in threads:
        thread.cancel()
    end = time.monotonic() + time_limits.BATCH_END_S
    while threads and time.monotonic() < end:
        abort()  # again and again: a thread may just have begun a request
        threads[0].has_ended(time_limits.POLL_INTERVAL_S)
        threads = [thread for thread in threads if not thread.has_ended()]
    for thread in threads:
        seconds = time_limits.BATCH_END_S
        LOG.warning("%s: not ended %g s after the run needs it no more", thread.name, seconds)
