"""The reward functions. Each takes a completion's text and the reference answer."""

from __future__ import annotations

import difflib
import importlib
import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from trainer.import_utils import import_function

Reward = Callable[..., float]

_SEPARATOR = r"(?:\{,\}|,?\\[,!;: ]|[, ~\u00a0\u2009\u202f])"
"""Between groups of three digits: as in 1,000 and 1 000, and as LaTeX writes these."""
# A minus belongs to the number if it touches the number and nothing stands before it: not in `10-3` and `- 3`.
# A number after a caret is an exponent, one after a low line an index: the answer in `72 m^2` is 72.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?(?:\\?[$€£¥]\s?(?P<inner>[-−])?)?"
    r"(?<![\^_0-9])(?<![\^_]\{)(?<![0-9][eE])(?<![0-9][eE][-+])"
    rf"(?P<digits>[0-9]++(?:(?:{_SEPARATOR}|[._])[0-9]++)*+|\.[0-9]++)"
)
_PLAIN = re.compile(rf"(?:[1-9][0-9]{{0,2}}(?P<by>{_SEPARATOR})[0-9]{{3}}(?:(?P=by)[0-9]{{3}})*|[0-9]*)(?:\.[0-9]+)?")
_BEFORE, _AFTER = re.compile(r"[0-9]\s?/\s?$|[0-9]:$|\}\{$"), re.compile(r"\s?/\s?[0-9]|:[0-9]|\}\{|\^|[eE][-+]?[0-9]")
"""What stands around a number that is a part of a fraction, a ratio or a power."""


def gsm8k(completion: str, answer: str) -> float:
    r"""1 if the completion and the reference have the same final number, else 0.

    The final number is the first one after the last `####`; in a text without `####` the last one in the last `\boxed`,
    or of the text. Separators of thousands, currency signs, units and words after it do not matter. 72.0 equals 72. A
    number that could mean several things (`1,00`, `1 2`, `1/2`) equals none.
    """
    number = _final_number(completion)
    return float(number is not None and number == _final_number(answer))


def _final_number(text: str) -> Decimal | None:
    before, marker, tail = text.rpartition("####")
    while "####" in before and not tail.strip("# \n\t"):  # a marker may also close the number
        before, _, tail = before.rpartition("####")
    if not marker and "\\boxed" in tail:
        tail = _last_boxed(tail)
    # After the marker, the number comes first and words may follow.
    matches = list(_NUMBER.finditer(tail))
    if not matches:
        return None
    match = matches[0 if marker else -1]
    before, after = tail[: match.start()], tail[match.end() :]
    if not _PLAIN.fullmatch(match["digits"]) or _BEFORE.search(before) or _AFTER.match(after):
        return None
    number = Decimal(re.sub(r"[^0-9.]", "", match["digits"]))
    return -number if match["sign"] or match["inner"] else number


def _last_boxed(text: str) -> str:
    r"""Return what stands between the brackets of the last `\boxed`; all that follows it if it is not closed."""
    _, _, rest = text.rpartition("\\boxed")
    depth = 0
    for place, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "}" and depth <= 0:
            return rest[:place]
    return rest


_TAG = re.compile(r"<\|[^<>|]*\|>|</?[a-z_]{3,}>|\[/?[A-Z_]{4,}\]")
"""Marks of a reply, which may be special tokens: `<answer>`, `</think>`, `<|message|>`, `[/THINK]`."""
_GROUPS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?P<by>\{,\}|,?\\[,!;: ]|[~\u00a0\u2009\u202f])[0-9]{3}((?P=by)[0-9]{3})*(?![0-9])"
    r"|(?<=\\boxed\{)[1-9][0-9]{0,2}( [0-9]{3})+(?=\})|^[1-9][0-9]{0,2}( [0-9]{3})+$"
)
_REPEATING = re.compile(
    r"(?<![0-9])(?P<whole>[0-9]{0,99}+)\.(?P<once>[0-9]{0,99}+)\\(?:overline|bar|dot)"
    r"(?P<open>\{)?(?P<again>[0-9]{1,99}+)(?![0-9])(?(open)\})"
)


