"""The pool of processes for user code: who makes which call, and who is to blame."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.jobs import wait_until
from trainer.process.tracing import TRACER
from trainer.sandbox.limits import MAX_ATTEMPTS, SENT_AHEAD, SMALL_MESSAGE
from trainer.sandbox.pool import WorkerPool
from trainer.sandbox.process import SandboxedProcess
from trainer.sandbox.tasks import Task
from trainer.sandbox.worker import Handler

LIMIT_S = 2.0


class Doing(Handler):
    """Does what a call says: `[what, argument]`."""

    def __init__(self, is_concurrent: bool):
        self.is_concurrent = is_concurrent
        self.total = self.under_way = 0

    def is_async(self, call: list[Any]) -> bool:
        return self.is_concurrent or call[0].startswith("async")

    def limit_s(self, call: list[Any]) -> float:
        return LIMIT_S

    def compute(self, call: list[Any]) -> Any:
        return self.later(*call) if self.is_async(call) else self.now(*call)

    async def later(self, what: str, argument: Any) -> Any:
        self.under_way += 1
        while what == "meet" and self.under_way < argument:
            await asyncio.sleep(0.01)
        return self.now(what.removeprefix("async "), argument)

    def now(self, what: str, argument: Any) -> Any:
        match what:
            case "add" | "meet":
                self.total += argument
                return [os.getpid(), self.total]
            case "echo":
                return argument
            case "die once" if Path(argument).exists():
                return [os.getpid(), 0]
            case "die once":
                Path(argument).touch()
                os._exit(3)
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(1000)
            case "slow":
                time.sleep(argument)
                return "done"
        raise KeyError(what)


class Calls(Task):
    """Calls that follow each other; of a session, or a single one."""

    def __init__(self, *calls: list[Any], session: bool = False):
        super().__init__()
        self.calls = calls
        self.is_session = session
        self.is_async = calls[0][0].startswith("async")
        self.values: list[Any] = []
        self.failure = ""

    def next_call(self) -> list[Any] | None:
        return None if self.failure or len(self.values) == len(self.calls) else self.calls[len(self.values)]

    def take(self, value: Any) -> bool:
        self.values.append(value)
        return False

    def fail(self, status: str, reason: str) -> None:
        self.failure = f"{status}: {reason}"

    def restart(self) -> None:
        self.values = []


def pool_of(num_processes: int = 1, is_concurrent: bool = False) -> WorkerPool:
    handler = f"{__name__}:Doing"
    limit = ("test.timeout_s", LIMIT_S)
    return WorkerPool(
        handler, [is_concurrent], num_processes, role="test", name="test.name=Doing", limit=limit, concurrency=8
    )


def do(pool: WorkerPool, *tasks: Calls) -> None:
    with pool.round() as round_:
        round_.submit(tasks)
        round_.wait()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pool_of(2) as pool:
        yield pool


def test_a_session_stays_in_its_process_and_begins_again_when_that_dies(pool, tmp_path):
    sessions = [
        Calls(["add", 1], ["add", 2], ["die once", f"{tmp_path}/{i}"], ["add", 4], session=True) for i in range(2)
    ]
    do(pool, *sessions)
    for session in sessions:
        assert len({process for process, _ in session.values}) == 1
        assert [total for _, total in session.values][:2] == [session.values[0][1], session.values[0][1] + 2]
        assert session.failures == 1 and not session.failure


def test_the_timeline_has_the_calls_of_each_process(monkeypatch):
    monkeypatch.setattr(TRACER, "is_on", True)
    with pool_of(2) as pool:
        do(pool, *(Calls(["add", 1], ["add", 2]) for _ in range(8)))
    spans = [span for span in TRACER.take() if span.process.startswith("test ")]
    assert {span.process for span in spans} <= {"test 0", "test 1"} and all(span.end > span.start for span in spans)
    assert sum(span.details["calls"] for span in spans) == 16


def test_a_process_gets_small_messages_ahead_and_large_ones_alone(monkeypatch):
    """A pipe that is full in both directions would stop both ends."""
    waiting: list[tuple[int, int]] = []
    send = SandboxedProcess.send

    def noted(process: Any, message: bytes) -> None:
        waiting.append((len(process.waiting()), len(message)))
        send(process, message)

    monkeypatch.setattr(SandboxedProcess, "send", noted)
    large = "x" * 100_000
    sessions = [
        Calls(*[["async echo", large if i % 3 == 0 and j % 2 else "small"] for j in range(5)], session=True)
        for i in range(60)
    ]
    with pool_of(1, is_concurrent=True) as pool:
        do(pool, *sessions)
    assert all(session.values == [argument for _, argument in session.calls] for session in sessions)
    assert max(count for count, _ in waiting) in range(2, SENT_AHEAD + 1)
    assert {count for count, size in waiting if size > SMALL_MESSAGE} == {1}, "but itself"


def test_the_call_that_ends_its_process_is_to_blame_and_no_other(pool):
    good, bad, late = Calls(["add", 0]), Calls(["die", 0]), Calls(["hang", 0])
    others = [Calls(["add", 0]) for _ in range(100)]
    do(pool, good, bad, late, *others)
    assert bad.failures == MAX_ATTEMPTS and bad.failure == "died: ended its process (exit status 3)"
    assert late.failures == 1 and late.failure == "timeout: took longer than test.timeout_s=2", "it is not tried again"
    assert not any(task.failure or task.failures for task in (good, *others))


def test_of_async_calls_in_one_message_each_is_repeated_alone(pool):
    tasks = [Calls(["async die" if i == 3 else "async add", 0]) for i in range(6)]
    do(pool, *tasks)
    assert [bool(task.failure) for task in tasks] == [i == 3 for i in range(6)]
    assert tasks[3].run_isolated and sum(task.failures for task in tasks) == MAX_ATTEMPTS


def test_a_call_that_raises_fails_at_once(pool):
    task = Calls(["nonsense", 0])
    do(pool, task)
    assert task.failure == "raised: raised KeyError: 'nonsense'" and task.failures == 1


def test_async_sessions_of_one_process_run_at_the_same_time():
    with pool_of(is_concurrent=True) as pool:
        sessions = [Calls(["meet", 8], session=True) for _ in range(8)]
        do(pool, *sessions)
        assert [session.failures for session in sessions] == [0] * 8, "a call waits forever"


class Urgent(Calls):
    """Goes to the process of another task."""

    is_urgent = True

    def __init__(self, other: Task, *calls: list[Any]):
        super().__init__(*calls, session=True)
        self.worker = other.worker


def test_an_urgent_call_reaches_a_process_that_takes_no_other():
    alone = Calls(["meet", 2], session=True)
    alone.run_isolated = True
    with pool_of(is_concurrent=True) as pool, pool.round() as round_:
        round_.submit([alone])
        wait_until(lambda: alone.worker is not None and bool(alone.worker.batches))
        urgent = Urgent(alone, ["meet", 2])
        round_.submit([urgent])
        round_.wait()
    assert alone.values and urgent.values and not alone.failure


def test_a_round_that_is_left_ends_its_calls_and_the_next_one_works(pool):
    hanging, after = Calls(["hang", 0]), Calls(["add", 0])
    with pytest.raises(KeyboardInterrupt), pool.round() as round_:
        round_.submit([hanging])
        wait_until(lambda: any(worker.batches for worker in pool._workers))
        raise KeyboardInterrupt
    assert hanging.failure == "timeout: was not tried"
    do(pool, after)
    assert after.values and not after.failure


def test_no_process_is_left_when_the_pool_is_closed():
    with pool_of(2) as pool:
        do(pool, Calls(["add", 0]))
        processes = [psutil.Process(worker.process.pid) for worker in pool._workers]
        processes += [child for process in processes for child in process.children()]
    assert len(processes) == 4 and not any(process.is_running() for process in processes)


@pytest.mark.parametrize("session", [True, False])
def test_when_failed_calls_have_taken_too_much_time_only_calls_of_sessions_may_end(session, monkeypatch):
    monkeypatch.setattr("trainer.sandbox.limits.FAILED_TIME_LIMITS", 0)
    with pool_of(2) as pool:
        do(pool, Calls(["add", 0]))
        slow = Calls(["slow", 1.0], session=session)
        bad, untried = Calls(["die", 0]), [Calls(["add", 0]) for _ in range(3)]
        with pool.round() as round_:
            round_.submit([slow])
            wait_until(lambda: any(worker.batches for worker in pool._workers))
            round_.submit([bad, *untried])
            round_.wait()
        assert bool(slow.failure) == (not session) and bool(slow.values) == session
        assert all("was not tried: failed calls had already taken 0 times" in task.failure for task in untried)
