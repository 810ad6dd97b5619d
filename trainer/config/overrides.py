"""The words of a command line: flags to the front, and one sentence about each override that cannot be read.

Hydra reads overrides as well, but its errors explain its grammar, and its flags work only before all overrides.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from trainer.config.fields import value_of
from trainer.config.schema import (
    MAPPINGS,
    NAMES,
    OPEN_SECTIONS,
    Config,
    is_name,
    is_open,
    no_such_key,
    section_named,
    valid_keys,
    without_source,
)
from trainer.config.tasks import OPTIONS
from trainer.config.texts import quoted
from trainer.errors import UserError, as_list, did_you_mean
from trainer.files.documents import flatten

LOG = logging.getLogger(__name__)

MULTIRUN = "--multirun"
CONFIG = "--config"
_SEVERAL = "experiment"
"""The group that takes several choices."""

_READ_OF_REWARD = "reward.success_threshold"
"""The key of a reward that is read where an environment gives the rewards, too."""

_SECTIONS = {"trainer", "algorithm", "rollout", "model", "data", "reward", "environment", "sft", "logger"}
"""A file with all of these is the whole config that a run has recorded."""

_FLAGS = {
    MULTIRUN: "-m",
    "--run": "-r",
    "--cfg": "-c",
    "--resolve": "",
    "--package": "-p",
    CONFIG: "",
    "--config-dir": "-cd",
    "--info": "-i",
    "--hydra-help": "",
    "--experimental-rerun": "",
    "--shell-completion": "-sc",
    "--help": "-h",
}
"""Long and short name of each flag."""
_OTHER_CONFIGS = ("--config-name", "-cn", "--config-path", "-cp")
"""Flags of Hydra that replace the project's own config, without which no job runs."""
_WITHOUT_VALUE = {MULTIRUN, "--run", "--resolve", "--hydra-help", "--shell-completion", "--help"}
_CHOICES_OF_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

_NAME = re.compile(r"[A-Za-z_][\w-]*([./][\w-]+)*")
_CLOSING = {"]": "[", "}": "{", ")": "("}


def arranged(words: Sequence[str], command: str = "train") -> list[str]:
    """Return the words with the long form of each flag, flags before overrides, the value of a flag joined by `=`.

    Args:
        command: whose help lists the flags.

    Raises:
        UserError: a flag is not known, or has no value.
    """
    flags, overrides, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        long = next((long for long, short in _FLAGS.items() if name in (long, short)), None)
        if long is None:
            raise UserError(_unknown_flag(word, command))
        if long == "--info" and not equals and rest[:1] and rest[0] not in _CHOICES_OF_INFO:
            flags.append(f"{long}=all")
        elif long in _WITHOUT_VALUE:
            if equals:
                raise UserError(f"{word}: takes no value; write {name}")
            flags.append(long)
        elif equals or rest:
            flags.append(f"{long}={value if equals else rest.pop(0)}")
        else:
            raise UserError(f"{word}: needs a value after it")
    return [*dict.fromkeys(flags), *overrides]


def _unknown_flag(word: str, command: str) -> str:
    key, _, value = word.lstrip("-").partition("=")
    if word.partition("=")[0] in _OTHER_CONFIGS:
        return (
            f"{word}: the project's own config is always read; name a YAML file of yours with {CONFIG} FILE, or a "
            "directory of groups with --config-dir DIRECTORY (docs/experiments.md)"
        )
    if re.search(r"[._]", key):
        return f"{word}: keys have no dashes before them; write {key}={value or 'VALUE'}"
    meant = did_you_mean(word.partition("=")[0], _FLAGS)
    return f"{word}: no such flag; {meant or f'`trainer {command} --help` lists them'}"


def checked(overrides: Sequence[str], groups: dict[str, list[str]], sweeps: bool) -> list[str]:
    """Return the overrides with the pluses that Hydra needs: none where the schema has the key, two below `MAPPINGS`.

    Texts that look like other values get quotes.

    Args:
        groups: names of the groups, with their choices.
        sweeps: one job runs for each combination of values.

    Raises:
        UserError: lists the overrides that cannot be read.
    """
    known = NAMES | set(groups)
    plain, problems = [], []
    for word in overrides:
        bare = word.lstrip("+")
        key = bare.partition("=")[0]
        if is_in_mapping(key):
            plain.append(f"++{bare}")
        else:
            plain.append(bare if key in known - set(OPEN_SECTIONS) else word)
        if (problem := _problem(bare if is_in_mapping(key) else plain[-1], groups, sweeps)) is not None:
            problems.append(problem)
    if problems:
        raise UserError(as_list("the command cannot be read:", problems))
    return list(map(quoted, plain))


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


