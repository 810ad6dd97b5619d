"""Reward functions in their process: they are called, and what they return is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainer.rewards.functions import REMOTE, REWARDS, resolve
from trainer.rewards.parsing import Terms, read_value, read_values
from trainer.rewards.signature import signature_of
from trainer.sandbox.worker import Handler, line_of

Results = list[list[Terms | str]]
"""For each call, and each completion of the call: the terms of its reward, or the reason why it has none."""


class _Reward:
    def __init__(self, name: str, function: Callable[..., Any], timeout_s: float):
        self.signature = signature_of(function, f"reward.name={name}")
        self.limit_s = timeout_s
        self._function = function

    def compute(self, calls: list[dict[str, Any]]) -> Any:
        (given,) = calls
        value = self.signature.call(self._function, given)

        async def wait() -> Results:
            return [self._read(await value, given)]

        return wait() if self.signature.is_async else [self._read(value, given)]

    def _read(self, value: Any, given: dict[str, Any]) -> list[Terms | str]:
        if self.signature.grouped:
            return read_values(value, len(given["completions"]))
        if inspect.iscoroutine(value):
            value.close()  # or Python warns that it was never awaited
        return [read_value(value)]

    def line_of(self, error: BaseException) -> str:
        file = getattr(getattr(inspect.unwrap(self._function), "__code__", None), "co_filename", None)
        return line_of(error, {file})


class RewardHandler(Handler):
    """Makes the calls `[reward, [arguments of a call, …]]`; a reward is its index in `names`."""

    def __init__(self, names: list[str], timeout_s: float, remote: dict[str, Any]):
        self._rewards = [_load(name, timeout_s, remote) for name in names]

    def is_async(self, call: list[Any]) -> bool:
        return self._rewards[call[0]].signature.is_async

    def limit_s(self, call: list[Any]) -> float | None:
        return self._rewards[call[0]].limit_s

    def compute(self, call: list[Any]) -> Any:
        return self._rewards[call[0]].compute(call[1])

    def describe(self, error: BaseException, call: list[Any]) -> str:
        return super().describe(error, call) + self._rewards[call[0]].line_of(error)


def _load(name: str, timeout_s: float, remote: dict[str, Any]) -> Any:
    if name == REMOTE:
        from trainer.rewards.remote import RemoteReward  # imports httpx, which others do not need

        return RemoteReward(**remote)
    function = resolve(name)
    if name == "reasoning_gym":
        from trainer.data.reasoning_tasks import known_tasks

        known_tasks()
    elif name in REWARDS:  # `math` imports more at its first call
        function("0", "1")
    return _Reward(name, function, timeout_s)
