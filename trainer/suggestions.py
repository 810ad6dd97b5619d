"""Names that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

MOST = 3
_ALIKE = 0.75
"""Least likeness of a suggestion, where 1 is equality. Names below it have little to do with the wrong one."""

_HAS_ITS_WORDS = 0.9
"""Likeness of a name that has all words of the wrong one: `train_batch_size` for `batch_size`."""

_MARGIN = 0.1
"""Names that are less like the wrong one than the best by more than this are not suggested."""


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME, or NAME?` with the names most like `wrong`; empty if none is like it.

    Args:
        names: plain names, or keys with their sections. A key is found without its section, and in a wrong one.
    """
    scores = {name: _likeness(wrong, name) for name in names}
    least = max([_ALIKE, *(score - _MARGIN for score in scores.values())])
    found = sorted((name for name in scores if scores[name] >= least), key=lambda name: scores[name], reverse=True)
    found.sort(key=lambda name: _same_section(wrong, name), reverse=True)
    return f"did you mean {', or '.join(found[:MOST])}?" if found else ""


def _likeness(wrong: str, name: str) -> float:
    """Return the likeness of the last parts of two dotted names."""
    *section, last = wrong.split(".")
    parts = name.split(".")
    endings = ["_".join(parts[i:]) for i in range(len(parts))]  # model_path: model.path
    if set(last.split("_")) < set(parts[-1].split("_")):
        return _HAS_ITS_WORDS
    return max(_ratio(last, ending) for ending in (endings[-1:] if section else endings))


def _same_section(wrong: str, name: str) -> float:
    section = wrong.rpartition(".")[0]
    return _ratio(section, name.rpartition(".")[0]) if section else 0.0


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()
