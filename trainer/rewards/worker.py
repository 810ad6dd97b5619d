"""What a reward process does: it calls the reward function for one completion after another."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.errors import describe_error, one_line
from trainer.isolation.guard import ProcessState, send
from trainer.rewards.functions import REWARDS, resolve

_LARGEST = 1e12
"""Largest absolute reward. The sum of 10^9 squares of it is finite in float32."""


def serve(pipe: Connection, name: str) -> NoReturn:
    """Answer each (completion, answer[, row]) with `[reward or reason, is this worker's last]`."""
    try:
        function = resolve(name)
        if name in REWARDS:  # `math` imports more at its first call
            function("0", "1")
    except BaseException as error:
        send(pipe, {"cannot_start": describe_error(error)})
        os._exit(1)
    before, worker = ProcessState(pipe), os.getpid()
    send(pipe, {"ready": True})
    while True:
        try:
            chunk = json.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        for completion, answer, *row in chunk:
            result = _reward(function, completion, answer, *row)
            if os.getpid() != worker:  # the function has forked, and this is its child
                os._exit(0)
            restored = before.restore()
            left = before.processes_left()
            if left:
                reason = "left a process running: {}; start what must stay when the module is imported"
                result = reason.format(left) if isinstance(result, float) else result
            last = bool(left) or not restored
            send(pipe, [result, last])
            if last:
                os._exit(0)


def _reward(
    function: Callable[..., Any], completion: str, answer: str, row: dict[str, Any] | None = None
) -> float | str:
    """Return the reward, or the reason why there is none.

    Args:
        row: the whole row of the data, for a function that takes it.
    """
    try:
        value = function(completion, answer) if row is None else function(completion, answer, row=row)
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            return one_line(f"returned {type(value).__name__}, which is not a number")
        value = float(value)
    except BaseException as error:  # also KeyboardInterrupt, SystemExit: whatever user code raises
        return f"raised {describe_error(error)}"
    if not math.isfinite(value):
        return f"is {value}"
    return value if abs(value) <= _LARGEST else f"is {value:g}, beyond {_LARGEST:g}"
