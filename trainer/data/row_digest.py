"""A digest of the complete content of a data set's rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_rows(rows: Iterable[Mapping[str, Any]], *more: Any) -> str:
    """Return a digest of rows in their order. It is the same in every process.

    Rows are encoded as JSON with sorted keys, so the order of columns in a file does not matter. A missing column
    differs from a column with null.

    Args:
        more: further values to include.
    """
    digest = xxhash.xxh3_128()
    encode = json.JSONEncoder(sort_keys=True, default=_as_text).encode
    for value in (list(more), *rows) if more else rows:
        try:
            text = encode(value)
        except TypeError:  # keys of several types have no order
            text = encode(_with_text_keys(value))
        digest.update(f"{len(text)} ".encode())
        digest.update(text.encode())
    return digest.hexdigest()


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
