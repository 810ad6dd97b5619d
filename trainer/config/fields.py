"""Fields of the schema that carry their rules: bounds, choices, and what a resume may do with the key."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from trainer.errors import UserError
from trainer.files.redaction import redact

LARGEST_INTEGER = 2**31 - 1
"""Greatest value of a whole number that has no `at_most` of its own."""

LARGEST_SEED = 2**32 - 1
"""vLLM hands its seed to NumPy, which takes 32 bits."""

ON_FAILURE = ("leave_out", "zero")
"""What the run may do with an episode whose reward or environment failed."""

LONGEST_TIME = 1_000_000
"""Greatest value of most times: days in seconds, years in minutes. Clocks of libraries overflow not far above."""


@dataclass(frozen=True)
class Constraint:
    """The values that one key may have. null is allowed wherever the type allows it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    off: float | None = None
    """A value outside of the bounds that turns the key off."""
    choices: tuple[str | None, ...] = ()
    """The texts that a value, or each item of a list, may be. Empty: any text."""
    is_open: bool = False
    """The key is a section whose keys the user chooses."""
    section: type | None = None
    """The key is a mapping of sections of this class, by names that the user chooses."""

    def problem(self, value: Any) -> str | None:
        """Return why `value` is refused; None: it is allowed."""
        for scalar in _scalars(value):
            if (problem := self._problem_of_scalar(scalar)) is not None:
                return problem
        if self.section is not None:
            wrong = [name for name in value if not _NAME.fullmatch(str(name))]
            return f"{wrong[0]} is no name; use letters, digits, - and _" if wrong else None
        listed = ", ".join("null" if name is None else name for name in self.choices)
        if self.choices and isinstance(value, list):
            return f"may name {listed}" if set(value) - set(self.choices) else None
        return f"choose one of {listed}" if self.choices and value not in self.choices else None

    def bounds(self) -> str:
        """Return the bounds in words, such as `at least 1, or -1`; empty if there are none."""
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        words = " and ".join(
            f"{name} {limit:{'' if name == 'at most' else 'g'}}" for name, limit in limits.items() if limit is not None
        )
        return words + (f", or {self.off:g}" if self.off is not None else "")

    def _problem_of_scalar(self, value: Any) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.is_open:
            return None
        if isinstance(value, str):
            if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
                return "holds a character that no file or program takes"
            return None if value.strip() else "is empty; give a value, or drop the key"
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value == self.off:
            return None
        alternative = "" if self.off is None else f" (or {self.off:g})"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}{alternative}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}{alternative}"
        if self.at_most is not None:
            return f"must be at most {self.at_most}" if value > self.at_most else None
        is_huge = isinstance(value, int) and abs(value) > LARGEST_INTEGER
        return f"must be at most {LARGEST_INTEGER}, negative or not" if is_huge else None


RESUME = {
    "harmless": "any resume may change it; what is computed stays the same",
    "rounding": "any resume may change it; what is computed stays the same but for rounding",
    "validation": "any resume may change it; metrics of the validation mean something else after it",
    "update": "with permission; acts from the update of the first step on",
    "rollouts": "with permission; acts from the rollouts of the first step on",
    "never": "no resume may change it",
}
"""What a resume may do with a key. Permission is `trainer.allow_config_change`."""
FREE = ("harmless", "rounding", "validation")
"""The keys that change without permission."""


@dataclass(frozen=True)
class ResumeRule:
    """What it means that a key has another value than in the checkpoint that a run resumes from."""

    change: str
    """One of `RESUME`."""
    reason: str = ""
    """Why the key needs permission or cannot change, as the end of a sentence."""
    state: tuple[str, ...] = ()
    """The kinds of saved state (of `LOAD_COMPONENTS`) that belong to the value. A fork that restores none of them
    changes the key freely."""

    def __post_init__(self) -> None:
        assert self.change in RESUME, self.change

    @property
    def is_free(self) -> bool:
        """Whether a resume changes the key without permission."""
        return self.change in FREE


HARMLESS = ResumeRule("harmless")


_CONSTRAINT, _RESUME = "constraint", "resume"
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)


