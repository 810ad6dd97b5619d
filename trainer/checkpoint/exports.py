"""Exports at a path or a URL. An export at a URL is made in a local directory first, and put there file by file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.checkpoint.object_store import ObjectFiles
from trainer.places import absolute, is_url

_LAST = ("config.json", "adapter_config.json")
"""No model can be loaded without one of these files. They are put last, so an export is whole where one is there."""
_PARALLEL = 8
_CHUNK_BYTES = 8 << 20


def is_exported(target: str) -> bool:
    """Return whether there is a whole export at a path or URL."""
    if not is_url(target):
        return os.path.exists(target)
    files = ObjectFiles(absolute(target))
    return any(files.bucket.exists(files.place(name)) for name in _LAST)


@contextlib.contextmanager
def place_for(target: str, scratch: str | None = None) -> Iterator[str]:
    """Give the block a local path to export to: `target`, or a place whose content is then put at the URL `target`.

    Args:
        scratch: the directory for that place, which all ranks see; None: that of temporary files.
    """
    if not is_url(target):
        yield target
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".export-") as folder:
        made = os.path.join(folder, "export")
        yield made
        files = ObjectFiles(absolute(target))
        paths = [path.relative_to(made).as_posix() for path in sorted(Path(made).rglob("*")) if path.is_file()]
        for name in _LAST:
            files.bucket.delete(files.place(name))  # of an earlier export, which is replaced
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(lambda path: _put(made, path, files), [p for p in paths if p not in _LAST]):
                pass
        for path in _LAST:
            if path in paths:
                _put(made, path, files)


def _put(folder: str, path: str, files: ObjectFiles) -> None:
    with open(os.path.join(folder, path), "rb") as source, files.stream(path) as stream:
        while chunk := source.read(_CHUNK_BYTES):
            stream.write(chunk)
