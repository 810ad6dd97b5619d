"""Which files are opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RECORDS: list[list[str]] = []
_hooked = False


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Record the name, without folders, of every file that this process opens while the block runs."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_on_event)  # it stays for the life of the process
        _hooked = True
    names: list[str] = []
    _RECORDS.append(names)
    try:
        yield names
    finally:
        _RECORDS.pop()


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _RECORDS and isinstance(arguments[0], str):
        name = os.path.basename(arguments[0])
        for names in list(_RECORDS):
            names.append(name)