def setting(
    default: Any = MISSING, *, resume: str | ResumeRule, default_factory: Any = MISSING, **constraint: Any
) -> Any:
    """Return the field of a key.

    Args:
        resume: what a resume may do with the key, one of `RESUME`, or a rule with its reason. Of a mapping of sections:
            with the names, and with the keys in the sections if it is "validation".
        constraint: fields of `Constraint`, such as `at_least` or `choices`. Those of a list hold for each item.
    """
    rule = ResumeRule(resume) if isinstance(resume, str) else resume
    metadata = {_CONSTRAINT: Constraint(**constraint), _RESUME: rule}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def subsection(factory: Callable[[], Any], *, resume: str | None = None) -> Any:
    """Return the field of a section.

    Args:
        resume: replaces "rollouts" as the rule of the keys in the section: "update" for a role that does not sample.
    """
    return field(default_factory=factory, metadata={_RESUME: resume})


def constraint_of(key: dataclasses.Field[Any]) -> Constraint:
    """Return the constraint of a field of the schema."""
    return key.metadata[_CONSTRAINT]


class Section:
    """A section of the config: keys with their bounds, and what a resume may do with each."""

    def __init_subclass__(cls) -> None:
        for name in cls.__dict__.get("__annotations__", {}):
            if _RESUME not in getattr(cls.__dict__.get(name), "metadata", {}):
                raise TypeError(
                    f"{cls.__name__}.{name}: make the field with `setting` or `subsection` of `trainer.config.fields`, "
                    "and say what a resume may do with it"
                )


_fields_of = functools.cache(dataclasses.fields)
"""Of a class: every walk asks it for each section."""


def walk_sections(section: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of this section and of all sections in it, outer sections first."""
    yield name, section
    for f in _fields_of(type(section)):
        for inner, value in _sections_in(section, f):
            yield from walk_sections(value, _join(name, inner))


def _sections_in(section: Any, f: dataclasses.Field[Any]) -> list[tuple[str, Any]]:
    """Return the names and the values of the sections that a field holds: one, or those of a mapping."""
    value = getattr(section, f.name)
    if hasattr(value, "__dataclass_fields__"):  # `dataclasses.is_dataclass` takes three times as long
        return [(f.name, value)]
    if isinstance(value, dict) and constraint_of(f).section is not None:
        return [(_join(f.name, key), inner) for key, inner in value.items()]
    return []


def walk_keys(section: Any, name: str = "") -> Iterator[tuple[str, Any, Constraint]]:
    """Yield the dotted name, value and constraint of every key, nested sections included."""
    for inner, value in walk_sections(section, name):
        for f in _fields_of(type(value)):
            if not hasattr(item := getattr(value, f.name), "__dataclass_fields__"):
                yield _join(inner, f.name), item, constraint_of(f)


def resume_rules(section: Any, name: str = "", instead: str | None = None) -> dict[str, ResumeRule]:
    """Return the rule of each key of a section, and of the sections in it, by dotted name. `instead` replaces the rule
    "rollouts", or all of them if it is "validation"."""
    rules: dict[str, ResumeRule] = {}
    for f in dataclasses.fields(section):
        rule = f.metadata[_RESUME]
        change = rule.change if isinstance(rule, ResumeRule) else rule
        for inner, value in _sections_in(section, f):
            rules |= resume_rules(value, _join(name, inner), change or instead)
        if isinstance(rule, ResumeRule):
            is_replaced = instead is not None and rule.change == "rollouts" or instead == "validation"
            rules[_join(name, f.name)] = dataclasses.replace(rule, change=instead) if is_replaced else rule
    return rules


def changed_keys(section: Any, default: Any, name: str) -> list[str]:
    """Return the dotted names of the keys whose values differ from `default`, a section of the same type."""
    pairs = zip(walk_keys(section, name), walk_keys(default, name), strict=True)
    return [key for (key, value, _), (_, other, _) in pairs if value != other]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns covers a key, or with a dot at its end a section."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def value_of(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config


def config_error(config: Any, key: str, problem: str) -> UserError:
    """Return an error about the value of a dotted key."""
    value = value_of(config, key)
    shown = "null" if value is None else str(redact(value, key))
    return UserError(f"{key}={shown if shown.isprintable() else ascii(shown)}: {problem}")


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value
