"""Configs for tests, and the keys of the schema."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config, compose, conf_dir, register, rules, to_config, validate
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


@functools.cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        return hydra.compose("config", overrides=list(choices))


def config_of(overrides: Sequence[str] = ()) -> Config:
    """What `compose` returns, several times as fast: Hydra composes each combination of choices of groups once.

    The values of keys are set in a copy of that. What that refuses is left to `compose`. It is no test of words:
    a text that looks like a number is another text here.
    """
    named = ("data.mix.", "data.val_sets.")
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        keys = [one.key_or_group for one in parsed]
        choices = [one for one, key in zip(overrides, keys, strict=True) if "." not in key]
        if any("experiment" in choice or choice[:1] in "+~" for choice in choices):
            return compose(overrides)
        if any(f"{key}.".startswith(("data.train_files.", named[0])) for key in keys) and "data.synthetic" not in keys:
            choices = choices if any(choice.startswith("data=") for choice in choices) else ["data=files", *choices]
        config = copy.deepcopy(_composed(tuple(choices)))
        for one, key in zip(parsed, keys, strict=True):
            if "." in key:
                assert not one.is_delete() and not one.is_sweep_override()
                OmegaConf.update(config, key, one.value(), force_add=one.is_add() or key.startswith(named))
    except (HydraException, OmegaConfBaseException, AssertionError):
        return compose(overrides)
    return to_config(config)


def check_rules(config: Config, section: str) -> None:
    """Check what must hold between keys of one section alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "RULES", [one for one in rules.RULES if one[0] == section])
        validate(config)


def refusal_of(overrides: list[str]) -> str:
    """The sentence with which these overrides are refused."""
    with pytest.raises(UserError) as error:
        config_of(overrides)
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
