"""The reward functions. Each takes a completion's text and the reference answer."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from trainer.errors import UserError

Reward = Callable[[str, str], float]

_NUMBER = re.compile(r"[-+−]?\s?(?:[$€£]\s?)?[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def gsm8k(completion: str, answer: str) -> float:
    """1 when the final answer is the reference's as a number: what follows the last `####`, else the last
    number of the text. Commas, currency signs, units and trailing words do not matter; 72.0 is 72."""
    ours, theirs = _final_number(completion), _final_number(answer)
    return 1.0 if ours is not None and ours == theirs else 0.0


def _final_number(text: str) -> Decimal | None:
    head, marker, tail = text.rpartition("####")
    # After the marker the answer comes first and words may follow; without it the last number counts.
    matches = _NUMBER.findall(tail if marker else text)
    if not matches:
        return None
    digits = re.sub(r"[^\d.\-]", "", (matches[0] if marker else matches[-1]).replace("−", "-"))
    try:
        return Decimal(digits)
    except InvalidOperation:
        return None


def math(completion: str, answer: str) -> float:
    """1 when math-verify finds the completion's answer (boxed, or the last expression) equal to the reference."""
    from math_verify import parse, verify

    # Time limits are the pool's: math-verify's own use signals, which only a main thread may.
    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    return float(bool(gold) and verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def arithmetic(completion: str, answer: str) -> float:
    """1 when the completion is the number and nothing else."""
    return float(completion.strip() == answer.strip())


def reverse_text(completion: str, answer: str) -> float:
    """Similarity of completion and answer: twice the matching letters over all letters (1 = equal)."""
    return difflib.SequenceMatcher(None, completion.strip(), answer, autojunk=False).ratio()


REWARDS: dict[str, Reward] = {"gsm8k": gsm8k, "math": math, "arithmetic": arithmetic, "reverse_text": reverse_text}


def resolve(name: str) -> Reward:
    """The reward called `name`: a registered one, or `package.module:function`.

    Raises:
        UserError: there is none.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, separator, function_name = name.partition(":")
    if not separator:
        raise UserError(f"reward.name={name}: choose one of {', '.join(REWARDS)}, or an import path package.module:function")
    if os.getcwd() not in sys.path:  # a file beside where the command was given
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise UserError(f"reward.name={name}: cannot be imported ({error})") from error
    except AttributeError as error:
        raise UserError(f"reward.name={name}: {module_name} has no {function_name}") from error
    if not callable(function):
        raise UserError(f"reward.name={name}: {function_name} is not a function")
    return function
