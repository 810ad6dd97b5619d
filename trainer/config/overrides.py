"""The words of a command line: flags, overrides, and the overrides that the task does not read."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from trainer.config.config_file import GROUP
from trainer.config.fields import value_of
from trainer.config.schema import (
    MAPPINGS,
    NAMES,
    Config,
    is_name,
    is_open,
    no_such_key,
    section_named,
    without_source,
)
from trainer.config.tasks import OPTIONS
from trainer.config.texts import quoted
from trainer.errors import UserError, as_list, did_you_mean, one_line
from trainer.files.documents import flatten
from trainer.process.log_setup import ToolParser

_READ_OF_REWARD = "reward.success_threshold"
"""The key of a reward that is read where an environment gives the rewards, too."""
_WHOLE = {"trainer", "algorithm", "rollout", "model", "data", "reward", "environment", "sft", "logger"}
"""A file with all of these sections is the whole config that a run has recorded."""


def parsed(words: Sequence[str], command: str = "train") -> argparse.Namespace:
    """Return the flags and `overrides` of a command line, in which flags may stand anywhere.

    Raises:
        UserError: a flag is not known, or has no value.
    """
    parser = ToolParser(prog=f"trainer {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--config-dir")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("-p", "--package", default="")
    parser.add_argument("-m", "--multirun", action="store_true")
    flags, rest = parser.parse_known_args(list(words))
    for word in rest:
        if word.startswith("-"):
            name = word.partition("=")[0]
            meant = f"write {word.lstrip('-')}" if "." in name else did_you_mean(name, ("--config", "--multirun"))
            raise UserError(f"{word}: no such flag; {meant or f'`trainer {command} --help` lists them'}")
    flags.overrides = rest
    return flags


def checked(overrides: Sequence[str], groups: Mapping[str, Sequence[str]], sweeps: bool) -> list[str]:
    """Return the overrides with the pluses that Hydra needs: none where the schema has the key, two below `MAPPINGS`.

    Texts that look like other values get quotes.

    Args:
        groups: names of the groups, with their choices.
        sweeps: one job runs for each combination of values.

    Raises:
        UserError: lists the overrides that cannot be read, and the keys that do not exist.
    """
    plain, problems = [], []
    for word in overrides:
        bare = word.lstrip("+")
        key = bare.partition("=")[0].lstrip("~")
        if is_in_mapping(key):
            word = f"++{bare}"
        elif key in groups or is_name(key) and not is_open(key):
            word = bare
        problems += [problem] if (problem := _problem(word, key, groups, sweeps)) else []
        plain.append(quoted(word))
    if problems:
        raise UserError(as_list("the command cannot be read:", problems))
    return plain


def _problem(word: str, key: str, groups: Mapping[str, Sequence[str]], sweeps: bool) -> str | None:
    """Return one sentence about an override that cannot be read; None: it can."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = word if word.isprintable() else ascii(word)[1:-1]
    if word and os.path.exists(os.path.join(word, "config.yaml")):
        return f"{shown}: is a directory, not KEY=VALUE; for its config write --config={shown}/config.yaml"
    sections = [key[:end] for end, letter in enumerate(key) if letter == "."]
    is_known = key in (*NAMES, *groups, GROUP) or is_name(key) or any(map(is_open, sections))
    if re.fullmatch(r"[\w.]+", key) and not is_known and not key.startswith("hydra"):
        return no_such_key(key, groups)
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = one_line(str(error).splitlines()[0])
        return f"{shown}: cannot be read ({reason}); write KEY=VALUE or GROUP=CHOICE, a text in quotes: KEY='\"TEXT\"'"
    if override.is_sweep_override() and not sweeps:
        return f"{shown}: several values run one job each; add -m for that, or write {key}=[…] for a list"
    return None


def is_in_mapping(key: str) -> bool:
    """Return whether this is one of `MAPPINGS` or a key in it, which may have to be added to the config."""
    return any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS)


def unread_words(words: Sequence[str], config: Config) -> list[str]:
    """Return the keys and choices in the overrides that the task does not read (`TaskSpec.unread`)."""
    names = {word: word.partition("=")[0].lstrip("+~") for word in words}
    unread = []
    for word, name in names.items():
        if name.startswith(f"{OPTIONS}.") and config.task.options:
            continue
        shown = without_source(name)
        if any(fnmatchcase(one, pattern) for one in (shown, f"{shown}.") for pattern in config.task.unread):
            unread.append(word if section_named(name) is not None and "{" not in word else name)
    return unread


def refuse_unread(words: Sequence[str], config: Config, lines: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse overrides that the task does not read: they would change nothing.

    Files are not searched for such keys, because one file may serve several tasks. But a file with an environment and
    a reward beside it, which nothing reads, is refused, too, if it is not the whole config that a run has recorded.

    Args:
        lines: `FILE:LINE` of each dotted key in the files of the user.

    Raises:
        UserError: names all of them.
    """
    if unread := unread_words(words, config):
        task, them = config.trainer.task, "it" if len(unread) == 1 else "them"
        raise UserError(
            f"{', '.join(unread)}: trainer.task={task} does not read {them}, so leave {them} out or choose another "
            "task (a config file may have keys of several tasks)"
        )
    for key in dict.fromkeys([*_set_keys(words), *_beside_environments(lines)]):
        if environment := _replaces_reward(key, config):
            where = f"{lines[key]}: " if key in lines else ""
            raise UserError(
                f"{where}{key}: {environment}={value_of(config, environment)} gives the rewards, so {key} is not "
                f"read; leave it out, or set {environment}=null"
            )


def _set_keys(words: Sequence[str]) -> list[str]:
    """Return the dotted keys that overrides set, those in mappings included."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides(list(words))
    return [key for override in overrides for key in flatten({override.key_or_group: override.value()})]


def _beside_environments(lines: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys in files that name the environment of the same rows, but not those that a run has recorded."""
    by_file: dict[str, list[str]] = {}
    for key, line in lines.items():
        by_file.setdefault(line.rpartition(":")[0], []).append(key)
    for keys in by_file.values():
        if not {key.partition(".")[0] for key in keys} >= _WHOLE:
            yield from (key for key in keys if f"{key.removesuffix(without_source(key))}environment.name" in keys)


def _replaces_reward(key: str, config: Config) -> str:
    """Return the key of the environment that gives the rewards where `key` says how to compute them; empty: none."""
    shown = without_source(key)
    is_read = not config.task.reward_functions or shown == _READ_OF_REWARD or not config.reads(key)
    if not shown.startswith("reward.") or section_named(shown) is not None or is_read:
        return ""
    source = key.removesuffix(shown)
    given = [value_of(config, f"{source}environment")] if source else config.environments
    return f"{source}environment.name" if all(one.name for one in given) else ""
