"""Sections that the user names, such as `data.mix.<name>`, from the mappings that Hydra has composed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.config.fields import walk_keys
from trainer.errors import UserError, did_you_mean
from trainer.files.redaction import redact

S = TypeVar("S")

FOLLOWS_NAME = ("kwargs", "weights", "url", "python")
"""Keys whose value belongs to the `name` beside them. A section with a name of its own does not get those of `base`."""


def read_section(cls: type[S], given: Any, key: str, base: S | None = None) -> S:
    """Return the section that `given` describes, with every value checked on its own.

    Args:
        cls: its dataclass.
        given: nested mappings with the values that the user has set.
        key: dotted name of the section, for messages.
        base: has the values of what the user has not set. None: the defaults of the class.

    Raises:
        UserError: one sentence that names the key, its value and what is valid.
    """
    section = copy.deepcopy(base) if base is not None else cls()
    _set_values(section, given, key)
    for name, value, constraint in walk_keys(section, key):
        if (problem := constraint.problem(value)) is not None:
            raise UserError(f"{name}={redact(value, name)}: {problem}")
    return section


def _set_values(section: Any, given: Any, key: str) -> None:
    known = {f.name: f for f in dataclasses.fields(section)}
    if not isinstance(given, Mapping):
        raise UserError(f"{key}={given}: is a section; its keys are {', '.join(known)}")
    given = {str(name): value for name, value in given.items()}
    for name in given.keys() - known.keys():
        wrong, valid = f"{key}.{name}", [f"{key}.{one}" for one in known]
        raise UserError(f"{wrong}: no such key; {did_you_mean(wrong, valid) or 'valid are ' + ', '.join(known)}")
    if given.get("name", getattr(section, "name", None)) != getattr(section, "name", None):
        default = type(section)()
        for name in known.keys() & set(FOLLOWS_NAME):
            setattr(section, name, getattr(default, name))
    plain = {}
    for name, value in given.items():
        if dataclasses.is_dataclass(getattr(section, name)):
            _set_values(getattr(section, name), value, f"{key}.{name}")
        else:
            plain[name] = value
    for name, value in _typed(type(section), plain, key).items():
        setattr(section, name, value)


def _typed(cls: type, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values as the types of the fields, by OmegaConf's rules, as for all other sections."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from trainer.config.overrides import kind_of_type

    typed = {}
    for name, value in values.items():
        node = OmegaConf.structured(cls)
        try:
            node[name] = value
            typed[name] = getattr(OmegaConf.to_object(node), name)
        except OmegaConfBaseException as error:
            field = next(f for f in dataclasses.fields(cls) if f.name == name)
            kind = kind_of_type(str(field.type)) or str(field.type)
            raise UserError(f"{key}.{name}={redact(value, name)}: must be {kind}") from error
    return typed
