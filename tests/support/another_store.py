"""A kind of object store that this project does not know: the objects are in memory, and each has a number."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainer.checkpoint.object_storage import PreconditionFailed, client_of
from trainer.files.uris import SCHEMES


def use_another_store(patch: pytest.MonkeyPatch) -> None:
    """Make `mem://` known in this process. It takes the class below, and one entry."""
    patch.setitem(SCHEMES, "mem", ("mem", __name__, "MemoryClient"))
    client_of.cache_clear()


class MemoryClient:
    """All that a new kind of store needs (see `ObjectStoreClient`)."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def _found(self, path: str) -> tuple[bytes, int]:
        try:
            return self._objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]:
        data, number = self._found(path)
        return data[start:end], str(number)

    def put(self, path: str, data: bytes) -> None:
        self._objects[path] = (bytes(data), next(self._numbers))

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
        with self._lock:
            present = self._objects.get(path)
            if (present and str(present[1])) != etag:
                raise PreconditionFailed
            self.put(path, data)

    def size(self, path: str) -> int:
        return len(self._found(path)[0])

    def list(self, path: str) -> dict[str, int]:
        return {name: len(data) for name, (data, _) in list(self._objects.items()) if name.startswith(f"{path}/")}

    def names(self, path: str) -> list[str]:
        return [f"{path}/{name.removeprefix(f'{path}/').partition('/')[0]}" for name in self.list(path)]

    def delete(self, path: str) -> None:
        self._objects.pop(path, None)

    @contextlib.contextmanager
    def open_writer(self, path: str, send: Callable[..., Any]) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        self.put(path, stream.getvalue())
