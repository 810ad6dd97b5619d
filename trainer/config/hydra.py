"""Hydra and OmegaConf: from words and a YAML file to the validated dataclasses, and one sentence for each error.

The file of `--config` becomes a choice of the group `config_file`, which stands between the defaults and `experiment`,
so the command line wins over it. Its directory joins Hydra's search path: `algorithm/mine.yaml` beside it is
`algorithm=mine`. Both libraries are imported where they are used, because their import takes a noticeable part of a
second. Keys whose values are texts take words as they were typed: `007`, `12e4567` and `on` are no numbers there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trainer.config import schema
from trainer.config.fields import value_of, walk_sections
from trainer.config.rollout import RolloutConfig
from trainer.config.rules import validate
from trainer.config.schema import Config
from trainer.config.tasks import find_task
from trainer.errors import UserError, as_list, did_you_mean, one_line
from trainer.files.redaction import HIDDEN, hidden_keys, name_secrets, redact_command

S = TypeVar("S")

GROUP = "config_file"
"""The group of which the file of `--config` is a choice."""
FOLLOWS_NAME = ("kwargs", "weights", "url", "authorization_env", "python", "model")
"""Keys whose value belongs to the `name` beside them. A section with a name of its own does not inherit them."""
_LONGEST_SUFFIX = 200  # bytes; file names end at 255, and some get a suffix
# Of the config that was composed last in this process:
_GIVEN: list[str] = []
"""Its overrides."""
_GROUPS: dict[str, list[str]] = {}
"""The groups that it could choose from, with their choices."""
_LINES: dict[str, str] = {}
"""`FILE:LINE` of each dotted key in the file that was read for it."""
_CHOSEN: set[str] = set()
"""Dotted keys that the choices of groups set which the user has named."""
_MEANT = {"model": "model.path={}", "data": "data=files data.train_files=[{}]"}
"""What to write in place of `GROUP=PATH`."""


def conf_dir() -> str:
    """Return the absolute path of the YAML groups: inside the installed package, or next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for candidate in (os.path.join(package, "conf"), os.path.join(os.path.dirname(package), "conf")):
        if os.path.isdir(candidate):
            return candidate
    raise AssertionError("the package was installed without its conf/ directory")


def compose(overrides: Sequence[str] = (), config_file: str | None = None, config_dir: str | None = None) -> Config:
    """Return the validated config of `trainer train --config CONFIG_FILE --config-dir CONFIG_DIR OVERRIDES`.

    Raises:
        UserError: a word, a file or the config is refused.
    """
    composed = _composed(hydra_words(overrides, config_file, config_dir), with_hydra=False)
    try:
        return to_config(composed)
    except UserError as error:
        raise UserError(_located(str(error))) from error


def words_given() -> list[str]:
    """Return the overrides of the config that was composed last in this process."""
    from hydra.core.hydra_config import HydraConfig

    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else _GIVEN
    return [word for word in words if not word.startswith("hydra.")]


def hydra_words(
    overrides: Sequence[str], config_file: str | None = None, config_dir: str | None = None, sweeps: bool = False
) -> list[str]:
    """Return the overrides for Hydra: those of the user, checked, and what stands for `--config` and `--config-dir`.

    Raises:
        UserError: a word or a file is refused.
    """
    register()
    for known in (_GIVEN, _GROUPS, _LINES, _CHOSEN):
        known.clear()
    own = [config_dir, os.path.dirname(os.path.abspath(config_file)) if config_file else None]
    for directory in filter(None, own):
        if not os.path.isdir(directory):
            raise UserError(f"{directory}: no such directory; name the one of your YAML files")
    directories = list(dict.fromkeys([conf_dir(), *map(os.path.abspath, filter(None, own))]))
    _GROUPS.update(find_groups(*directories))
    _GIVEN.extend(checked(overrides, sweeps))
    if directories[1:]:
        urls = json.dumps([f"file://{directory}" for directory in directories[1:]], ensure_ascii=False)
        _GIVEN.append(f"hydra.searchpath={urls}")
    for word in _GIVEN:
        _CHOSEN.update(_keys_of_choice(key_in(word), word.partition("=")[2], directories))
    if config_file:
        _GIVEN.append(_store_file(config_file, directories))
    given = set(map(key_in, _GIVEN))
    names_files = any(f"{key}.".startswith(("data.train_files.", "data.mix.")) for key in given | _LINES.keys())
    if names_files and not {"data", "data.synthetic"} & given:
        # The default of the group `data` is a generator, which takes no files.
        composed = _composed([word for word in _GIVEN if not sweeps or "," not in word], with_hydra=True)
        _GIVEN[:0] = ["data=files"] if composed.hydra.runtime.choices.data == "reverse_text" else []
    return list(_GIVEN)


