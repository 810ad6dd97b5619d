"""Notices that the driver itself hangs, in a call of a library, of the storage or of user code, and ends the job."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from trainer.cluster.stacks import SCRIPT, allow_stacks, own_stacks, write_stacks
from trainer.cluster.worker_groups import Cluster
from trainer.config import TrainerConfig
from trainer.process.failure_log import INCIDENTS, INFRASTRUCTURE, Incident
from trainer.process.log_setup import LOG_FILE
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, killed

_POLL_INTERVAL_S = 0.1  # often enough to see the first steps, however quick they are
_KNOWN_STEPS = 3  # steps after which it is known how long the driver stays between two safe points
_HANG_FACTOR = 10.0
_STACKS_S = 40.0
_LAST_WORDS_S = _STACKS_S + 5.0
_ADVICE = (
    f"the job ends; its stacks are in `stacks` of the run directory, the last checkpoint is as it was, and {CONTINUES}"
)


class StallDetector:
    """How long the driver has not moved. Knows neither threads nor clocks.

    The rule is that of the calls of ranks: what was quick before hangs after `hang_s`, if it also takes ten times as
    long as the longest pause before; anything else hangs after `call_s`.

    Args:
        hang_s: `trainer.hang_timeout_s`.
        call_s: `trainer.rpc_timeout_s`.
    """

    def __init__(self, hang_s: float, call_s: float):
        self._hang_s = hang_s
        self._call_s = call_s
        self._first_step: int | None = None
        self._step = 0
        self._moves = -1
        self._longest_s = 0.0  # of the pauses that are over, without those in which the driver waited
        self._still_s = 0.0
        self._waits = False

    def look(self, seconds: float, step: int, moves: int, is_waiting: bool) -> float | None:
        """Count `seconds` since the last look. If the driver hangs, return for how long it has not moved, else None.

        Args:
            step: the step that is under way.
            moves: number of safe points that the driver has passed.
            is_waiting: the driver waits for something that may take long without a sign, such as the storage.
        """
        self._first_step = step if self._first_step is None else self._first_step
        self._step = step
        if moves != self._moves:
            self._longest_s = max(self._longest_s, 0.0 if self._waits else self._still_s)
            self._moves, self._still_s, self._waits = moves, 0.0, False
            return None
        self._still_s += seconds
        self._waits |= is_waiting
        return self._still_s if self._still_s > self.limit_s else None

    @property
    def limit_s(self) -> float:
        """Seconds for which the driver may stay without a move now."""
        steps = 0 if self._first_step is None else self._step - self._first_step
        is_known = steps >= _KNOWN_STEPS and not self._waits
        return min(max(self._hang_s, _HANG_FACTOR * self._longest_s) if is_known else self._call_s, self._call_s)


class DriverWatch:
    """Ends the job if the main thread hangs within the steps: `with DriverWatch(cfg.trainer, cluster)`.

    The process ends as it would by a kill, with status 75: the same command continues. Its ranks and engines end with
    it. If the main thread keeps the interpreter's lock, the thread of this object cannot run: then its beats stay away,
    and the watch of the process kills it (`trainer.process.signal_watch`).
    """

    def __init__(self, t: TrainerConfig, cluster: Cluster):
        self._config = t
        self._cluster = cluster
        self._end = threading.Event()
        self._beating = threading.Lock()

    def __enter__(self) -> DriverWatch:
        # On other threads there are no safe points.
        if threading.current_thread() is threading.main_thread():
            allow_stacks()  # to the watch of the process
            with SIGNALS.blocked():
                threading.Thread(target=self._run, name="driver watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._beating:
            self._end.set()
            SIGNALS.beat(None)

    def _run(self) -> None:
        hang_s, call_s = self._config.hang_timeout_s, self._config.rpc_timeout_s
        stillness, look_s = StallDetector(hang_s, call_s), min(_POLL_INTERVAL_S, hang_s / 4)
        while not self._end.wait(look_s):
            if not SIGNALS.in_steps:
                self._beat(None)
                continue
            # What the clock says does not count: the whole job may have been stopped for a while.
            still_s = stillness.look(look_s, INCIDENTS.step, SIGNALS.moves, SIGNALS.is_waiting)
            if still_s is not None:
                self._beat(3 * _LAST_WORDS_S + _STACKS_S)  # they may need what hangs
                self._end_job(still_s)
            self._beat(stillness.limit_s)

    def _beat(self, limit_s: float | None) -> None:
        """Say that this thread runs, and what to do after `limit_s` in which it does not."""
        limit = "call" if limit_s == self._config.rpc_timeout_s else "hang"
        pid, run_dir = os.getpid(), os.path.abspath(self._config.run_dir)
        fact = (
            f"the driver has run no Python for {limit_s or 0.0:.0f} s in step {INCIDENTS.step}, in a long call of a C "
            f"library (trainer.{limit}_timeout_s)"
        )
        command = [sys.executable, SCRIPT, str(pid), run_dir, fact]
        with self._beating:
            if not self._end.is_set():
                SIGNALS.beat(limit_s, f"{fact}; its stack is in `stacks` of the run directory: {killed(pid)}", command)

    def _end_job(self, still_s: float) -> None:
        limit = "call" if still_s > self._config.rpc_timeout_s else "hang"
        step = INCIDENTS.step
        fact = f"the driver has not moved for {still_s:.0f} s in step {step} (trainer.{limit}_timeout_s)"
        node = socket.gethostname()
        hang = Incident(step, "driver", "driver", node, INFRASTRUCTURE, "hanging driver", "ended the job", 0.0, fact)
        for last_words in (
            lambda: LOG_FILE.write(f"{fact}: {_ADVICE}"),
            lambda: os.write(2, f"{fact}: {_ADVICE}\n".encode()),
            lambda: self._write_stacks(fact),
            lambda: INCIDENTS.record(hang),
        ):
            _try(last_words)
        os._exit(EXIT_STATUS)

    def _write_stacks(self, fact: str) -> None:
        stacks = {"driver": own_stacks()}
        _try(lambda: stacks.update(self._cluster.stacks()), _STACKS_S)
        write_stacks(self._config.run_dir, fact, stacks)


def _try(action: Callable[[], object], limit_s: float = _LAST_WORDS_S) -> None:
    """Call `action`, but do not wait for it for long: what hangs may be what it needs."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
