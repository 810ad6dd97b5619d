"""What a reward process does: it calls the reward functions for one task after another."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.errors import describe_error, one_line
from trainer.rewards.functions import REMOTE, REWARDS, resolve
from trainer.rewards.parsing import Parts, read_value, read_values
from trainer.rewards.signature import RewardSignature, calling_of
from trainer.sandbox.reaper import ProcessState, send

Results = list[list[Parts | str]]
"""For each call of a task, and each completion of the call: the parts of its reward, or the reason why it has none."""


class _Reward:
    """A reward function in this process."""

    def __init__(self, name: str, function: Callable[..., Any], timeout_s: float):
        self.calling = calling_of(function, f"reward.name={name}")
        self._function = function
        self._timeout_s = timeout_s

    def compute(self, calls: list[dict[str, Any]]) -> Results:
        (given,) = calls
        try:
            value = self.calling.call(self._function, given)
        except BaseException as error:  # also KeyboardInterrupt, SystemExit: whatever user code raises
            return _all_failed(calls, f"raised {describe_error(error)}{self._place(error)}")
        return [_read(value, self.calling, given)]

    async def compute_async(self, calls: list[dict[str, Any]]) -> Results:
        (given,) = calls
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                value = await self.calling.call(self._function, given)
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return _all_failed(calls, f"took longer than reward.timeout_s={self._timeout_s:g}")
            return _all_failed(calls, f"raised {describe_error(error)}{self._place(error)}")
        return [_read(value, self.calling, given)]

    def _place(self, error: BaseException) -> str:
        """Return ` in FILE:LINE`, the last line of the function's own file that `error` has passed; "" if unknown."""
        file = getattr(getattr(inspect.unwrap(self._function), "__code__", None), "co_filename", None)
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        return f" in {one_line(os.path.basename(str(file)))}:{lines[-1]}" if lines else ""


def serve(pipe: Connection, names: list[str], timeout_s: float, concurrency: int, remote: dict[str, Any]) -> NoReturn:
    """Answer each list of tasks [reward, [arguments of a call, …]].

    An answer is `{"results": of the next tasks, "last": whether this process answers no more}`. Tasks of plain
    functions are answered one by one. Those of `async` functions run at the same time, and are answered together;
    `{"left": the name of a process}` says that one of them has left a process running.
    """
    try:
        loop = asyncio.new_event_loop()
        rewards = [_load(name, timeout_s, remote) for name in names]
    except BaseException as error:
        send(pipe, {"cannot_start": describe_error(error)})
        os._exit(1)
    before, worker = ProcessState(pipe), os.getpid()
    send(pipe, {"ready": True})
    while True:
        try:
            tasks = json.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        together = rewards[tasks[0][0]].calling.is_async
        for chunk in [tasks] if together else [[task] for task in tasks]:
            if together:
                results = loop.run_until_complete(_at_the_same_time(rewards, chunk, concurrency))
            else:
                results = [rewards[reward].compute(calls) for reward, calls in chunk]
            if os.getpid() != worker:  # the function has forked, and this is its child
                os._exit(0)
            restored = before.restore()
            left = before.processes_left()
            if left and len(chunk) > 1:
                send(pipe, {"left": left})
                os._exit(0)
            if left:
                reason = f"left a process running: {left}; start what must stay when the module is imported"
                results = [[[r if isinstance(r, str) else reason for r in call] for call in results[0]]]
            last = bool(left) or not restored
            send(pipe, {"results": results, "last": last})
            if last:
                os._exit(0)


async def _at_the_same_time(rewards: list[Any], tasks: list[Any], concurrency: int) -> list[Results]:
    """Return the results of the tasks; at most `concurrency` of them run at any time."""
    places = asyncio.Semaphore(concurrency)

    async def compute(reward: int, calls: list[dict[str, Any]]) -> Results:
        async with places:
            return await rewards[reward].compute_async(calls)

    return await asyncio.gather(*(compute(*task) for task in tasks))


def _load(name: str, timeout_s: float, remote: dict[str, Any]) -> Any:
    if name == REMOTE:
        from trainer.rewards.remote import RemoteReward  # imports httpx, which others do not need

        return RemoteReward(**remote)
    function = resolve(name)
    if name in REWARDS:  # `math` imports more at its first call
        function("0", "1")
    return _Reward(name, function, timeout_s)


def _read(value: Any, calling: RewardSignature, given: dict[str, Any]) -> list[Parts | str]:
    if calling.grouped:
        return read_values(value, len(given["completions"]))
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
    return [read_value(value)]


def _all_failed(calls: list[dict[str, Any]], reason: str) -> Results:
    return [[reason] * len(given.get("completions", [0])) for given in calls]