def key_in(word: str) -> str:
    """Return the key, or the group, that an override sets, chooses or drops."""
    return word.partition("=")[0].lstrip("+~")


def checked(overrides: Sequence[str], sweeps: bool) -> list[str]:
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
        elif key in _GROUPS or schema.is_name(key) and not schema.is_open(key):
            word = bare
        problems += [problem] if (problem := _problem(word, key, sweeps)) else []
        accepted.append(quoted(word))
    if problems:
        raise UserError(as_list("the command cannot be read:", problems))
    return accepted


def _problem(word: str, key: str, sweeps: bool) -> str | None:
    """Return one sentence about an override that cannot be read; None: it can."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = word if word.isprintable() else ascii(word)[1:-1]
    if word and os.path.exists(os.path.join(word, "config.yaml")):
        return f"{shown}: is a directory, not KEY=VALUE; for its config write --config={shown}/config.yaml"
    sections = [key[:end] for end, letter in enumerate(key) if letter == "."]
    is_known = key in (*schema.NAMES, *_GROUPS, GROUP) or schema.is_name(key) or any(map(schema.is_open, sections))
    if re.fullmatch(r"[\w.]+", key) and not is_known and not key.startswith("hydra"):
        return schema.no_such_key(key, _GROUPS)
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = one_line(str(error).splitlines()[0])
        return f"{shown}: cannot be read ({reason}); write KEY=VALUE or GROUP=CHOICE, a text in quotes: KEY='\"TEXT\"'"
    if override.is_sweep_override() and not sweeps:
        return f"{shown}: several values run one job each; add -m for that, or write {key}=[…] for a list"
    return None


def find_groups(*directories: str) -> dict[str, list[str]]:
    """Return the groups in directories of YAML files, with their choices.

    Raises:
        UserError: two directories have a file of one name: Hydra would take the first.
    """
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for path in sorted(glob.glob("*/*.yaml", root_dir=directory)):  # Hydra passes over what cannot be read, too
            group, _, name = path.removesuffix(".yaml").partition("/")
            if name in groups.setdefault(group, []):
                file = os.path.join(directory, path)
                raise UserError(f"{file}: {group}={name} is a choice of the project; rename the file")
            groups[group].append(name)
    return {group: sorted(names) for group, names in groups.items()}


def _composed(words: list[str], with_hydra: bool) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
            return hydra_compose("config", overrides=words, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(error) from error


def to_config(dict_config: Any) -> Config:
    """Resolve interpolations of a composed Hydra config and return it as plain dataclasses, validated.

    Raises:
        UserError: a value cannot be resolved, or the config is refused (see `validate`).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(dict_config)
    except OmegaConfBaseException as error:
        raise _refusal(error) from error
    assert isinstance(config, Config)
    if hidden := hidden_keys(dataclasses.asdict(config)):
        raise UserError(
            f"{hidden[0]}: {HIDDEN} stands for a secret that was left out where this config was printed or saved; give "
            "it by an environment variable: ${oc.env:NAME}"
        )
    name_secrets(OmegaConf.to_container(dict_config, resolve=False))
    for key, cls in schema.MAPPINGS.items():  # the sections that the user has named, such as `data.mix.math`
        given: dict[str, Any] = value_of(config, key)
        made = {str(one): read_section(given[one], f"{key}.{one}", cls.of_run(config)) for one in given}
        setattr(value_of(config, key.rpartition(".")[0]), key.rpartition(".")[2], made)
    for name, section in walk_sections(config):
        known = {field.name for field in dataclasses.fields(section)}
        for unknown in vars(section).keys() - known:  # `++key=value` has added it: nothing would read it
            raise UserError(schema.no_such_key(f"{name}.{unknown}".lstrip(".")))
    _set_defaults_of_task(config)
    if config.rollout.num_engines == RolloutConfig.num_engines:
        config.rollout.num_engines = max(1, len(config.rollout.urls))
    validate(config)
    return config


