"""Exports at a path or a URL. An export at a URL is made in a local directory first, and put there file by file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.checkpoint.object_store import ObjectFiles
from trainer.files.uris import absolute, is_url

_LAST = ("config.json", "adapter_config.json")
"""No model can be loaded without one of these files. They are put last, so an export is whole where one is there."""
_PARALLEL = 8


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
            first = [path for path in paths if path not in _LAST]
            for _ in pool.map(lambda path: files.upload(os.path.join(made, path), path), first):
                pass
        for path in _LAST:
            if path in paths:
                files.upload(os.path.join(made, path), path)
