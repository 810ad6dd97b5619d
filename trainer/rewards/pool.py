"""Rewards computed in processes of their own, so that one that hangs or crashes costs one completion."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from trainer.errors import WorkerError
from trainer.rewards.functions import REWARDS, resolve

_CHUNK = 64
_PR_SET_PDEATHSIG = 1


@dataclass
class RewardFailures:
    """Completions whose reward could not be computed and counts as 0."""

    count: int = 0
    first: str = ""

    def add(self, reason: str) -> None:
        self.first = self.first or reason
        self.count += 1


class RewardPool:
    """`num_processes` processes that compute the reward `name`. A context manager.

    Args:
        timeout_s: time limit of one completion; past it the process is killed.

    Raises:
        UserError: there is no such reward.
    """

    def __init__(self, name: str, timeout_s: float, num_processes: int):
        resolve(name)  # fail now, not at the first step
        self._name = name
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._pool = self._new_pool()

    def __enter__(self) -> RewardPool:
        self._warm_up()  # the processes import their modules while engines and ranks start
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def score(self, completions: Sequence[str], answers: Sequence[str]) -> tuple[list[float], RewardFailures]:
        """Rewards in order; a completion whose reward raises, hangs or is not finite gets 0 and is counted.

        Raises:
            WorkerError: the processes cannot start.
        """
        self._restart_if_broken()
        completions, answers = list(completions), list(answers)
        results: list[float | str] = [0.0] * len(completions)
        size = min(_CHUNK, max(1, -(-len(completions) // self._num_processes)))

        def schedule(span: range) -> tuple[range, ProcessFuture]:
            part = slice(span.start, span.stop)
            return span, self._schedule(completions[part], answers[part])

        pending = deque(schedule(range(len(completions))[i : i + size]) for i in range(0, len(completions), size))
        while pending:
            span, future = pending.popleft()
            try:
                part = future.result()
            except (FutureTimeout, ProcessExpired, BrokenProcessPool) as error:
                if isinstance(error, BrokenProcessPool):  # whatever else was scheduled is lost with it
                    self._restart_if_broken()
                    pending = deque(schedule(lost) for lost, _ in pending)
                if len(span) > 1:  # something in there hangs or kills its process: find out which, one by one
                    pending.extend(schedule(span[i : i + 1]) for i in range(len(span)))
                    continue
                part = [f"took longer than reward.timeout_s={self._timeout_s:g}" if isinstance(error, FutureTimeout)
                        else f"ended its process ({error})"]  # fmt: skip
            results[span.start : span.start + len(part)] = part
            if len(part) < len(span):
                pending.append(schedule(span[len(part) :]))
        failures = RewardFailures()
        for result in results:
            if isinstance(result, str):
                failures.add(result)
        return [0.0 if isinstance(result, str) else result for result in results], failures

    def _schedule(self, completions: list[str], answers: list[str]) -> ProcessFuture:
        args = (self._name, completions, answers, self._timeout_s / 10)
        return self._pool.schedule(_score_chunk, args=args, timeout=self._timeout_s)

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_processes,
            context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(os.getpid(), self._name),
        )

    def _warm_up(self) -> ProcessFuture:
        return self._pool.schedule(_score_chunk, args=(self._name, [], [], 0.0))

    def _restart_if_broken(self) -> None:
        """Pebble gives a pool up when a process dies between two tasks (the kernel ran out of memory, say)."""
        if self._pool.active:
            return
        self._stop()
        self._pool = self._new_pool()
        try:
            self._warm_up().result()
        except BrokenProcessPool as error:
            raise WorkerError(f"the processes of reward.name={self._name} die as they start; "
                              "the reason is in the output above") from error  # fmt: skip

    def _stop(self) -> None:
        self._pool.stop()
        self._pool.join()


def _start_worker(driver: int, name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that is killed takes this one along
    if os.getppid() != driver:  # it died before that took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    os.environ["OMP_NUM_THREADS"] = "1"  # the cores are for ranks and engines
    # Imports take their time here, where the time limit of a completion does not run.
    function = resolve(name)
    if name in REWARDS:  # math imports more at its first call
        function("0", "1")


def _score_chunk(name: str, completions: list[str], answers: list[str], budget_s: float) -> list[float | str]:
    """The reward of each completion, or why there is none, as far as `budget_s` seconds go but at least of one.

    A chunk has the time limit of one completion. Stopping early leaves nearly all of it to whichever
    completion is the slow one, and rewards that are merely slow are not cut off for being many.
    """
    function = resolve(name)
    results: list[float | str] = []
    end = time.monotonic() + budget_s
    for completion, answer in zip(completions, answers, strict=True):
        try:
            value = float(function(completion, answer))
            results.append(value if math.isfinite(value) else f"is {value}")
        except (Exception, SystemExit) as error:  # user code may raise anything; it costs this completion only
            results.append(f"raised {type(error).__name__}: {error}")
        if time.monotonic() > end:
            break
    return results
