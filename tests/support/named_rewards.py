"""Rewards of every form, for unit/rewards/test_components.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

STARTED: list[str] = []


def length(completion):
    return len(completion)


def length_unless_broken(completion):
    assert not (os.environ.get("BROKEN_LENGTH") and len(completion) == 1), "it is broken"
    return len(completion)


def parts(completion, answer):
    return {"right": completion == answer, "short": len(completion) < 3}


def everything(completion, answer, prompt, messages, row, status):
    assert messages == [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return {"answer": float(answer), "row": row["points"], "status": float(status == "length")}


def rank(completions, status, row):
    """The rank of each completion by its length; the longest has the highest."""
    assert len(status) == len(completions) and isinstance(row, dict)
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [order.index(i) for i in range(len(completions))]


def odd_group(completions):
    match completions[0]:
        case "short list":
            return [1.0]
        case "number":
            return 1.0
        case "one bad":
            return [1.0, None]
    raise KeyError(completions[0])


async def meeting(completion):
    """Returns once all that the answer counts have begun: calls that follow one another would wait for ever."""
    if completion == "block":
        time.sleep(1000)
    if completion == "hang":
        await asyncio.sleep(1000)
    if completion == "raise":
        raise KeyError("late")
    if completion == "die":
        os._exit(3)
    if completion == "child":
        subprocess.Popen(["sleep", "1000"])
    if not completion.startswith("meet"):
        return 1.0
    STARTED.append(completion)
    while len(STARTED) < 8:
        await asyncio.sleep(0.01)
    return 2.0


async def async_group(completions):
    await asyncio.sleep(0)
    return [{"letters": len(completion)} for completion in completions]


def stern(completion, answer):
    return -1.0


def formatted(completions, answer):
    return [float("<answer>" in completion) for completion in completions]


def clashing(completion):
    return {"length": 1.0}


def broken(completion):
    raise RuntimeError("no such model")


def odd_parts(completion):
    return {"empty": {}, "name": {"a b": 1}, "text": {"a": "1"}, "nan": {"a": float("nan")}, "many": dict.fromkeys(
        [f"p{i}" for i in range(100)], 1.0)}[completion]  # fmt: skip


def counted(completion):
    """Counts its calls in a file."""
    with open(os.environ["COUNTED_CALLS"], "a") as file:
        file.write(completion + "\n")
    if completion == "fail":
        raise RuntimeError("down")
    return len(completion)


def is_a(completion):
    return float(completion == "a")


def is_even(completion: str, answer: str) -> float:
    """Half of the groups of two have equal rewards."""
    return float(completion[:1] in set("02468ace"))
