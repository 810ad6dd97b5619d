"""A process of a pool answers its messages: order, async calls, failures, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any

from trainer.sandbox.worker import Handler, serve, uncounted


class Letters(Handler):
    """Plain calls `["text", word]`, and `async` calls `["wait", word]` that all wait for each other."""

    def __init__(self, is_concurrent: bool = False):
        self.is_concurrent = is_concurrent
        self._arrived = 0

    def is_async(self, call: list[Any]) -> bool:
        return call[0] in ("wait", "hang", "queue")

    def limit_s(self, call: list[Any]) -> float | None:
        return {"hang": 0.05, "queue": 0.1}.get(call[0])

    def compute(self, call: list[Any]) -> Any:
        match call:
            case ["raise", _]:
                raise SystemExit("no")
            case ["fork", _]:
                if os.fork() > 0:
                    return "parent"
                return "child"
            case ["text", word]:
                return word.upper()
        return self._wait(*call)

    async def _wait(self, kind: str, word: str) -> str:
        if kind == "queue":
            with uncounted():
                await asyncio.sleep(0.3)
            return word
        self._arrived += 1
        while self._arrived < 2 or kind == "hang":
            await asyncio.sleep(0.001)
        return word


@contextmanager
def served(handler: str, *arguments: Any) -> Iterator[Connection]:
    """The driver's end of a pipe to a fork that serves."""
    ours, theirs = Pipe()
    process = os.fork()
    if process == 0:
        try:
            ours.close()
            signal.alarm(60)
            serve(theirs, f"{__name__}:{handler}", arguments)
        finally:
            os._exit(99)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == (0 if handler == "Letters" else 1)


def ask(pipe: Connection, first: int, *calls: list[str]) -> None:
    for number, call in enumerate(calls, start=first):
        pipe.send_bytes(json.dumps([number, call]).encode())


def answer(pipe: Connection) -> Any:
    assert pipe.poll(60)
    return json.loads(pipe.recv_bytes())


def test_plain_calls_are_answered_one_by_one_and_a_failure_costs_its_call_alone():
    with served("Letters") as pipe:
        assert answer(pipe) == {"ready": False}
        ask(pipe, 7, ["text", "a"], ["raise", ""], ["text", "b"])
        first, second, third = (answer(pipe) for _ in range(3))
    assert first == {"number": 7, "value": "A", "last": False}
    assert second["raised"].startswith("raised SystemExit: no")
    assert third == {"number": 9, "value": "B", "last": False}


def test_async_calls_run_together():
    with served("Letters", True) as pipe:
        assert answer(pipe) == {"ready": True}
        ask(pipe, 1, ["wait", "a"], ["wait", "b"], ["hang", "c"])
        found = {one["number"]: one for one in (answer(pipe) for _ in range(3))}
    assert [found[1]["value"], found[2]["value"], found[3]["timeout"]] == ["a", "b", True]


def test_a_wait_for_ones_turn_does_not_count_and_the_driver_hears_of_it():
    with served("Letters", True) as pipe:
        assert answer(pipe) == {"ready": True}
        ask(pipe, 3, ["queue", "a"])
        begun, ended, last = (answer(pipe) for _ in range(3))
    assert [begun, ended] == [{"number": 3, "waits": waits} for waits in (True, False)]
    assert last == {"number": 3, "value": "a", "last": False}


def test_a_process_that_user_code_has_forked_does_not_answer():
    with served("Letters") as pipe:
        answer(pipe)
        ask(pipe, 1, ["fork", ""], ["text", "b"])
        assert [answer(pipe)["value"] for _ in range(2)] == ["parent", "B"]


def test_a_handler_that_cannot_be_made_is_reported():
    with served("Missing") as pipe:
        assert "Missing" in answer(pipe)["cannot_start"]
