"""Configs for tests, and the keys of the schema."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from trainer.config import Config, compose, validate
from trainer.errors import UserError


def typed_keys(section: Any, prefix: str = "") -> dict[str, str]:
    """Every key of a section with its type, written out without the helpers of the schema."""
    found: dict[str, str] = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            found |= typed_keys(value, f"{prefix}{f.name}.")
        else:
            found[f"{prefix}{f.name}"] = str(f.type)
    return found


KEYS = typed_keys(Config())


def with_value(config: Config, key: str, value: Any) -> Config:
    """A copy of `config` in which a dotted key has another value."""
    changed = copy.deepcopy(config)
    set_value(changed, key, value)
    return changed


def set_value(config: Config, key: str, value: Any) -> None:
    """Set a dotted key that the schema has."""
    *sections, name = key.split(".")
    node: Any = config
    for section in sections:
        node = getattr(node, section)
    assert hasattr(node, name), key
    setattr(node, name, value)


def refusal_of(overrides: list[str]) -> str:
    """The sentence with which these overrides are refused."""
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal_of_value(config: Config, key: str, value: Any) -> str:
    """The sentence with which this value is refused; it names the key."""
    with pytest.raises(UserError) as error:
        validate(with_value(config, key, value))
    assert "\n" not in str(error.value)
    assert key in str(error.value)
    return str(error.value)


def explained(*words: str) -> str | None:
    """The sentence about wrong words of a command line; None: they are right."""
    try:
        compose(words)
    except UserError as error:
        sentence = str(error)
        assert sentence.isprintable() or sentence.replace("\n  ", "").isprintable(), sentence
        return sentence
    return None