def refuse_unread(
    words: Sequence[str], config: Config, lines: Mapping[str, str] = MappingProxyType({}), continues: bool = False
) -> None:
    """Refuse overrides that the task does not read: they would change nothing.

    Files are not searched for such keys, because one file may serve several tasks. But a file with an environment and
    a reward beside it, which nothing reads, is refused, too, if it is not the whole config that a run has recorded.

    Args:
        lines: `FILE:LINE` of each dotted key in the files of the user.
        continues: the run has started before. A reward beside an environment, which earlier versions accepted, gives a
            warning.

    Raises:
        UserError: names all of them.
    """
    if unread := unread_words(words, config):
        task, them = config.trainer.task, "it" if len(unread) == 1 else "them"
        raise UserError(
            f"{', '.join(unread)}: trainer.task={task} does not read {them}, so leave {them} out or choose another "
            "task (a config file may have keys of several tasks)"
        )
    by_environment: dict[str, list[str]] = {}
    for key in dict.fromkeys([*_set_keys(words), *_beside_environments(lines)]):
        if environment := _replaces_reward(key, config):
            by_environment.setdefault(environment, []).append(key)
    for environment, keys in by_environment.items():
        are, them = ("is", "it") if len(keys) == 1 else ("are", "them")
        problem = (
            f"{keys[0]}: {environment}={value_of(config, environment)} gives the rewards, so {' and '.join(keys)} "
            f"{are} not read; leave {them} out, or set {environment}=null"
        )
        if not continues:
            raise UserError(problem)
        LOG.warning(problem)


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
        if not {key.partition(".")[0] for key in keys} >= _SECTIONS:
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


