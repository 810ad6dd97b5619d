"""The words of a command line: flags, overrides, and the overrides that the task does not read.

Keys whose values are texts take words as they were typed: `007`, `12e4567` and `on` are no numbers there.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.config import schema
from trainer.config.fields import matches, value_of
from trainer.config.schema import Config
from trainer.config.tasks import OPTIONS
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


def key_in(word: str) -> str:
    """Return the key, or the group, that an override sets, chooses or drops."""
    return word.partition("=")[0].lstrip("+~")


def checked(overrides: Sequence[str], groups: Mapping[str, Sequence[str]], sweeps: bool) -> list[str]:
    """Return the overrides with the pluses that Hydra needs: none where the schema has the key, two where the user
    has chosen it.

    Raises:
        UserError: lists the overrides that cannot be read, and the keys that do not exist.
    """
    accepted, problems = [], []
    for word in overrides:
        bare, key = word.lstrip("+"), key_in(word)
        is_named = any(f"{key}.".startswith(f"{mapping}.") for mapping in schema.MAPPINGS)
        if is_named or schema.is_open(key.rpartition(".")[0]):
            word = f"++{bare}"
        elif key in groups or schema.is_name(key) and not schema.is_open(key):
            word = bare
        problems += [problem] if (problem := _problem(word, key, groups, sweeps)) else []
        accepted.append(quoted(word))
    if problems:
        raise UserError(as_list("the command cannot be read:", problems))
    return accepted


def _problem(word: str, key: str, groups: Mapping[str, Sequence[str]], sweeps: bool) -> str | None:
    """Return one sentence about an override that cannot be read; None: it can."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = word if word.isprintable() else ascii(word)[1:-1]
    if word and os.path.exists(os.path.join(word, "config.yaml")):
        return f"{shown}: is a directory, not KEY=VALUE; for its config write --config={shown}/config.yaml"
    sections = [key[:end] for end, letter in enumerate(key) if letter == "."]
    is_known = key in (*schema.NAMES, *groups, GROUP) or schema.is_name(key) or any(map(schema.is_open, sections))
    if re.fullmatch(r"[\w.]+", key) and not is_known and not key.startswith("hydra"):
        return schema.no_such_key(key, groups)
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
    unread = []
    for word in dict.fromkeys(words):
        key, unread_keys = key_in(word), config.task.unread
        shown = schema.without_source(key)
        is_option = key.startswith(f"{OPTIONS}.") and config.task.options
        if not is_option and (matches(shown, unread_keys) or matches(f"{shown}.", unread_keys)):
            unread.append(word if schema.section_named(key) is not None and "{" not in word else key)
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
    for key in map(key_in, words):
        shown = schema.without_source(key)
        is_read = shown == "reward.success_threshold" or not config.task.reward_functions or not config.reads(key)
        if is_read or not f"{shown}.".startswith("reward."):
            continue
        source = key.removesuffix(shown)
        name = f"{source}environment.name"
        names = [value_of(config, name)] if source else [one.name for one in config.environments]
        if all(names):
            raise UserError(
                f"{key}: {name}={value_of(config, name)} gives the rewards, so {key} is not read; leave it out, or set "
                f"{name}=null"
            )


# --- Texts as they were typed ---

_CHOOSE = ("choice", "shuffle", "sort", "tag", "str")
"""Functions of Hydra that may get texts."""
_STRING = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"


@functools.cache
def kind_of_text(key: str) -> str:
    """Return the type of a key whose value is a text or a list of texts; empty: its values are others."""
    # `Any`: `reward.name` is a text or a list of texts, and the path of teachers a text or a mapping of texts.
    kind = schema.type_of(key) or ("str" if schema.type_of(key.rpartition(".")[0]) == "Any" else "")
    return kind if kind in ("str", "str | None", "list[str]", "Any") else ""


def quoted(word: str) -> str:
    """Return an override in which words for keys of texts that Hydra would make other values of are in quotes.

    null stays null where the key may have none. A word that Hydra cannot read stays as it is.
    """
    from hydra.core.override_parser import overrides_parser as grammar
    from hydra.errors import HydraException

    lexer = grammar.OverrideLexer(grammar.InputStream(word))
    parser = grammar.OverrideParser(grammar.CommonTokenStream(lexer))
    for recognizer in (lexer, parser):
        recognizer.removeErrorListeners()
        recognizer.addErrorListener(grammar.HydraErrorListener())
    try:
        tree = parser.override()
    except HydraException:
        return word
    for token in reversed(list(_typed_texts(tree, word.partition("=")[0].lstrip("+~")))):
        word = f"{word[: token.start]}'{token.text}'{word[token.stop + 1 :]}"
    return word


def _typed_texts(node: Any, key: str, in_list: bool = False) -> Iterator[Any]:
    """Yield the tokens in a node of Hydra's parser, the value of `key`, that are texts by the schema and no text to
    Hydra."""
    from hydra.core.override_parser.overrides_parser import OverrideParser as Parser

    inner = list(node.getChildren())
    match node:
        case Parser.PrimitiveContext():
            tokens = [child.symbol for child in inner if child.symbol.type != Parser.WS]
            kind = kind_of_text(key)
            typed = {Parser.INT, Parser.FLOAT, Parser.BOOL, Parser.NULL}
            if kind in ("str | None", "Any") and not in_list:
                typed.remove(Parser.NULL)
            yield from tokens if kind and len(tokens) == 1 and tokens[0].type in typed else ()
            return
        case Parser.FunctionContext() if node.ID().getText() not in _CHOOSE:
            return
        case Parser.DictKeyValuePairContext():
            key = f"{key}.{node.dictKey().getText().strip()}"
    for child in inner:
        if child.getChildCount():
            yield from _typed_texts(child, key, in_list or isinstance(node, Parser.ListContainerContext))


def unquoted(word: str) -> str:
    """Return an override as it was before `quoted`."""
    name, _, value = word.partition("=")
    bare = f"{name}={value[1:-1]}"
    return bare if value[:1] == "'" and quoted(bare) == word else word


def mark_texts(node: Any, key: str = "", in_list: bool = False) -> None:
    """Make strings of the plain scalars in a node of YAML, the value of `key`, that are texts or names."""
    if node.id == "mapping":
        is_section = schema.section_named(key) is not None or key in schema.MAPPINGS
        has_names = not key or is_section or schema.is_open(key)
        for name, value in node.value:
            if has_names and name.id == "scalar" and not name.tag.endswith(":merge"):
                name.tag = _STRING
            if name.id == "scalar":
                mark_texts(value, f"{key}.{name.value}".lstrip("."))
    elif node.id == "sequence":
        for item in node.value:
            mark_texts(item, key, in_list=True)
    elif node.style is None and (kind := kind_of_text(key)):
        is_null = node.tag == _NULL and (not node.value.isalpha() or kind != "str" and not in_list)
        node.tag = node.tag if is_null else _STRING
