"""`--config FILE.yaml`: an experiment of the user's own, with group files beside it.

The file becomes a choice of a group of its own, which stands between the defaults and `experiment`, so the command line
wins over it. Its directory joins Hydra's search path: `algorithm/mine.yaml` beside it is the choice `algorithm=mine`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.overrides import CONFIG, find_groups
from trainer.config.schema import MAPPINGS, is_name, no_such_key, section_named
from trainer.config.texts import construct_yaml
from trainer.errors import UserError, as_list, did_you_mean, one_line

GROUP = "config_file"
"""The group in `conf/config.yaml` whose only choice is the file."""
_CHOICE, _RECORDED = "file", "recorded"
_SEARCHED = "hydra.searchpath="
_GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
_DEFAULTS = "defaults"


@dataclass
class ConfigFiles:
    """The YAML files of the user that a command names: `--config FILE`, and chosen group files."""

    directories: list[str] = field(default_factory=list)
    """Where groups are looked for besides `conf/`."""
    lines: dict[str, str] = field(default_factory=dict)
    """`FILE:LINE` of each dotted key in the files."""
    chooses_data: bool = False
    """The file chooses `data`, or names data files."""

    def experiments_choose_data(self, experiments: Iterable[str], conf: str) -> bool:
        """Return whether one of the experiments, or one that it builds on, chooses the group `data`.

        Args:
            conf: directory of the groups of the project.
        """
        left, seen = list(experiments), set[str]()
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            for directory in (conf, *self.directories):
                for entry in _read_defaults(os.path.join(directory, "experiment", f"{name}.yaml")):
                    if isinstance(entry, str):  # one of the same group, or `/experiment/NAME`
                        left.append(entry.rpartition("/")[2])
                    elif isinstance(entry, dict) and "override /data" in entry:
                        return True
        return False

    def located(self, key: str, sentence: str) -> str:
        """Return a sentence about a key, with `FILE:LINE: ` before it if the key is in a file."""
        return f"{self.lines[key]}: {sentence}" if key in self.lines else sentence


def _read_defaults(path: str) -> list[Any]:
    """Return the entries of `defaults` in a YAML file; none if there is no such file, or if Hydra will refuse it."""
    import yaml

    try:
        with open(path) as file:
            found = (yaml.safe_load(file) or {}).get(_DEFAULTS)
    except (OSError, ValueError, yaml.YAMLError, AttributeError):
        return []
    return found if isinstance(found, list) else []


def load(words: Sequence[str], conf: str, files: ConfigFiles) -> list[str]:
    """Return the words with what Hydra needs in place of `--config=FILE`.

    Args:
        words: of the command line, flags in their long form (see `overrides.arranged`).
        conf: directory of the groups of the project.
        files: gets the files.

    Raises:
        UserError: a file cannot be read, or has keys or choices that do not exist.
    """
    paths = [word.partition("=")[2] for word in words if word.startswith(f"{CONFIG}=")]
    directories = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    words = [word for word in words if not word.startswith(f"{CONFIG}=")]
    directories += [path for word in words if _SEARCHED in word for path in re.findall(r"file://([^\]\"',]+)", word)]
    files.directories += [path for path in directories if os.path.isdir(path)]
    if len(paths) > 1:
        raise UserError(f"{CONFIG}={paths[1]}: one file can be given; {paths[0]} is another")
    if paths:
        if any(word.lstrip("+").startswith(_SEARCHED) for word in words):
            raise UserError(f"hydra.searchpath: does not go with {CONFIG}; name one more directory with --config-dir")
        directory = os.path.dirname(os.path.abspath(paths[0]))
        if directory != conf:
            files.directories.append(directory)
            words = [*words, f"hydra.searchpath=[{json.dumps(f'file://{directory}', ensure_ascii=False)}]"]
    for directory in files.directories:
        _refuse_names_of_the_project(directory, conf)
    groups = find_groups(conf, *files.directories)
    if paths:
        _store(paths[0], groups, files, conf)
        words = [*words, f"{GROUP}={_CHOICE}"]
    for group, choice in _choices(words):
        _read_choice(group, choice, files)
    return words


def store_recorded(values: dict[str, Any]) -> None:
    """Make the config that a run has recorded a choice of Hydra (see `RECORDED`). The command line wins over it."""
    from hydra.core.config_store import ConfigStore

    # A generator would leave its options beside those of the recorded data.
    node = {_DEFAULTS: [{"override /data": "files"}, "_self_"], **_escaped(values)}
    ConfigStore.instance().store(group=GROUP, name=_RECORDED, node=node, package="_global_")


RECORDED = f"{GROUP}={_RECORDED}"
"""The override that chooses what `store_recorded` has stored."""


def _escaped(value: Any) -> Any:
    """Return recorded values, in which `${` is text."""
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _refuse_names_of_the_project(directory: str, conf: str) -> None:
    known, own = find_groups(conf), find_groups(directory)
    for group, choices in own.items():
        for choice in choices:
            if choice in known.get(group, []):
                path = os.path.join(directory, group, f"{choice}.yaml")
                raise UserError(f"{path}: {group}={choice} is a choice of the project; rename the file")


def _store(path: str, groups: dict[str, list[str]], files: ConfigFiles, conf: str) -> None:
    """Read the file, check its keys and choices, and make it a choice that Hydra finds."""
    from hydra.core.config_store import ConfigStore

    values, lines, _ = _read(path)
    entries = values.pop(_DEFAULTS, [])
    bases, choices = _defaults_of(entries, path, lines, groups)
    _check_keys(path, values, lines)
    files.lines |= {key: f"{path}:{line}" for key, line in lines.items()}
    base_chooses_data = files.experiments_choose_data(bases, conf)
    names_files = {"train_files", "mix"} & (values.get("data") or {}).keys()
    if "data" not in choices and names_files and not base_chooses_data:
        choices["data"] = "files"
    files.chooses_data = "data" in choices or base_chooses_data
    node = {
        _DEFAULTS: [
            *(f"/experiment/{name}" for name in bases),
            *({f"override /{group}": choice} for group, choice in choices.items()),
            "_self_",
        ],
        **values,
    }
    for group, choice in choices.items():
        _read_choice(group, choice, files)
    ConfigStore.instance().store(group=GROUP, name=_CHOICE, node=node, package="_global_")


def _defaults_of(
    entries: Any, path: str, lines: dict[str, int], groups: dict[str, list[str]]
) -> tuple[list[str], dict[str, str]]:
    """Return the experiments that the file builds on, and its choices by group."""
    if not isinstance(entries, list):
        raise UserError(f"{path}:{lines.get(_DEFAULTS, 1)}: {_DEFAULTS} must be a list of GROUP: CHOICE")
    bases: list[str] = []
    choices: dict[str, str] = {}
    for number, entry in enumerate(entries):
        where = f"{path}:{lines.get(f'{_DEFAULTS}[{number}]', 1)}"
        if entry == "_self_":
            continue
        pairs = entry.items() if isinstance(entry, dict) else [("experiment", entry)]
        for name, choice in pairs:
            group = str(name).removeprefix("override ").strip().lstrip("/")
            if group not in groups:
                meant = did_you_mean(group, groups) or f"choose one of {', '.join(groups)}"
                raise UserError(f"{where}: {group}: no such group; {meant}")
            for one in choice if isinstance(choice, list) and group == "experiment" else [choice]:
                if one not in groups[group]:
                    meant = did_you_mean(str(one), groups[group]) or f"choose one of {', '.join(groups[group])}"
                    raise UserError(f"{where}: {group}={one}: no such choice; {meant}")
                if group == "experiment":
                    bases.append(one)
                else:
                    choices[group] = one
    return bases, choices


def _choices(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the choices of groups in the overrides, those of sweeps and lists included."""
    for word in words:
        name, _, value = word.partition("=")
        for choice in re.findall(r"[\w.-]+", value):
            yield name, choice


