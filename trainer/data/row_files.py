"""Rows of files and of the Hub: JSON lines, Parquet and Arrow; and a digest of all that rows hold."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import xxhash

from trainer.errors import UserError
from trainer.files.atomic_io import file_problem
from trainer.files.documents import parse_json
from trainer.files.hf_hub import first_line, is_connection_error, pin_data, pinned, with_retries

_LINE_BYTES = 64 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_ARROW_FILE = b"ARROW1"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SLICE = 64
"""Rows of a table that are Python objects at the same time: a token of them takes ten times the memory."""

Rows = Iterator[tuple[str, Any]]  # (where, row): the location for error messages, and the row


def read_rows(file: str, key: str) -> Rows:
    """Yield each row of a file or Hub data set, with all fields of its structs.

    Raises:
        UserError: the file is missing, empty or malformed.
    """
    return ((where, parsed(line, where, key)) for where, line in lines(file, key, keeps_nulls=True))


def parsed(line: Any, where: str, key: str) -> Any:
    """Return the row in a line of JSON. A row of another format is returned unchanged."""
    if not isinstance(line, bytes):
        return line
    try:
        return parse_json(line.rstrip())  # otherwise the line break would count as a second line
    except json.JSONDecodeError as error:  # its line number is always 1, because the row is one line
        raise UserError(f"{key}: {where} is not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:  # nested too deeply, or, for UnicodeDecodeError, not UTF-8
        raise UserError(f"{key}: {where} is not JSON ({error})") from error


def lines(file: str, key: str, keeps_nulls: bool = False) -> Rows:
    """Yield the rows of a file or Hub data set like `read_rows`, but JSON lines as bytes (see `parsed`).

    Args:
        keeps_nulls: structs of tables keep the fields that are null. A table has the fields of all rows in each row,
            so a call of one tool would have the arguments of all others.
    """
    if file.startswith("hf://"):
        rows = _hub_rows(file, key)
    elif file.endswith(".jsonl"):
        rows = ((f"{file}:{line.number}", line.text) for line in json_lines(file, key))
    else:
        rows = _table_rows(file, key, keeps_nulls)
    empty = True
    for item in rows:
        empty = False
        yield item
    if empty:
        raise UserError(f"{key}={file}: is empty")


def _check_file(file: str, key: str) -> None:
    if not file.endswith((".jsonl", ".parquet", ".arrow")):
        raise UserError(f"{key}={file}: must end in .jsonl, .parquet or .arrow, or be hf://OWNER/NAME?config=C&split=S")
    elif os.path.exists(file) and (problem := file_problem(file)) is not None:
        raise UserError(
            f"{key}={file}: {problem}; the data is read again when the run is resumed, so write it to a file first"
        )
    elif not os.path.isfile(file):
        here = "" if os.path.isabs(file) else f" in {os.getcwd()}"
        raise UserError(
            f"{key}={file}: no such file{here}; correct the path, or set hf://OWNER/NAME?split=S for a data set of "
            "the Hub"
        )


class Line(NamedTuple):
    """A line of a file that is not blank."""

    number: int
    start: int  # bytes before it
    text: bytes


def json_lines(file: str, key: str) -> Iterator[Line]:
    """Yield the lines of a file of JSON lines.

    Raises:
        UserError: the file is missing, or has a line that is too long for a row.
    """
    _check_file(file, key)
    start = 0
    with open(file, "rb") as opened:
        for number, line in enumerate(iter(lambda: opened.readline(_LINE_BYTES + 1), b""), start=1):
            if len(line) > _LINE_BYTES:
                raise UserError(
                    f"{key}: {file}:{number} is longer than {_LINE_BYTES >> 20} MiB; a .jsonl file has one "
                    "JSON object per line, not one for all rows"
                )
            if line.strip():
                yield Line(number, start, line)
            start += len(line)


def _table_rows(file: str, key: str, keeps_nulls: bool) -> Rows:
    import pyarrow
    import pyarrow.parquet

    _check_file(file, key)
    is_arrow = file.endswith(".arrow")
    try:
        batches = _arrow_batches(file) if is_arrow else pyarrow.parquet.ParquetFile(file).iter_batches()
        slices = (batch.slice(start, _SLICE) for batch in batches for start in range(0, len(batch), _SLICE))
        rows = ((row, part.schema) for part in slices for row in part.to_pylist(maps_as_pydicts="lossy"))
        for number, (row, schema) in enumerate(rows, start=1):
            yield f"{file}, row {number}", row if keeps_nulls else _without_nulls(row, schema)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        kind = "an Arrow" if is_arrow else "a Parquet"
        raise UserError(f"{key}={file}: is not {kind} file ({first_line(error)})") from error


def _without_nulls(row: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return a row of a table whose structs lack the fields that are null. Its columns stay."""
    return row | {field.name: _plain(row[field.name], field.type) for field in schema if _is_nested(field.type)}


