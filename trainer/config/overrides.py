"""The words of a command line: flags, overrides, and the overrides that the task does not read."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

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
from trainer.process.log_setup import ToolParser

GROUP = "config_file"
"""The group of which the file of `--config` is a choice."""


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
    """Return the overrides with the pluses that Hydra needs: none where the schema has the key, two where the user
    has chosen it.

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
        if any(f"{key}.".startswith(f"{mapping}.") for mapping in MAPPINGS) or is_open(key.rpartition(".")[0]):
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


def refuse_unread(words: Sequence[str], config: Config) -> None:
    """Refuse overrides that the task does not read, and rewards where an environment gives them: they would change
    nothing. Files are not searched for such keys, because one file may serve several tasks.

    Raises:
        UserError: names the keys.
    """
    if unread := unread_words(words, config):
        task, them = config.trainer.task, "it" if len(unread) == 1 else "them"
        raise UserError(
            f"{', '.join(unread)}: trainer.task={task} does not read {them}, so leave {them} out or choose another "
            "task (a config file may have keys of several tasks)"
        )
    for key in [word.partition("=")[0].lstrip("+~") for word in words]:
        shown = without_source(key)
        is_read = shown == "reward.success_threshold" or not config.task.reward_functions or not config.reads(key)
        if is_read or not f"{shown}.".startswith("reward."):
            continue
        source = key.removesuffix(shown)
        environments = [value_of(config, f"{source}environment")] if source else config.environments
        if all(one.name for one in environments):
            environment = f"{source}environment.name"
            raise UserError(
                f"{key}: {environment}={value_of(config, environment)} gives the rewards, so {key} is not read; leave "
                f"it out, or set {environment}=null"
            )
