"""Detects that the driver hangs in a library call, in storage or in user code, and ends the job."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from trainer.cluster.stacks import PY_SPY_S, SCRIPT, allow_stacks, local_stacks, write_stacks
from trainer.cluster.worker_groups import Cluster
from trainer.config import TrainerConfig
from trainer.process import time_limits
from trainer.process.failure_log import INCIDENTS
from trainer.process.hang_limit import learnt_limit_s
from trainer.process.log_setup import LOG_FILE
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Progress, killed

_KNOWN_STEPS = 3  # number of steps after which the usual time between two safe points is known
_STACKS_S = 4 * PY_SPY_S  # of this node and others, each with a process of Ray that starts first
_FINAL_ACTION_S = _STACKS_S + 5.0
_HINT = (
    f"the job ends; its stacks are in `stacks` of the run directory, the last checkpoint is unchanged, and {CONTINUES}"
)


class StallDetector:
    """Measures how long the driver has passed no safe point. Uses neither threads nor clocks.

    The rule is the same as for calls of ranks. Once the usual pause between two safe points is known, the driver hangs
    if a pause takes `hang_s` and also ten times as long as the longest pause so far. In every case it hangs after
    `rpc_s`.

    Args:
        hang_s: `trainer.hang_timeout_s`.
        rpc_s: `trainer.rpc_timeout_s`.
    """

    def __init__(self, hang_s: float, rpc_s: float):
        self._hang_s = hang_s
        self._rpc_s = rpc_s
        self._first_step: int | None = None
        self._step = 0
        self._safe_points = -1
        self._longest_s = 0.0  # longest pause that has ended, except pauses in which the driver waited
        self._pause_s = 0.0
        self._waits = False

    def update(self, seconds: float, step: int, safe_points: int, is_waiting: bool) -> float | None:
        """Add `seconds` to the current pause. Return its length if the driver hangs, otherwise None.

        Args:
            step: the current step.
            safe_points: number of safe points that the driver has passed.
            is_waiting: the driver waits for something that may take long without progress, such as storage.
        """
        self._first_step = step if self._first_step is None else self._first_step
        self._step = step
        if safe_points != self._safe_points:
            self._longest_s = max(self._longest_s, 0.0 if self._waits else self._pause_s)
            self._safe_points, self._pause_s, self._waits = safe_points, 0.0, False
            return None
        self._pause_s += seconds
        self._waits |= is_waiting
        return self._pause_s if self._pause_s > self.limit_s else None

    @property
    def pause_s(self) -> float:
        """Length of the current pause, in seconds."""
        return self._pause_s

    @property
    def limit_s(self) -> float:
        """Longest allowed pause at this moment, in seconds."""
        steps = 0 if self._first_step is None else self._step - self._first_step
        is_known = steps >= _KNOWN_STEPS and not self._waits
        return min(learnt_limit_s(self._hang_s, self._longest_s) if is_known else self._rpc_s, self._rpc_s)


class Watchdog:
    """Ends the job if the main thread hangs within the steps: `with Watchdog(cfg.trainer, cluster)`.

    The process exits as if it were killed, with status 75: the same command continues the run. Its ranks and engines
    exit with it. If the main thread holds the interpreter's lock, the thread of this object cannot run. Then its
    heartbeats stop, and a separate process kills the job (`trainer.process.signal_watch`).
    """

    def __init__(self, t: TrainerConfig, cluster: Cluster):
        self._config = t
        self._cluster = cluster
        self._detector = StallDetector(t.hang_timeout_s, t.rpc_timeout_s)
        self._seen = (SIGNALS.safe_points, time.monotonic())  # outside of the steps: when this number was new
        self._end = threading.Event()
        self._heartbeat_lock = threading.Lock()

    def __enter__(self) -> Watchdog:
        # Only the main thread has safe points.
        if threading.current_thread() is threading.main_thread():
            allow_stacks()  # for the process that watches this one
            with SIGNALS.blocked():
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._heartbeat_lock:
            self._end.set()
            SIGNALS.send_heartbeat(None)

    def progress(self) -> Progress:
        """Return how the job gets on. Any thread may ask. No limit holds outside of the steps."""
        moment, (safe_points, since) = SIGNALS.moment, self._seen
        if moment == "training":
            pause_s, limit_s = self._detector.pause_s, self._detector.limit_s
            return Progress("stalled" if pause_s > limit_s else moment, pause_s, limit_s)
        now = time.monotonic()
        if safe_points != SIGNALS.safe_points:
            self._seen, since = (SIGNALS.safe_points, now), now
        return Progress(moment, now - since)

    def _run(self) -> None:
        detector = self._detector
        interval_s = min(time_limits.STALL_CHECK_INTERVAL_S, self._config.hang_timeout_s / 4)
        while not self._end.wait(interval_s):
            if not SIGNALS.in_steps:
                self.progress()  # notes the time
                self._send_heartbeat(None)
                continue
            # Count intervals instead of reading the clock: the whole job may have been stopped for a while.
            pause_s = detector.update(interval_s, INCIDENTS.step, SIGNALS.safe_points, SIGNALS.is_waiting)
            if pause_s is not None:
                self._send_heartbeat(3 * _FINAL_ACTION_S + _STACKS_S)  # the final actions may hang too
                self._end_job(pause_s)
            self._send_heartbeat(detector.limit_s)

    def _send_heartbeat(self, limit_s: float | None) -> None:
        """Report that this thread runs, and what to do if it does not run for `limit_s`."""
        limit = "rpc" if limit_s == self._config.rpc_timeout_s else "hang"
        pid, run_dir = os.getpid(), os.path.abspath(self._config.run_dir)
        message = (
            f"the driver has run no Python for {limit_s or 0.0:.0f} s in step {INCIDENTS.step}, in a long call of a C "
            f"library (trainer.{limit}_timeout_s)"
        )
        command = [sys.executable, SCRIPT, str(pid), run_dir, message]
        text = f"{message}; its stack is in `stacks` of the run directory: {killed(pid)}"
        with self._heartbeat_lock:
            if not self._end.is_set():
                SIGNALS.send_heartbeat(limit_s, text, command)

    def _end_job(self, pause_s: float) -> None:
        limit = "rpc" if pause_s > self._config.rpc_timeout_s else "hang"
        step = INCIDENTS.step
        waits = f", waiting for {SIGNALS.waits_for}," if SIGNALS.waits_for else ""
        text = f"the driver has made no progress for {pause_s:.0f} s in step {step}{waits} (trainer.{limit}_timeout_s)"
        for action in (
            lambda: LOG_FILE.write(f"{text}: {_HINT}"),
            lambda: os.write(2, f"{text}: {_HINT}\n".encode()),
            lambda: self._write_stacks(text),
            lambda: INCIDENTS.note("driver", "driver", "hanging driver", "ended the job", text),
        ):
            _try(action)
        os._exit(EXIT_STATUS)

    def _write_stacks(self, reason: str) -> None:
        stacks = {"driver": local_stacks()}
        _try(lambda: stacks.update(self._cluster.stacks()), _STACKS_S)
        write_stacks(self._config.run_dir, reason, stacks)


def _try(action: Callable[[], object], limit_s: float = _FINAL_ACTION_S) -> None:
    """Call `action` on another thread and wait at most `limit_s`. The action may need the resource that hangs."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
