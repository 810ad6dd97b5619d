"""The reward functions. Each takes a completion's text and the reference answer."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable
from decimal import Decimal

from trainer.plugins import import_function

Reward = Callable[[str, str], float]

# A sign counts when it touches the number and nothing stands before it: in `10-3` and `- 3` it is none.
# What follows a caret is an exponent: the answer in `72 m^2` is 72.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?(?:[$€£¥]\s?(?P<inner>[-−])?)?"
    r"(?<![\^0-9])(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def gsm8k(completion: str, answer: str) -> float:
    """1 when the final answer is the reference's as a number: the first one after the last `####`, else the last
    of a text without `####`. Commas, currency signs, units and trailing words do not matter; 72.0 is 72."""
    ours, theirs = _final_number(completion), _final_number(answer)
    return float(ours is not None and ours == theirs)


def _final_number(text: str) -> Decimal | None:
    _, marker, tail = text.rpartition("####")
    # After the marker the answer comes first and words may follow; without it the last number counts.
    matches = list(_NUMBER.finditer(tail))
    if not matches:
        return None
    match = matches[0 if marker else -1]
    number = Decimal(match["digits"].replace(",", ""))
    return -number if match["sign"] or match["inner"] else number


def math(completion: str, answer: str) -> float:
    """1 when math-verify finds the completion's answer (boxed, or the last expression) equal to the reference.

    Where it does not come to an end within 5 s, in reading or comparing, the answer counts as wrong.
    """
    if completion.strip() == answer.strip() != "":  # a bare `x^2+1` would not be found in the text
        return 1.0
    from math_verify import parse, verify

    # math-verify's time limit is a signal, which only a main thread takes; elsewhere the caller's has to do.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    has_delimiters = re.search(r"(?<!\\)\$|\\boxed", answer)
    gold = parse(answer if has_delimiters else f"${answer}$", parsing_timeout=limit)
    return float(verify(gold, parse(completion, parsing_timeout=limit), timeout_seconds=limit))


def arithmetic(completion: str, answer: str) -> float:
    """1 when the completion is the number and nothing else."""
    return float(completion.strip() == answer.strip())


def reverse_text(completion: str, answer: str) -> float:
    """Similarity of completion and answer: twice the matching letters over all letters (1 = equal)."""
    return difflib.SequenceMatcher(None, completion.strip(), answer, autojunk=False).ratio()


REWARDS: dict[str, Reward] = {"gsm8k": gsm8k, "math": math, "arithmetic": arithmetic, "reverse_text": reverse_text}


def resolve(name: str) -> Reward:
    """The reward called `name`: a registered one, `package.module:function` or `package.module.function`.

    Raises:
        UserError: there is none.
    """
    if name in REWARDS:
        return REWARDS[name]
    return import_function(name, "reward.name", known=REWARDS)
