"""The reward functions. Each takes a completion's text and the reference answer."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from trainer.import_utils import import_function

Reward = Callable[..., float]

# A minus belongs to the number if it touches the number and nothing stands before it: not in `10-3` and `- 3`.
# A number after a caret is an exponent: the answer in `72 m^2` is 72.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?(?:[$€£¥]\s?(?P<inner>[-−])?)?"
    r"(?<![\^0-9])(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def gsm8k(completion: str, answer: str) -> float:
    """1 if the completion and the reference have the same final number, else 0.

    The final number is the first one after the last `####`; in a text without `####` it is the last one. Commas,
    currency signs, units and words after it do not matter. 72.0 equals 72.
    """
    number = _final_number(completion)
    return float(number is not None and number == _final_number(answer))


def _final_number(text: str) -> Decimal | None:
    _, marker, tail = text.rpartition("####")
    # After the marker, the number comes first and words may follow.
    matches = list(_NUMBER.finditer(tail))
    if not matches:
        return None
    match = matches[0 if marker else -1]
    number = Decimal(match["digits"].replace(",", ""))
    return -number if match["sign"] or match["inner"] else number


def math(completion: str, answer: str) -> float:
    """1 if math-verify finds the completion's answer (boxed, or the last expression) equal to the reference, else 0.

    If math-verify does not read or compare it within 5 s, the answer counts as wrong.
    """
    if completion.strip() == answer.strip() != "":  # math-verify does not find `x^2+1` without delimiters
        return 1.0
    from math_verify import parse, verify

    # math-verify's time limit is a signal, which only a main thread can receive; elsewhere the caller's limit counts.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    has_delimiters = re.search(r"(?<!\\)\$|\\boxed", answer)
    gold = parse(answer if has_delimiters else f"${answer}$", parsing_timeout=limit)
    return float(verify(gold, parse(completion, parsing_timeout=limit), timeout_seconds=limit))


def arithmetic(completion: str, answer: str) -> float:
    """1 if the completion is the number and nothing else, else 0."""
    return float(completion.strip() == answer.strip())


def reverse_text(completion: str, answer: str) -> float:
    """Similarity of completion and answer: 2 * matching letters / all letters (1 = equal)."""
    return difflib.SequenceMatcher(None, completion.strip(), answer, autojunk=False).ratio()


def reasoning_gym(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """The score that the task of the package reasoning-gym, which has made the row, gives for the completion."""
    from trainer.data import reasoning_tasks

    return reasoning_tasks.score(completion, row)


REWARDS: dict[str, Reward] = {
    "gsm8k": gsm8k,
    "math": math,
    "arithmetic": arithmetic,
    "reverse_text": reverse_text,
    "reasoning_gym": reasoning_gym,
}


REMOTE = "remote"
"""The name of the reward that the server at `reward.url` computes."""


def resolve(name: str) -> Callable[..., Any]:
    """Return the reward function `name`: one of `REWARDS`, or an import path `package.module:function`.

    Raises:
        UserError: there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    return import_function(name, "reward.name", known=[*REWARDS, REMOTE])
