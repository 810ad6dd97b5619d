"""The YAML files of the user: `--config FILE`, and the group files beside it or in `--config-dir`.

The file becomes a choice of the group `config_file`, which stands between the defaults and `experiment`, so the command
line wins over it. Its directory joins Hydra's search path: `algorithm/mine.yaml` beside it is `algorithm=mine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from trainer.config.texts import construct_yaml
from trainer.errors import UserError, one_line

GROUP = "config_file"
LINES: dict[str, str] = {}
"""`FILE:LINE` of each dotted key in the files of the user that were read for the config."""
_DEFAULTS = "defaults"


def read_yaml(path: str, package: str = "", records: bool = True) -> dict[str, Any]:
    """Return the values of a YAML file (see `construct_yaml`).

    Args:
        package: dotted name of the section that the file is for; empty: it has whole sections.
        records: put the lines of its keys into `LINES`.

    Raises:
        UserError: it cannot be read, is no YAML, or has a key twice.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}: must be a mapping of sections to keys and values, such as `trainer: {{seed: 1}}`")
        for key, line in _lines(root, path, f"{package}." if package else "") if root is not None else ():
            if records:
                LINES[key] = f"{path}:{line}"
        return construct_yaml(text, package) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where}: is not YAML ({one_line(getattr(error, 'problem', None) or str(error))})") from error


def _lines(node: Any, path: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted key and the line of each key in a mapping of YAML."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise UserError(f"{path}:{line}: {name}: is there twice, first in line {seen[name]}; keep one")
        seen[name] = line
        yield name, line
        if type(value).__name__ == "MappingNode":
            yield from _lines(value, path, f"{name}.")


def store_file(path: str) -> str:
    """Make a file a choice of Hydra; return the override that chooses it.

    Its `defaults` name experiments that it builds on, and choices of groups: `[one, {algorithm: ppo}]`.
    """
    values = read_yaml(path)
    entries = values.pop(_DEFAULTS, [])
    if not values and not entries:
        raise UserError(f"{path}: is empty")
    defaults: list[Any] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        for group, choice in entry.items() if isinstance(entry, dict) else [("experiment", entry)]:
            name = str(group).removeprefix("override ").strip().lstrip("/")
            if name == "experiment":
                defaults += [f"/experiment/{one}" for one in (choice if isinstance(choice, list) else [choice])]
            else:
                defaults.append({f"override /{name}": choice})
    defaults = [entry for entry in defaults if entry != "/experiment/_self_"]
    # Hydra wants what is overridden after what is added.
    defaults.sort(key=lambda entry: isinstance(entry, dict))
    return _store("file", {_DEFAULTS: [*defaults, "_self_"], **values})


def store_recorded(values: dict[str, Any]) -> str:
    """Make the config that a run has recorded a choice of Hydra; return the override that chooses it.

    The command line wins over it.
    """
    # A generator would leave its options beside those of the recorded data.
    return _store("recorded", {_DEFAULTS: [{"override /data": "files"}, "_self_"], **_escaped(values)})


def _store(name: str, node: dict[str, Any]) -> str:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group=GROUP, name=name, node=node, package="_global_")
    return f"{GROUP}={name}"


def _escaped(value: Any) -> Any:
    """Return recorded values, in which `${` is text."""
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def find_groups(*directories: str) -> dict[str, list[str]]:
    """Return the groups in directories of YAML files, with their choices.

    Raises:
        UserError: two directories have a file of one name: Hydra would take the first.
    """
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if not entry.is_dir():
                continue
            names = sorted(name.removesuffix(".yaml") for name in os.listdir(entry.path) if name.endswith(".yaml"))
            if twice := [name for name in names if name in groups.get(entry.name, ())]:
                path = os.path.join(entry.path, f"{twice[0]}.yaml")
                raise UserError(f"{path}: {entry.name}={twice[0]} is a choice of the project; rename the file")
            groups[entry.name] = sorted([*groups.get(entry.name, []), *names])
    return groups