def math(completion: str, answer: str) -> float:
    """1 if math-verify finds the completion's answer (boxed, or the last expression) equal to the reference, else 0. If
    math-verify does not read or compare it within 5 s, the answer counts as wrong."""
    if completion.strip() == answer.strip() != "":  # math-verify does not find `x^2+1` without delimiters
        return 1.0
    from math_verify import parse, verify

    use_newest_grammar()
    # math-verify's time limit is a signal, which only a main thread can receive; elsewhere the caller's limit counts.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    _, tag, tagged = completion.rpartition("<answer>")
    said = _delimited(_readable(tagged.partition("</answer>")[0])) if tag else _readable(completion)
    gold = parse(_delimited(_readable(answer)), parsing_timeout=limit)
    return float(verify(gold, parse(said, parsing_timeout=limit), timeout_seconds=limit))


def _readable(text: str) -> str:
    """Return a text without what math-verify does not read, or takes for something else."""
    text = re.sub(r"(?<!\\)\\(?=%)|(?<!\\)\\\$", "", _TAG.sub("\n", text).replace("−", "-")).strip()
    text = _GROUPS.sub(lambda found: re.sub(r"[^0-9]", "", found[0]), text)
    return _REPEATING.sub(_as_fraction, text)


def _as_fraction(found: re.Match[str]) -> str:
    r"""Return a repeating decimal as a fraction: `0.1\overline{6}` is 1/6."""
    whole, once, again = found["whole"], found["once"], found["again"]
    numerator = int(whole + once + again) - int(whole + once or "0")
    return f"\\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _delimited(answer: str) -> str:
    return answer if re.search(r"(?<!\\)\$|\\boxed", answer) else f"${answer}$"


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


REWARDS: dict[str, Reward] = {one.__name__: one for one in (gsm8k, math, arithmetic, reverse_text, reasoning_gym)}
REMOTE = "remote"  # the name of the reward that the server at `reward.url` computes


def resolve(name: str) -> Callable[..., Any]:
    """Return the reward function `name`: one of `REWARDS`, or an import path `package.module:function`. Raises
    UserError: there is no such function."""
    if name in REWARDS:
        return REWARDS[name]
    return import_function(name, "reward.name", known=[*REWARDS, REMOTE])


def use_newest_grammar() -> None:
    """Let latex2sympy2-extended, and so math-verify, read LaTeX with its parser for ANTLR 4.13.2 in this process."""
    reader: Any = importlib.import_module("latex2sympy2_extended.latex2sympy2")
    if "antlr4_9_3" not in reader.PSParser.__module__:
        return
    import antlr4
    from antlr4.atn import ATNDeserializer as tables

    class Deserializer(tables.ATNDeserializer):
        """Reads tables of format 4: plain numbers, no UUID, one list of sets. 4.9.3 writes format 3."""

        def reset(self, data: list[int]) -> None:
            self.data, self.pos = data, 0

        def checkVersion(self) -> None:  # noqa: N802 - as ANTLR calls it
            assert self.readInt() == 4, "the tables of the grammar have an unknown format"

        def checkUUID(self) -> None:  # noqa: N802
            self.uuid = tables.BASE_SERIALIZED_UUID

    own, antlr4.ATNDeserializer = antlr4.ATNDeserializer, Deserializer
    try:
        names = ("PSParser", "PSLexer")
        made = [getattr(importlib.import_module(f"latex2sympy2_extended.gen.antlr4_13_2.{one}"), one) for one in names]
    finally:
        antlr4.ATNDeserializer = own
    for one in made:
        one.checkVersion = lambda self, version: None  # it would print that the versions differ
        setattr(reader, one.__name__, one)
