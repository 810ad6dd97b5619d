"""How a reward function is called: by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError

NAMES = ("completion", "completions", "answer", "prompt", "messages", "row", "status")
"""The parameters that a reward function can have (docs/rewards.md says what each holds)."""
_VALID = f"valid are {', '.join(NAMES)}; give others a default"
_OF_ONE = tuple(name for name in NAMES if name != "completions")  # what a function with `**options` gets


@dataclass(frozen=True)
class RewardSignature:
    names: tuple[str, ...]  # parameters that are given by name
    positional: bool = False  # completion and answer come first, whatever they are called
    is_async: bool = False

    @property
    def grouped(self) -> bool:
        """The function is called once for all completions of a prompt."""
        return "completions" in self.names

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("completion", "answer", *self.names) if self.positional else self.names

    def call(self, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        named = {name: given[name] for name in self.names}
        return function(given["completion"], given["answer"], **named) if self.positional else function(**named)


def signature_of(function: Callable[..., Any], key: str) -> RewardSignature:
    """Return how to call `function`, which `key`, the config key with its value, names. One of two parameters that are
    not in `NAMES` is called with completion and answer. Raises UserError: it has a parameter without default that no
    reward gets."""
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some functions in C have no signature
        return RewardSignature((), positional=True, is_async=is_async)
    kinds = {parameter.kind for parameter in parameters}
    slots = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = [p.name for p in parameters if p.name in NAMES and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    if inspect.Parameter.VAR_POSITIONAL in kinds and not slots:  # a wrapper of some function
        return RewardSignature(("row",) if takes_any or "row" in known else (), positional=True, is_async=is_async)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in required if p.name not in known]
    first_two = [p.name for p in slots[:2]]
    # Their names leave open that they are completion and answer.
    are_open = all(name == meant or name not in known for name, meant in zip(first_two, _OF_ONE, strict=False))
    positional = bool(unknown) and len(first_two) == 2 and are_open and set(unknown) <= set(first_two)
    if unknown and not positional:
        raise UserError(
            f"{key}: the function asks for {', '.join(unknown)}, which no reward gets; {_VALID}. A column of the data "
            "is in row; docs/rewards.md has the names of TRL and verl"
        )
    if "completions" in known and (positional or "completion" in known):
        raise UserError(f"{key}: the function asks for completions, the whole group, and for one completion; keep one")
    names = dict.fromkeys(known)
    if takes_any:
        names |= dict.fromkeys(name for name in _OF_ONE if not (name == "completion" and "completions" in known))
    if positional:
        names = {name: None for name in names if name not in ("completion", "answer")}
    return RewardSignature(tuple(names), positional, is_async)
