"""The pool of processes for user code: who makes which call, and who is to blame."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.jobs import wait_until
from trainer.errors import WorkerError
from trainer.process.tracing import TRACER
from trainer.sandbox import limits
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls, WorkerPool
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
        while what in ("meet", "stay") and self.under_way < argument:
            with suppress(*[asyncio.CancelledError] * (what == "stay")):
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


class Work:
    """Calls that follow each other; of a session, or a single one."""

    def __init__(self, *calls: list[Any], session: bool = False, is_alone: bool = False):
        self.calls = calls
        self.session = session
        self.is_alone = is_alone
        self.values: list[Any] = []
        self.failures = 0
        self.failure = ""
        self.worker: Any = None

    async def do(self, calls: Calls) -> None:
        if not self.session:
            (message,) = self.calls
            call = Call(message, is_async=message[0].startswith("async"), is_alone=self.is_alone)
            try:
                self.values.append(await calls.do(call))
            except CallFailed as failed:
                self.failure = f"{failed.status}: {failed.reason}"
            return
        while len(self.values) < len(self.calls):
            call = Call(self.calls[len(self.values)], is_session=True, worker=self.worker, is_alone=self.is_alone)
            try:
                self.values.append(await calls.ask(call))
                self.worker = call.worker
            except (CallFailed, CallLost) as error:
                self.failures += isinstance(error, CallFailed)
                self.values, self.worker = [], None


def pool_of(num_processes: int = 1, is_concurrent: bool = False) -> WorkerPool:
    handler = f"{__name__}:Doing"
    limit = ("test.timeout_s", LIMIT_S)
    return WorkerPool(
        handler, [is_concurrent], num_processes, role="test", name="test.name=Doing", limit=limit, concurrency=8
    )


def do(pool: WorkerPool, *work: Work) -> None:
    async def all_of() -> None:
        async with pool.calls() as calls:
            await asyncio.gather(*(one.do(calls) for one in work))

    asyncio.run(all_of())


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pool_of(2) as pool:
        yield pool


def test_a_session_stays_in_its_process_and_begins_again_when_that_dies(pool, tmp_path):
    sessions = [
        Work(["add", 1], ["add", 2], ["die once", f"{tmp_path}/{i}"], ["add", 4], session=True) for i in range(2)
    ]
    do(pool, *sessions)
    for session in sessions:
        assert len({process for process, _ in session.values}) == 1
        assert [total for _, total in session.values][:2] == [session.values[0][1], session.values[0][1] + 2]
        assert session.failures == 1 and not session.failure


def test_the_timeline_has_the_calls_of_each_process(monkeypatch):
    monkeypatch.setattr(TRACER, "is_on", True)
    with pool_of(2) as pool:
        do(pool, *(Work(["add", 1], ["add", 2], session=True) for _ in range(8)))
    spans = [span for span in TRACER.take() if span.process.startswith("test ")]
    assert {span.process for span in spans} <= {"test 0", "test 1"} and all(span.end > span.start for span in spans)
    assert sum(span.details["calls"] for span in spans) == 16


def test_the_call_that_ends_its_process_is_to_blame_and_no_other(pool):
    good, bad, late = Work(["add", 0]), Work(["die", 0]), Work(["hang", 0])
    others = [Work(["add", 0]) for _ in range(100)]
    do(pool, good, bad, late, *others)
    assert bad.failure == "died: ended its process (exit status 3)"
    assert late.failure == "timeout: took longer than test.timeout_s=2"
    assert not any(one.failure for one in (good, *others))


def test_of_async_calls_in_one_message_each_is_repeated_alone(pool):
    tasks = [Work(["async die" if i == 3 else "async add", 0]) for i in range(6)]
    do(pool, *tasks)
    assert [bool(task.failure) for task in tasks] == [i == 3 for i in range(6)]


def test_a_call_that_raises_fails_at_once(pool):
    task = Work(["nonsense", 0])
    do(pool, task)
    assert task.failure == "raised: raised KeyError: 'nonsense'"


def test_async_sessions_of_one_process_run_at_the_same_time():
    with pool_of(is_concurrent=True) as pool:
        sessions = [Work(["meet", 8], session=True) for _ in range(8)]
        do(pool, *sessions)
        assert [session.failures for session in sessions] == [0] * 8, "a call waits forever"


def test_a_call_that_is_cancelled_ends_alone_and_costs_its_process_only_if_it_goes_on(monkeypatch):
    monkeypatch.setattr(limits, "CANCEL_S", 0.1)
    monkeypatch.setattr(limits, "ASYNC_GRACE_S", 0.1)

    async def give_up(what: str, count: int) -> list[Any]:
        async with pool.calls() as calls:
            other = asyncio.ensure_future(calls.ask(Call(["meet", count], is_session=True)))
            late = asyncio.ensure_future(calls.ask(Call([what, 99], is_session=True)))
            while len(pool._workers[0].calls) < 2:
                await asyncio.sleep(0.01)
            late.cancel()
            await asyncio.wait([late])
            if what == "stay":
                return await asyncio.gather(other, return_exceptions=True)
            while len(pool._workers[0].calls) > 1:
                await asyncio.sleep(0.01)
            return [await calls.ask(Call(["meet", count], is_session=True)), await other]

    with pool_of(is_concurrent=True) as pool:
        (one, _), (other, _) = asyncio.run(give_up("meet", 3))
        assert one == other, "the same process makes all calls"
        assert [type(lost) for lost in asyncio.run(give_up("stay", 99))] == [CallLost]


def test_a_block_that_is_left_ends_its_calls_and_the_next_one_works(pool):
    async def leave() -> None:
        async with pool.calls() as calls:
            hanging = asyncio.ensure_future(Work(["hang", 0]).do(calls))
            while not any(worker.calls for worker in pool._workers):
                await asyncio.sleep(0.01)
            hanging.cancel()
            await asyncio.wait([hanging])
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(leave())
    wait_until(lambda: not any(worker.calls for worker in pool._workers))
    do(pool, after := Work(["add", 0]))
    assert after.values and not after.failure


def test_processes_that_do_not_start_fail_every_call():
    with WorkerPool("trainer.nothing:Handler", [], 1, role="test", name="test", limit=("test", 1.0)) as pool:
        for _ in range(2):
            with pytest.raises(WorkerError, match="the processes of test die as they start"):
                do(pool, Work(["add", 0]), Work(["add", 0]))


def test_blocks_of_several_threads_get_their_own_results(pool):
    """Calls that end their processes, and sessions, in blocks that begin and end at any moment."""

    def work(number: int) -> list[Any]:
        found = []
        for i in range(5):
            some = [Work(["add", 0], ["add", 0], session=True) if i % 2 else Work(["add", 0]) for _ in range(3)]
            some += [Work(["die", 0])] if (number, i) in ((0, 1), (2, 3)) else []
            do(pool, *some)
            found += [(len(one.values), bool(one.failure)) for one in some[:3]]
        return found

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(work, range(4)))
    assert results == [[(1 + i % 2, False) for i in range(5) for _ in range(3)]] * 4


def test_no_process_is_left_when_the_pool_is_closed():
    with pool_of(2) as pool:
        do(pool, Work(["add", 0]))
        processes = [psutil.Process(worker.process.pid) for worker in pool._workers]
        processes += [child for process in processes for child in process.children()]
    assert len(processes) == 4 and not any(process.is_running() for process in processes)