@functools.lru_cache(maxsize=1024)
def _is_nested(kind: Any) -> bool:
    """Return whether a type of Arrow has structs, or JSON, which tables have where the types of rows differ."""
    from pyarrow import types

    fields = (kind.field(i).type for i in range(kind.num_fields))
    return types.is_struct(kind) or _is_json(kind) or any(map(_is_nested, fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _plain(value: Any, kind: Any) -> Any:
    """Return a value of a type of Arrow: JSON as what it says, structs without the fields that are null."""
    from pyarrow import types

    if not _is_nested(kind):
        return value
    if isinstance(value, str) and _is_json(kind):
        return parse_json(value)
    if isinstance(value, dict) and types.is_struct(kind):
        fields = [(kind.field(i).name, kind.field(i).type) for i in range(kind.num_fields)]
        return {name: _plain(value[name], of) for name, of in fields if value[name] is not None}
    if isinstance(value, dict) and types.is_map(kind):
        return {key: _plain(one, kind.item_type) for key, one in value.items()}
    return [_plain(one, kind.field(0).type) for one in value] if isinstance(value, list) else value


def _arrow_batches(file: str) -> Iterator[Any]:
    """Yield the batches of a file in either format of Arrow: the one of files (Feather), and that of streams."""
    import pyarrow

    with pyarrow.memory_map(file) as source:
        if source.read(len(_ARROW_FILE)) != _ARROW_FILE:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)
            return
        reader = pyarrow.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            yield batch


def _hub_rows(url: str, key: str) -> Rows:
    import datasets
    import huggingface_hub

    address = urlsplit(url)
    options = dict(parse_qsl(address.query))
    unknown = options.keys() - {"config", "split", "revision"}
    if unknown:
        raise UserError(f"{key}={url}: takes config, split and revision, not {', '.join(sorted(unknown))}")
    name = f"{address.netloc}{address.path}".strip("/")
    commit = options.get("revision", pinned(f"hf://{name}"))
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise UserError(f"{key}={url}: revision must be a commit, of 40 hexadecimal digits")
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        if not offline:
            # Queried first, because `load_dataset` would retry for half a minute without a network.
            with_retries(lambda: huggingface_hub.HfApi().dataset_info(name, revision=commit, timeout=10))
        split = options.get("split", "train")
        dataset = datasets.load_dataset(name, options.get("config"), split=split, revision=commit)
    except Exception as error:  # each of the libraries below has its own error classes
        hint = "; with HF_HUB_OFFLINE=1 a copy in the cache is used" if is_connection_error(error) else ""
        at = f" at the commit {commit}" if commit is not None else ""
        raise UserError(f"{key}={url}: cannot be loaded from the Hub{at} ({first_line(error)}){hint}") from error
    # The name of the directory with its copy in the cache is its commit.
    folders = {os.path.basename(os.path.dirname(file["filename"])) for file in dataset.cache_files}
    loaded = folders.pop() if len(folders) == 1 and all(map(_COMMIT.fullmatch, folders)) else None
    if offline and commit not in (None, loaded):  # the library uses the newest copy in its cache, of any commit
        why = "the address names" if "revision" in options else "the run began with"
        raise UserError(
            f"{key}={url}: the newest copy in the cache is of the commit {loaded}, and {why} "
            f"{commit}; start without HF_HUB_OFFLINE, or remove the newer copy"
        )
    if loaded is not None and "revision" not in options:
        pin_data(f"hf://{name}", loaded)
    schema = dataset.features.arrow_schema
    for number, row in enumerate(dataset, start=1):
        yield f"{url}, row {number}", _without_nulls(row, schema)


def digest_rows(rows: Iterable[Mapping[str, Any]], *more: Any) -> str:
    """Return a digest of rows in their order. It is the same in every process.

    Rows are encoded as JSON with sorted keys, so the order of columns in a file does not matter. A missing column
    differs from a column with null.
    """
    digest = RowDigest(*more)
    for row in rows:
        digest.add(row)
    return digest.hexdigest()


class RowDigest:
    """The digest of rows that are added one after another (see `digest_rows`)."""

    def __init__(self, *more: Any):
        self._digest = xxhash.xxh3_128()
        self._encode = json.JSONEncoder(sort_keys=True, default=_as_text).encode
        if more:
            self.add(list(more))

    def add(self, row: Any) -> None:
        try:
            text = self._encode(row)
        except TypeError:  # keys of several types have no order
            text = self._encode(_with_text_keys(row))
        self._digest.update(f"{len(text)} ".encode())
        self._digest.update(text.encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(key).__name__} {key}": _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _as_text(value: Any) -> str:
    """Return a value that JSON does not support (times, decimals, arrays, images, of Parquet and the Hub) as text."""
    name = type(value).__name__
    if isinstance(value, (bytes, bytearray)):
        return f"{name} {xxhash.xxh3_128_hexdigest(value)}"
    if hasattr(value, "tobytes"):  # arrays and images, whose text contains an address or only a part of the content
        shape = getattr(value, "shape", getattr(value, "size", ""))
        return f"{name} {shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    return f"{name} {_ADDRESS.sub('', str(value))}"
