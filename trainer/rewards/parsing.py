"""What reward functions return, as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.errors import describe_error, one_line
from trainer.sandbox.limits import LARGEST_REWARD, MAX_TERMS

Terms = dict[str, float]  # what a reward consists of, by name. A plain number has the name "".
Result = list[Terms | str]
"""For each completion of a call: the terms of its reward, or the reason why it has none."""
_PART = re.compile(r"[\w.-]{1,64}")
_PATH = re.compile(r"(?=.{1,64}$)[\w.-]++(/[\w.-]++)*+")


def read_value(value: Any) -> Terms | str:
    if isinstance(value, str) or not isinstance(value, Mapping):
        number = read_number(value)
        return number if isinstance(number, str) else {"": number}
    try:
        if not 0 < len(value) <= MAX_TERMS:
            return f"returned {len(value)} terms; a reward has 1 to {MAX_TERMS}"
        return _read_terms(value, _PART, "")
    except BaseException as error:  # whatever a mapping of user code raises
        return f"raised {describe_error(error)}"


def read_terms(value: Any, paths: bool = False) -> Terms | str:
    """Return named numbers, or the reason why they are none. `paths`: a name may have a slash between letters, and
    there may be more of them."""
    if not isinstance(value, Mapping):
        return one_line(f"are a {type(value).__name__}, not a dict")
    try:
        most = 4 * MAX_TERMS if paths else MAX_TERMS
        if len(value) > most:
            return f"are {len(value)}; a step has at most {most}"
        return _read_terms(value, _PATH, ", and a / between them") if paths else _read_terms(value, _PART, "")
    except BaseException as error:
        return f"raised {describe_error(error)}"


def _read_terms(value: Mapping[Any, Any], names: re.Pattern[str], more: str) -> Terms | str:
    terms = {}
    for name, item in value.items():
        if type(name) is not str or not names.fullmatch(name):
            return one_line(f"returned a term called {name!r}; names are letters, digits, _, . and -{more}")
        number = read_number(item, "is a")
        if isinstance(number, str):
            return f"term {name} {number}"
        terms[name] = number
    return terms


def read_values(values: Any, count: int) -> list[Terms | str]:
    try:
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            return [one_line(f"returned {type(values).__name__}, which is not a list of rewards")] * count
        if len(values) != count:
            return [f"returned {len(values)} rewards for {count} completions"] * count
        return [read_value(values[i]) for i in range(count)]
    except BaseException as error:
        return [f"raised {describe_error(error)}"] * count


def read_number(value: Any, verb: str = "returned") -> float | str:
    """Return the number, or the reason, `verb` and its type, why it cannot be a reward."""
    try:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            return one_line(f"{verb} {type(value).__name__}, which is not a number")
        number = float(value)
    except BaseException as error:  # also KeyboardInterrupt, SystemExit: whatever user code raises
        return f"raised {describe_error(error)}"
    if not math.isfinite(number):
        return f"is {number}"
    return number if abs(number) <= LARGEST_REWARD else f"is {number:g}, beyond {LARGEST_REWARD:g}"
