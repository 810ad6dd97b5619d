"""Check the files of a model directory by type, size and header, before a library reads them."""

from __future__ import annotations

import contextlib
import glob
import os
import re

from trainer.errors import UserError, format_size, one_line
from trainer.files.atomic_io import file_problem, open_regular
from trainer.files.documents import parse_object
from trainer.files.hf_hub import first_line

_MIB = 1 << 20
_LARGEST = (
    (re.compile(r".*\.index\.json"), 64 * _MIB),
    (re.compile(r"(tokenizer|vocab|merges|added_tokens|special_tokens_map|tokenizer_config)\.(json|txt)"), 512 * _MIB),
    (re.compile(r"(.*_)?config\.json|chat_template\.json|.*\.(jinja|py)"), 32 * _MIB),
    (re.compile(r".*\.(json|txt|model|tiktoken|spm|safetensors|bin)"), None),
)
"""Files that the libraries read, or could read, with the largest size of each in bytes. The first pattern that fits
counts."""
_QUANTISED = ("F8", "F6", "F4")
_SINGLE_FILE, _INDEX_IN_USE = "model.safetensors", "model.safetensors.index.json"
_START_OF_POINTER = b"version https://git-lfs.github.com/"
_STARTS_OF_BIN = (b"PK\x03\x04", b"\x80\x02")
"""A zip file, or the pickle of torch's older format."""

_checked: set[tuple[str, int, int]] = set()


def check_model_files(path: str, key: str) -> None:
    """Check the files of the model directory `path`. Files that this process has checked before are not read again.

    Args:
        key: names the directory in messages.

    Raises:
        UserError: a file is no regular file, is too large for its kind, or has a header that cannot be true; or an
            index names a file outside of the directory.
    """
    for name in sorted(os.listdir(path)):
        for pattern, largest in _LARGEST:
            if pattern.fullmatch(name):
                _check_once(path, name, largest, key)
                break


def tensors_in(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of the tensors in a safetensors file, by name. The library checks the header.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        ValueError: its header cannot be true.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(file):
        pass
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise ValueError(first_line(error)) from error


def weight_files(path: str) -> list[str]:
    """Return the safetensors files that hold the weights of the directory `path`, as transformers chooses them.

    One file of the usual name goes before an index, even if the index names others. Empty: there is neither.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is no index, or names a file outside of its directory.
    """
    single, index = os.path.join(path, _SINGLE_FILE), os.path.join(path, _INDEX_IN_USE)
    if os.path.isfile(single):
        return [single]
    return _files_of_index(index) if os.path.isfile(index) else []


def weight_shapes(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the file and the shape of each tensor in the `weight_files` of the directory `path`, by name.

    Raises:
        ValueError: a file cannot be used, or a tensor is in two files.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        files = weight_files(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"its {_INDEX_IN_USE} cannot be used ({one_line(str(error))})") from error
    for file in files:
        for name, (_, shape) in _usable_tensors(file).items():
            if name in found:
                names = [os.path.basename(one) for one in (found[name][0], file)]
                raise ValueError(f"its {names[0]} and {names[1]} both hold {one_line(name)}; remove one of them")
            found[name] = file, shape
    return found


def _usable_tensors(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        return tensors_in(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"its {os.path.basename(file)} cannot be used ({one_line(str(error))})") from error


def check_one_reading(path: str, key: str) -> None:
    """Refuse a directory in which vLLM would read a weight from another file than transformers.

    vLLM reads the files of the index, and without an index all safetensors files.

    Args:
        key: names the directory in messages.

    Raises:
        UserError: see above; or a file cannot be used.
    """
    try:
        own = weight_shapes(path)
        index = os.path.join(path, _INDEX_IN_USE)
        others = _files_of_index(index) if os.path.isfile(index) else _safetensors(path)
        for file in sorted(set(others) - {file for file, _ in own.values()}):
            if twice := own.keys() & _usable_tensors(file).keys():
                name = min(twice)
                raise ValueError(
                    f"transformers reads {one_line(name)} from {os.path.basename(own[name][0])}, and vLLM from "
                    f"{os.path.basename(file)}; remove the file that is not of this model"
                )
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={path}: {error}") from error


def _safetensors(path: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))


def _files_of_index(index: str) -> list[str]:
    return [os.path.join(os.path.dirname(index), file) for file in sorted(set(files_in_index(index).values()))]


def quantised_tensor(path: str) -> str | None:
    """Return the name and the type of a quantised weight in the safetensors files of the directory `path`, if any.

    A library that does not know of the quantisation would read the numbers without their scales. Integers are weights
    only under the name of one: masks and tables of tokens are integers too. Files that cannot be read are left out.
    """
    with contextlib.suppress(OSError, ValueError):
        for file in weight_files(path):
            for name, (kind, _) in tensors_in(file).items():
                if kind.startswith(_QUANTISED) or (kind in ("I8", "U8") and name.endswith("weight")):
                    return f"{one_line(name)} has the type {kind}"
    return None


def files_in_index(index: str) -> dict[str, str]:
    """Return the file of each tensor that an index names.

    Raises:
        OSError: the index cannot be read, or is no regular file.
        ValueError: it is no index, or names a file outside of its directory.
    """
    with open_regular(index) as opened:
        files: dict[str, str] = parse_object(opened.read(), {"weight_map": {str: str}})["weight_map"]
    for file in set(files.values()):
        if os.path.isabs(file) or ".." in file.split("/") or not file.isprintable():
            raise ValueError(f"it names the file {one_line(repr(file))}, which is not in its directory")
    return files


def _check_once(path: str, name: str, largest: int | None, key: str) -> None:
    file = os.path.join(path, name)
    try:
        if (problem := file_problem(file)) is not None:
            raise ValueError(f"it {problem}")
        status = os.stat(file)
        stamp = (os.path.realpath(file), status.st_size, status.st_mtime_ns)
        if stamp in _checked:
            return
        if largest is not None and status.st_size > largest:
            raise ValueError(
                f"it has {format_size(status.st_size)}, and such a file has at most {format_size(largest)}"
            )
        _check_content(file, name)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={path}: its {name} cannot be used ({one_line(str(error))})") from error
    _checked.add(stamp)


def _check_content(file: str, name: str) -> None:
    with open_regular(file) as opened:
        if opened.read(len(_START_OF_POINTER)) == _START_OF_POINTER:
            raise ValueError("it is a pointer of Git LFS, not the file itself; run `git lfs pull` in that directory")
    if name == "config.json":
        with open_regular(file) as opened:
            parse_object(opened.read())
    elif name.endswith(".index.json"):
        shards = {os.path.join(os.path.dirname(file), shard) for shard in files_in_index(file).values()}
        # Downloads often leave out weights in a second format, but not their index.
        if name != _INDEX_IN_USE and not any(map(os.path.lexists, shards)):
            return
        for shard in sorted(shards):
            if (problem := file_problem(shard)) is not None:
                raise ValueError(f"it names {os.path.relpath(shard, os.path.dirname(file))}, which {problem}")
    elif name.endswith(".safetensors"):
        tensors_in(file)
    elif name.startswith("pytorch_model") and name.endswith(".bin"):
        with open_regular(file) as opened:
            if not opened.read(4).startswith(_STARTS_OF_BIN):
                raise ValueError("it is no file of torch")
