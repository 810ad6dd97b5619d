"""Rewards computed in processes of their own, so that one that hangs or crashes costs one completion."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from pebble import ProcessExpired, ProcessFuture, ProcessPool

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
        self._pool = ProcessPool(
            max_workers=num_processes,
            context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(os.getpid(), name),
        )

    def __enter__(self) -> RewardPool:
        # The processes import their modules while engines and ranks start.
        self._warm_up = self._pool.schedule(_score_chunk, args=(self._name, [], []))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()
        self._pool.join()

    def score(self, completions: Sequence[str], answers: Sequence[str]) -> tuple[list[float], RewardFailures]:
        """Rewards in order; a completion whose reward raises, hangs or is not finite gets 0 and is counted."""
        completions, answers = list(completions), list(answers)
        spans = [slice(i, i + _CHUNK) for i in range(0, len(completions), _CHUNK)]
        chunks = [(span, self._schedule(completions[span], answers[span])) for span in spans]
        results: list[float | str | None] = [None] * len(completions)
        for span, future in chunks:
            try:
                results[span] = future.result()
            except (FutureTimeout, ProcessExpired):
                continue
        # Something in the chunks without results hangs or kills its process: find out which, one by one.
        singles = {
            i: self._schedule([completions[i]], [answers[i]]) for i, result in enumerate(results) if result is None
        }
        for i, future in singles.items():
            try:
                results[i] = future.result()[0]
            except FutureTimeout:
                results[i] = f"took longer than reward.timeout_s={self._timeout_s:g}"
            except ProcessExpired as error:
                results[i] = f"ended its process ({error})"
        failures = RewardFailures()
        for result in results:
            if isinstance(result, str):
                failures.add(result)
        return [0.0 if isinstance(result, str) else result for result in results], failures

    def _schedule(self, completions: list[str], answers: list[str]) -> ProcessFuture:
        return self._pool.schedule(_score_chunk, args=(self._name, completions, answers), timeout=self._timeout_s)


def _start_worker(driver: int, name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that is killed takes this one along
    if os.getppid() != driver:  # it died before that took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    # Imports take their time here, where the time limit of a completion does not run.
    function = resolve(name)
    if name in REWARDS:  # math imports more at its first call
        function("0", "1")


def _score_chunk(name: str, completions: list[str], answers: list[str]) -> list[float | str]:
    """The reward of each completion, or why there is none."""
    function = resolve(name)
    results: list[float | str] = []
    for completion, answer in zip(completions, answers, strict=True):
        try:
            value = float(function(completion, answer))
            results.append(value if math.isfinite(value) else f"is {value}")
        except (Exception, SystemExit) as error:  # user code may raise anything; it costs this completion only
            results.append(f"raised {type(error).__name__}: {error}")
    return results