def _set_defaults_of_task(config: Config) -> None:
    """Set `TaskSpec.defaults` where neither a word nor a file that the user has named sets the key, be it to the value
    of the schema, and no other group another value."""
    given, in_files = set(map(key_in, words_given())), _CHOSEN | _LINES.keys()
    for key, value in config.task.defaults.items():
        if not schema.is_name(key):
            raise UserError(f"trainer.task={config.trainer.task}: sets a default of {schema.no_such_key(key)}")
        section, _, name = key.rpartition(".")
        is_given = key in in_files or any(f"{key}.".startswith(f"{one}.") for one in given)
        if not is_given and value_of(config, key) == value_of(Config(), key):
            setattr(value_of(config, section), name, copy.deepcopy(value))


# --- Sections that the user names ---


def read_section(given: Any, key: str, base: S) -> S:
    """Return the section that `given` describes. What is not given is as in `base`, a section of the same class.

    Raises:
        UserError: one sentence that names the key, its value and what is valid. `validate` checks the bounds.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section = copy.deepcopy(base)
    if not isinstance(given, Mapping):
        valid = ", ".join(field.name for field in dataclasses.fields(section))  # type: ignore[arg-type]
        raise UserError(f"{key}={given}: is a section; its keys are {valid}")
    _drop_options_of_other_names(section, given)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(section), given))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise _refusal(error, prefix=f"{key}.") from error


def _drop_options_of_other_names(section: Any, given: Mapping[str, Any]) -> None:
    """Set `FOLLOWS_NAME` to the defaults, in this section and those in it, where `given` has another name."""
    for field in dataclasses.fields(section):
        value, inner = getattr(section, field.name), given.get(field.name)
        if dataclasses.is_dataclass(value) and isinstance(inner, Mapping):
            _drop_options_of_other_names(value, inner)
    name = getattr(section, "name", None)
    if given.get("name", name) != name:
        for option in FOLLOWS_NAME:
            if hasattr(section, option):
                setattr(section, option, getattr(type(section)(), option))


# --- The file of the user, and the config that a run has recorded ---


def _store_file(path: str, directories: Sequence[str]) -> str:
    """Make a file a choice of Hydra; return the override that chooses it.

    Its `defaults` name experiments that it builds on, and choices of groups: `[one, {algorithm: ppo}]`.
    """
    values = read_yaml(path)
    entries = values.pop("defaults", [])
    if not values and not entries:
        raise UserError(f"{path}: is empty")
    defaults: list[Any] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        for group, choice in entry.items() if isinstance(entry, dict) else [("experiment", entry)]:
            name = str(group).removeprefix("override ").strip().lstrip("/")
            _CHOSEN.update(_keys_of_choice(name, str(choice), directories))
            if name == "experiment":
                defaults += [f"/experiment/{one}" for one in (choice if isinstance(choice, list) else [choice])]
            else:
                defaults.append({f"override /{name}": choice})
    defaults = [entry for entry in defaults if entry != "/experiment/_self_"]
    defaults.sort(key=lambda entry: isinstance(entry, dict))  # Hydra wants what is overridden after what is added
    return _store("file", {"defaults": [*defaults, "_self_"], **values})


def _keys_of_choice(group: str, names: str, directories: Sequence[str]) -> Iterator[str]:
    """Yield the dotted keys that the chosen files of a group set, with those of the choices that they build on. `names`
    is one, or several as `[a,b]`."""
    import yaml

    for name in re.findall(r"[^\s,\[\]'\"]+", names):
        path = next((p for one in directories if os.path.isfile(p := os.path.join(one, group, f"{name}.yaml"))), None)
        if path is None:
            continue
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError), open(path, encoding="utf-8") as file:
            text = file.read()
            root, values = yaml.compose(text), yaml.safe_load(text)
            if not isinstance(values, dict):
                continue
            prefix = "" if re.match(r"\s*#\s*@package\s+_global_", text) else f"{group}."
            yield from (key for key, _ in _lines(root, path, prefix))
            for entry in values.get("defaults") or []:
                for base, choice in entry.items() if isinstance(entry, dict) else [(group, entry)]:
                    base = str(base).removeprefix("override ").strip().lstrip("/")
                    if choice not in ("_self_", name):
                        yield from _keys_of_choice(base, str(choice), directories)


def store_recorded(values: dict[str, Any]) -> str:
    """Make the config that a run has recorded a choice of Hydra; return the override that chooses it."""

    def escaped(value: Any) -> Any:  # `${` is text
        if isinstance(value, dict):
            return {name: escaped(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [escaped(inner) for inner in value]
        return value.replace("${", "\\${") if isinstance(value, str) else value

    # A generator would leave its options beside those of the recorded data.
    return _store("recorded", {"defaults": [{"override /data": "files"}, "_self_"], **escaped(values)})


def _store(name: str, node: dict[str, Any]) -> str:
    from hydra.core.config_store import ConfigStore
    from omegaconf.errors import OmegaConfBaseException

    try:
        ConfigStore.instance().store(group=GROUP, name=name, node=node, package="_global_")
    except OmegaConfBaseException as error:
        raise _refusal(error) from error
    return f"{GROUP}={name}"


def read_yaml(path: str) -> dict[str, Any]:
    """Return the values of a YAML file as OmegaConf reads them, but texts as they were typed; record its keys' lines.

    Raises:
        UserError: it cannot be read, or is no YAML.
    """
    import yaml
    from omegaconf._utils import get_yaml_loader

    try:
        with open(path, encoding="utf-8") as file:
            loader = get_yaml_loader()(file.read())
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}: must be a mapping of sections to keys and values, such as `trainer: {{seed: 1}}`")
        _LINES.update(_lines(root, path))
        mark_texts(root)
        return loader.construct_document(root)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where}: is not YAML ({one_line(getattr(error, 'problem', None) or str(error))})") from error


def _lines(node: Any, path: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and `FILE:LINE` of each key in a mapping of YAML."""
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        yield name, line
        if value.id == "mapping":
            yield from _lines(value, path, f"{name}.")


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


