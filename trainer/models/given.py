"""What a model directory gives to a run besides weights: config, tokenizer, templates, processors, code."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import parse_json

Given = dict[str, Any]
"""By file name: the values of a JSON object by key, or a digest of another file's content."""

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*",
)
BACKBONE_FILES = ("config.json",)
"""All that the critic's directory gives besides weights."""
_CODE = "**/*.py"
_BACKUPS = ("~", ".bak", ".orig", ".old")
"""Endings of the copies that editors and users leave. Nothing reads them."""
_HARMLESS = (
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "tokenizer_file",
    "special_tokens_map_file",
    "is_local",
    "local_files_only",
)
"""Keys that say who wrote a file, and where. They act on nothing."""
_RENAMED = {"torch_dtype": "dtype"}
"""Keys that newer versions of transformers write under another name."""
_SHORT = 200
"""A value whose JSON has at most this many characters is kept as it is, so that a message can show it."""
_MEDIUM = 1 << 16
"""An object whose JSON has at most this many characters is kept key by key."""
_SHOWN = 4
_DIGEST = "xxh3-128 "


def read_given(directory: str, with_code: bool, patterns: tuple[str, ...] = MODEL_FILES) -> Given:
    """Return what the files of a model directory say. The layout of JSON and the order of its keys have no part in it.

    Args:
        with_code: the run executes Python files of the directory (`model.trust_remote_code`).

    Raises:
        UserError: a file cannot be read.
    """
    names = given_files(directory, with_code, patterns)
    return {name: read_file_given(os.path.join(directory, name)) for name in names}


def given_files(directory: str, with_code: bool, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of these files, sorted. See `read_given`."""
    patterns = (*patterns, _CODE) if with_code else patterns
    found = {name for one in patterns for name in glob.glob(one, root_dir=directory, recursive=True)}
    is_read = {name for name in found if os.path.isfile(os.path.join(directory, name))}
    return sorted(name for name in is_read if not name.endswith(_BACKUPS))


def read_file_given(path: str) -> Any:
    """Return what one file says (see `Given`).

    Raises:
        UserError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if path.endswith(".json"):
        try:
            content = parse_json(data)
        except ValueError:
            return _digest(data)
        return {key: _short(value) for key, value in _leaves(content)} if isinstance(content, dict) else _short(content)
    return _digest(data)


def differences(name: str, saved: Any, now: Any) -> str:
    """Return in what two contents of the file `name` differ; empty if they are the same. None: there is no file."""
    if saved == now:
        return ""
    if saved is None or now is None:
        return f"{name} is {'new' if saved is None else 'missing'}"
    if not (isinstance(saved, Mapping) and isinstance(now, Mapping)):
        return f"{name} has another content"
    keys = sorted(key for key in {*saved, *now} if not (key in saved and key in now and _same(saved[key], now[key])))
    if not keys:
        return ""
    shown = [_change(key, saved, now) for key in keys[:_SHOWN]]
    more = [f"{len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return f"{name}: {', '.join(shown + more)}"


def _same(saved: Any, now: Any) -> bool:
    return saved == now or json.dumps(saved) == json.dumps(now)  # NaN is not equal to itself


def _change(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    shown = json.dumps(key)[1:-1]
    if key not in saved or key not in now:
        return f"{shown} is {'new' if key not in saved else 'missing'}"
    before, after = json.dumps(saved[key]), json.dumps(now[key])
    if _DIGEST in before + after:
        return f"{shown} has another value"
    return f"{shown} was {before}, is {after}"


def _leaves(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of an object by their keys, those of objects in it by `outer.inner`."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key in _HARMLESS:
            continue
        if isinstance(value, dict) and value and len(json.dumps(value)) <= _MEDIUM:
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + _RENAMED.get(key, key), value))
    return found


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _SHORT else _digest(text.encode())


def _digest(data: bytes) -> str:
    return _DIGEST + digest_bytes(data)