def _problem(word: str, groups: dict[str, list[str]], sweeps: bool) -> str | None:
    """Return one sentence about an override that cannot be read; None: it can."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if word.startswith("~"):
        return _problem_of_removal(word, groups)
    if not equals:
        shown = _shown(word) or repr(word)
        if os.path.exists(file := os.path.join(word, "config.yaml")):
            return (
                f"{shown}: is a directory, not KEY=VALUE or GROUP=CHOICE; for its config write --config={_shown(file)}"
            )
        return f"{shown}: has no value; write KEY=VALUE or GROUP=CHOICE"
    if not name.startswith("hydra") and not _NAME.fullmatch(name):
        return _problem_of_name(word, name)
    if not value.strip() and not name.startswith("hydra."):
        return f"{_shown(word)}: has no value; write one after the =, or leave {name} out"
    return _problem_of_value(word, name, value, groups, sweeps)


def _problem_of_removal(word: str, groups: dict[str, list[str]]) -> str | None:
    name = word[1:].partition("=")[0]
    if word[1:] in groups or name.startswith("hydra"):
        return None
    return f"{_shown(word)}: keys cannot be removed; leave {_shown(name) or 'it'} out for its default"


def _problem_of_name(word: str, name: str) -> str:
    if "@" in name:
        return f"{_shown(word)}: names have no @; write {_shown(name.partition('@')[0])}=VALUE"
    tidy = re.sub(r"[.]{2,}", ".", re.sub(r"\[(\w+)\]", r".\1", name)).strip(" .")
    if not _NAME.fullmatch(tidy):
        return f"{_shown(word)}: has no key before the =; write KEY=VALUE or GROUP=CHOICE"
    if not is_name(tidy):
        return no_such_key(_shown(name))
    below = ".KEY" if valid_keys(tidy) else ""
    return f"{_shown(word)}: this is no name of a key; write {tidy}{below}=VALUE"


def _problem_of_value(word: str, name: str, value: str, groups: dict[str, list[str]], sweeps: bool) -> str | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(word)
        swept = override.is_sweep_override()
        parsed = None if swept else override.value()
    except HydraException:
        if no_such := _problem_of_unknown(name, groups):
            return no_such
        kind = kind_of(name)
        advice = f"a text in quotes is taken as it is: {_quoted(name, value)}"
        if kind and "text" not in kind:
            advice = f"{name} must be {kind}"
        elif name in groups:
            advice = f"choose one of {', '.join(groups[name])}"
        return f"{_shown(word)}: {_problem_of_syntax(value)}; {advice}"
    if swept:
        return None if sweeps else _needs_multirun(name, value, groups)
    if name not in groups or isinstance(parsed, dict):
        return None
    if isinstance(parsed, list) and (name != _SEVERAL or not all(isinstance(one, str) for one in parsed)):
        names = [str(one) for one in parsed] or groups[name][:1]
        return (
            f"{_shown(word)}: {name} takes one choice; write {name}={_shown(names[0])}, or run one job for each with "
            f"{MULTIRUN} {name}={_shown(','.join(names))}"
        )
    if not isinstance(parsed, (str, list)):
        return f"{_shown(word)}: no such choice; choose one of {', '.join(groups[name])}, or leave {name} out"
    return None


def _problem_of_unknown(name: str, groups: dict[str, list[str]]) -> str | None:
    sections = [name[:end] for end, letter in enumerate(name) if letter == "."]
    is_known = is_name(name) or name in groups or any(map(is_open, sections)) or name.startswith("hydra")
    return None if is_known else no_such_key(name, groups)


def _needs_multirun(name: str, value: str, groups: dict[str, list[str]]) -> str:
    word = _shown(f"{name}={value}")
    if name in groups:
        both = f", or {name}=[{_shown(value)}] for all of them in one job" if name == _SEVERAL else ""
        return f"{word}: several choices run one job each; add {MULTIRUN}, or choose one{both}"
    kind = kind_of(name)
    if "list" in kind:
        return f"{word}: write {name}=[{_shown(value)}] for a list; to run one job for each value, add {MULTIRUN}"
    quoted = f", or write {_quoted(name, value)} for a text" if "text" in kind or not kind else ""
    return f"{word}: several values run one job each; add {MULTIRUN}, or give one value{quoted}"


def _problem_of_syntax(value: str) -> str:
    """Say what Hydra's grammar does not take in a value."""
    open_brackets: list[str] = []
    quote = ""
    for letter in re.sub(r"\\.", "", value):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING.values():
            open_brackets.append(letter)
        elif letter in _CLOSING and (not open_brackets or open_brackets.pop() != _CLOSING[letter]):
            return f"the {letter} has no {_CLOSING[letter]} before it"
    if quote:
        return f"the quote {quote} is not closed"
    if open_brackets:
        return f"the {open_brackets[-1]} is not closed"
    if re.search(r"(^|[,\[{(])\s*,|,\s*($|[\]})])", value):
        return "a comma has no value beside it"
    if re.search(r"\{[^:}]+\}", value):
        return "a mapping is written {NAME: VALUE}"
    if "(" in value:
        return "brackets ( ) are a function of the command line, and there is none that takes this"
    if "=" in value:
        return "a value with = needs quotes"
    wrong = next((letter for letter in value if not re.match(r"[\w\s/$%*@?|.,:+\-\\\[\]{}'\"]", letter, re.ASCII)), "")
    return f"a value with {_shown(wrong)} needs quotes" if wrong.strip() else "the value cannot be read"


def _quoted(name: str, value: str) -> str:
    """Return the override as a shell takes it, its value a text in quotes."""
    if not value.isprintable() or "'" in value:
        return f"'{name}=\"…\"'"
    inner = value.strip('"').replace('"', '\\"')
    return f"'{name}=\"{inner}\"'"


def _shown(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def kind_of(key: str) -> str:
    """Return what the value of a key must be: `a whole number, or null`. Empty: the schema has no such key."""
    section, _, last = re.sub(r"\[\w+\]$", "", key).rpartition(".")
    cls = section_named(section)
    if cls is None:
        return ""
    types = [str(field.type) for field in dataclasses.fields(cls) if field.name == last]
    if key.endswith("]"):
        types = [types[0].partition("[")[2].removesuffix("]")] if types else []
    return kind_of_type(types[0]) if types else ""


def kind_of_type(annotation: str) -> str:
    """Return what a value of this type must be, in words. Empty: it may be anything."""
    parts = [part.strip().partition("[")[0] for part in annotation.split("|")]
    return ", or ".join(_KINDS[part] for part in parts) if all(part in _KINDS for part in parts) else ""


_KINDS = {
    "None": "null",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list [VALUE, VALUE]",
    "dict": "a mapping {NAME: VALUE}",
}


def find_groups(*directories: str) -> dict[str, list[str]]:
    """Return the groups in directories of YAML files, with their choices."""
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.is_dir():
                names = [os.path.splitext(name)[0] for name in os.listdir(entry.path) if name.endswith(".yaml")]
                groups[entry.name] = sorted({*groups.get(entry.name, []), *names})
    return groups
