"""Sections that the user names, such as `data.mix.<name>`, from the mappings that Hydra has composed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.config.explanation import config_refusal
from trainer.config.fields import walk_keys
from trainer.errors import UserError
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
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section = copy.deepcopy(base) if base is not None else cls()
    if not isinstance(given, Mapping):
        valid = ", ".join(field.name for field in dataclasses.fields(section))  # type: ignore[arg-type]
        raise UserError(f"{key}={given}: is a section; its keys are {valid}")
    _drop_options_of_other_names(section, given)
    try:
        section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(section), given))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise config_refusal(error, prefix=f"{key}.") from error
    for name, value, constraint in walk_keys(section, key):
        if (problem := constraint.problem(value)) is not None:
            raise UserError(f"{name}={redact(value, name)}: {problem}")
    return section


def _drop_options_of_other_names(section: Any, given: Mapping[str, Any]) -> None:
    """Set `FOLLOWS_NAME` to the defaults, in this section and those in it, where `given` has another name."""
    for field in dataclasses.fields(section):
        value, inner = getattr(section, field.name), given.get(field.name)
        if dataclasses.is_dataclass(value) and isinstance(inner, Mapping):
            _drop_options_of_other_names(value, inner)
    name = getattr(section, "name", None)
    if given.get("name", name) != name:
        default = type(section)()
        for option in FOLLOWS_NAME:
            if hasattr(default, option):
                setattr(section, option, getattr(default, option))
