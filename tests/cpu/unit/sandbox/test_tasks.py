"""Rounds of several threads that share the processes of a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cpu.unit.sandbox.test_pool import Calls, do, pool_of
from tests.support.jobs import wait_until
from trainer.errors import WorkerError
from trainer.sandbox.pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pool_of(2) as pool:
        yield pool


class Finished(Calls):
    """A session that keeps its answers when its process is replaced after the last one."""

    def restart(self) -> None:
        if self.next_call() is not None:
            super().restart()


def is_busy(pool: WorkerPool) -> bool:
    return any(worker.batches for worker in pool._workers)


def test_a_round_ends_while_another_is_open(pool):
    with pool.round() as outer:
        first = Calls(["add", 0])
        outer.submit([first])
        do(pool, inner := Calls(["add", 0]))
        assert inner.values
        outer.submit([second := Calls(["add", 0])])
        outer.wait()
    assert first.values and second.values


def test_a_round_that_is_left_costs_the_others_nothing(pool):
    """Its hanging call shares the processes with sessions and calls of another round, which are repeated."""
    hanging, sessions = Calls(["hang", 0]), [Finished(["slow", 0.3], ["add", 0], session=True) for _ in range(4)]
    with pool.round() as kept:
        with pytest.raises(KeyboardInterrupt), pool.round() as left:
            left.submit([hanging])
            wait_until(lambda: is_busy(pool))
            kept.submit([*sessions, *(others := [Calls(["add", 0]) for _ in range(10)])])
            raise KeyboardInterrupt
        kept.wait()
    assert hanging.failure == "timeout: was not tried"
    assert all(len(session.values) == 2 and not session.failure for session in sessions)
    assert all(task.values and not task.failures for task in others)


def test_the_failures_of_one_round_do_not_use_up_the_time_of_another(monkeypatch):
    monkeypatch.setattr("trainer.sandbox.limits.FAILED_TIME_LIMITS", 0)
    with pool_of(2) as pool, pool.round() as good:
        do(pool, Calls(["add", 0]))
        do(pool, Calls(["die", 0]))
        good.submit([task := Calls(["add", 0])])
        good.wait()
        assert task.values and not task.failure


def test_processes_that_do_not_start_fail_every_round():
    with WorkerPool("trainer.nothing:Handler", [], 1, role="test", name="test", limit=("test", 1.0)) as pool:
        meet = threading.Barrier(2)

        def fail(_: int) -> str:
            with pool.round() as tasks:
                meet.wait()
                with pytest.raises(WorkerError) as error:
                    tasks.submit([Calls(["add", 0])])
                    tasks.wait()
            return str(error.value)

        with ThreadPoolExecutor(2) as threads:
            assert all("the processes of test die as they start" in text for text in threads.map(fail, range(2)))


def test_many_threads_get_their_own_results(pool):
    """Calls that end their processes, and sessions, in rounds that begin and end at any moment."""

    def work(number: int) -> list[Any]:
        found = []
        for i in range(5):
            tasks = [Finished(["add", 0], ["add", 0], session=i % 2 == 0) for _ in range(3)]
            tasks += [Calls(["die", 0])] if (number, i) in ((0, 1), (2, 3)) else []
            do(pool, *tasks)
            found += [(len(task.values), bool(task.failure)) for task in tasks if task.calls[0][0] == "add"]
        return found

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(work, range(4)))
    assert results == [[(2, False)] * 15] * 4
    assert pool._rounds == []