# --- Errors ---


def _located(sentence: str) -> str:
    """Return a sentence about a key, after `FILE:LINE: ` if the file has set the key and none of the words has."""
    key = re.split(r"[=: ]", sentence, maxsplit=1)[0]
    return f"{_LINES[key]}: {sentence}" if key in _LINES and key not in map(key_in, words_given()) else sentence


def _refusal(error: Exception, prefix: str = "") -> UserError:
    """Return the error for the user: the key, what is valid, file and line. `prefix`: of the key, with its dot."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    missing = next((path for cause in chain if (path := getattr(cause, "missing_cfg_file", None))), None)
    if missing is None and (unknown := re.search(r"override '([\w/@]+)'\. No match", text)):
        missing = unknown[1]
    if missing is not None:
        return UserError(_of_choice(*missing.removeprefix("/").partition("/")[::2]))
    if wrong := re.search(r"is not a subclass of (\w+)", text):  # a plain value in place of a section
        key = next((name for name, cls in schema.SECTIONS.items() if cls.__name__ == wrong[1]), "")
        key = key.rpartition(".")[2] if prefix else key
    else:
        key = next((key for cause in chain if (key := getattr(cause, "full_key", None))), "")
        named = re.search(r"full_key: (\S+)|[Mm]erging override \+*([\w.]+)=", text)
        key = key or (named[1] or named[2] if named else "")
    if not key:
        return UserError(f"the config cannot be composed ({one_line(str(error))})")
    lines = (line for line in str(chain[-1]).splitlines() if line and not line.startswith(("Error m", "In '")))
    return UserError(_located(_of_key(prefix + key, next(lines, type(chain[-1]).__name__))))


def _of_key(key: str, reason: str) -> str:
    if not schema.is_name(key) and not key.startswith("hydra."):
        return schema.no_such_key(key, _GROUPS)
    if schema.section_named(key) is not None and (keys := schema.valid_keys(key)):
        shown = [*keys[:20], *(["… (docs/config.md lists all)"] if len(keys) > 20 else [])]
        return f"{key}: is a section, and takes no value; its keys are {', '.join(shown)}"
    reason = reason.partition("resolving interpolation: ")[2] or reason
    kind = "" if "nterpolation" in reason or "nvironment" in reason else schema.type_of(re.sub(r"\[\w+\]$", "", key))
    return f"{key}: {one_line(reason)}" + (f"; it must be {kind.replace('None', 'null')}" if kind else "")


def _of_choice(group: str, choice: str) -> str:
    is_of_file = "defaults" in _LINES and group not in map(key_in, words_given())
    where = f"{_LINES['defaults']}: " if is_of_file else ""
    is_group = group in _GROUPS and group != GROUP
    known, shown, kind = (_GROUPS[group], f"{group}={choice}", "choice") if is_group else (_GROUPS, group, "group")
    meant = f"write {_MEANT[group].format(choice)}" if group in _MEANT and "/" in choice else ""
    meant = meant or did_you_mean(choice if is_group else group, known) or f"choose one of {', '.join(known)}"
    return f"{where}{shown}: no such {kind}; {meant}"


# --- Resolvers ---


@functools.cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf, once."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    resolvers = {
        "sweep_suffix": _sweep_suffix,
        "optuna_direction": lambda task, metric: f"{find_task(task).compared_by(metric)[1]}imize",
        "times": lambda a, b: a * b,
        "quarter": lambda a: a // 4,
        # `value` if the built-in model is trained, `otherwise` if `model.path` names another model.
        "if_builtin": lambda value, otherwise, *, _root_: value if _root_.model.path is None else otherwise,
        "if_eq": _if_eq,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _if_eq(key: str, choice: Any, value: Any, otherwise: Any = None, *, _root_: Any) -> Any:
    """Return `value` if the key `key` has the value `choice`, else `otherwise`: presets set options of one function."""
    from omegaconf import OmegaConf

    chosen = OmegaConf.select(_root_, key)
    if chosen is None:
        raise ValueError(f"${{if_eq:{key},{choice},…}}: {key} has no value")
    return value if chosen == choice else otherwise


def _sweep_suffix() -> str:
    """Return `/key=value,…` of the keys that a multirun job sweeps, so that each job has its own directory; else "".

    Overrides that the command line gives to all jobs alike are left out (see `trainer.sweeps.callback`), so that
    resuming the sweep finds the directories of the sweep that was killed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    job = HydraConfig.get().job
    if OmegaConf.is_missing(job, "num"):  # the sweep itself
        return ""
    fixed = set(job.config.override_dirname.exclude_keys)
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    swept = [unquoted(o) for o in overrides if key_in(o) not in fixed]
    name = ",".join(redact_command(swept)).replace("/", "_")
    if len(name.encode()) > _LONGEST_SUFFIX:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = f"{name.encode()[: _LONGEST_SUFFIX - 17].decode(errors='ignore')}-{digest}"
    return f"/{name}" if name else ""
