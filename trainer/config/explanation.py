"""One sentence for an error that Hydra or OmegaConf raises about a config: the key, what is valid, file and line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainer.config.config_file import GROUP, LINES
from trainer.config.schema import SECTIONS, is_name, no_such_key, section_named, valid_keys
from trainer.errors import UserError, did_you_mean, one_line

_MEANT = {"model": "model.path={}", "data": "data=files data.train_files=[{}]"}
"""What to write in place of `GROUP=PATH`."""
_MOST_KEYS = 20
"""Number of keys of a section that a sentence names at most."""


def located(sentence: str, words: Sequence[str]) -> str:
    """Return a sentence about a key, after `FILE:LINE: ` if a file has set the key and none of the words has."""
    key = re.split(r"[=: ]", sentence, maxsplit=1)[0]
    given = {word.partition("=")[0].lstrip("+") for word in words}
    return f"{LINES[key]}: {sentence}" if key in LINES and key not in given else sentence


def config_refusal(
    error: Exception,
    words: Sequence[str] = (),
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    prefix: str = "",
) -> UserError:
    """Return the error for the user.

    Args:
        words: of the command line.
        groups: names of the groups, with their choices.
        prefix: dotted name of the section, with a dot, if the config is that of a section alone.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for cause in chain:
        if isinstance(cause, UserError):
            return cause
        if (path := getattr(cause, "missing_cfg_file", None)) is not None:
            return UserError(_of_choice(path, words, groups))
    named = next((cause for cause in chain if getattr(cause, "full_key", None)), chain[-1])
    if key := getattr(named, "full_key", None) or _key_in(str(error), bool(prefix)):
        return UserError(located(_of_key(prefix + key, named, groups), words))
    if group := re.search(r"override '([\w/@]+)'\. No match", str(error)):
        return UserError(_of_choice(group[1], words, groups))
    return UserError(f"the config cannot be composed ({one_line(str(error))})")


def _key_in(text: str, is_section: bool) -> str:
    """Return the key that a message names. Empty: none. `is_section`: the config is that of a section alone."""
    if wrong := re.search(r"is not a subclass of (\w+)", text):  # a plain value in place of a section
        name = next((name for name, cls in SECTIONS.items() if cls.__name__ == wrong[1]), "")
        return name.rpartition(".")[2] if is_section else name
    named = re.search(r"full_key: (\S+)|[Mm]erging override \+*([\w.]+)=", text)
    return (named[1] or named[2]) if named else ""


def _of_key(key: str, error: BaseException, groups: Mapping[str, Sequence[str]]) -> str:
    if not is_name(key) and not key.startswith("hydra."):
        return no_such_key(key, groups)
    keys = valid_keys(key)
    if section_named(key) is not None and keys:
        shown = [*keys[:_MOST_KEYS], *(["… (docs/config.md lists all)"] if len(keys) > _MOST_KEYS else [])]
        return f"{key}: is a section, and takes no value; its keys are {', '.join(shown)}"
    lines = str(error).splitlines()
    reason = next(
        (line for line in lines if line and not line.startswith(("Error merging", "In '"))), type(error).__name__
    )
    reason = reason.partition("resolving interpolation: ")[2] or reason
    kind = _type_of(key)
    return f"{key}: {one_line(reason)}" + (f"; it must be {kind}" if kind and "nterpolation" not in str(error) else "")


def _type_of(key: str) -> str:
    """Return the type of a key as the schema has it, such as `int | None`; empty if there is no such key."""
    section, _, last = re.sub(r"\[\w+\]$", "", key).rpartition(".")
    cls = section_named(section)
    fields = dataclasses.fields(cls) if cls is not None else ()
    return next((str(field.type).replace("None", "null") for field in fields if field.name == last), "")


def _of_choice(path: str, words: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    group, _, choice = path.removeprefix("/").partition("/")
    is_given = any(word.lstrip("+").startswith(f"{group}=") for word in words)
    where = f"{LINES['defaults']}: " if "defaults" in LINES and not is_given else ""
    if group == GROUP or group not in groups:
        meant = did_you_mean(group, groups) or f"choose one of {', '.join(groups)}"
        return f"{where}{group}: no such group; {meant}"
    own = f"write {_MEANT[group].format(choice)}" if group in _MEANT and "/" in choice else ""
    meant = own or did_you_mean(choice, groups[group]) or f"choose one of {', '.join(groups[group])}"
    return f"{where}{group}={choice}: no such choice; {meant}"