def _read_choice(group: str, choice: str, files: ConfigFiles) -> None:
    """Check the keys of a group file of the user; does nothing if there is none."""
    for directory in files.directories:
        path = os.path.join(directory, group, f"{choice}.yaml")
        if os.path.exists(path) and not group.startswith("-"):
            values, lines, text = _read(path)
            values.pop(_DEFAULTS, None)
            lines = {key: line for key, line in lines.items() if key.partition("[")[0] != _DEFAULTS}
            if not _GLOBAL.search(text) and group != "experiment":
                values, lines = {group: values}, {f"{group}.{key}": line for key, line in lines.items()}
            _check_keys(path, values, lines)
            files.lines |= {key: f"{path}:{line}" for key, line in lines.items()}


def _read(path: str) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return the values of a YAML file (see `construct_yaml`), the line of each dotted key, and the text."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(f"{path}: is empty")
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}: must be a mapping of sections to keys and values, such as `trainer: {{seed: 1}}`")
        lines = dict(_lines(root, path))
        loaded = OmegaConf.to_container(OmegaConf.create(construct_yaml(text)), resolve=False)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where}: is not YAML ({one_line(getattr(error, 'problem', None) or str(error))})") from error
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise UserError(f"{path}:{lines.get(key, 1)}: {key}: the ${{…}} in this value cannot be read") from error
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}, lines, text


def _lines(node: Any, path: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted key and the line of each key in a mapping of YAML."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise UserError(f"{path}:{line}: {name}: is there twice, first in line {seen[name]}; keep one")
        seen[name] = line
        yield name, line
        if hasattr(value, "value") and type(value).__name__ == "MappingNode":
            yield from _lines(value, path, f"{name}.")
        if name == _DEFAULTS and type(value).__name__ == "SequenceNode":
            for number, entry in enumerate(value.value):
                yield f"{name}[{number}]", entry.start_mark.line + 1


def _check_keys(path: str, values: dict[str, Any], lines: dict[str, int]) -> None:
    """Refuse keys that the schema does not have, all of them in one message."""
    problems = []

    def walk(part: dict[str, Any], prefix: str) -> None:
        for name, value in part.items():
            key = f"{prefix}{name}"
            where = f"{path}:{lines.get(key, 1)}"
            is_section = section_named(key) is not None or key in MAPPINGS
            if is_section and isinstance(value, dict):
                walk(value, f"{key}.")
            elif is_section:
                inner = "nothing" if value is None else value
                problems.append(f"{where}: {key}: is a section and needs keys below it, not {inner}")
            elif "." in name and is_name(key):
                nested = name.replace(".", ": {") + ": …" + "}" * name.count(".")
                problems.append(f"{where}: {key}: has dots, which nest nothing in YAML; write `{nested}`")
            elif not is_name(key) and key != "hydra":
                problems.append(f"{where}: {no_such_key(key)}")

    walk(values, "")
    if problems:
        raise UserError(as_list("the config file has wrong keys:", problems))
