"""A kind of object store that this project does not know: the objects are in memory, and each has a number."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.checkpoint.buckets import PreconditionFailed, client_of
from trainer.files import uris
from trainer.files.uris import StoreSpec


def use_another_store(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Install a package with `mem://`, in `directory`. It takes the class below, and one entry."""
    info = directory / "another_store-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trainer.object_stores]\nmem = {__name__}:STORE\n")
    patch.syspath_prepend(str(directory))
    patch.setattr(uris, "_installed_store", functools.cache(uris._installed_store.__wrapped__))
    client_of.cache_clear()


STORE = StoreSpec(
    f"{__name__}:MemoryClient",
    variables=("MEM_",),
    identity=("MEM_KEY",),
    drawing=(__name__,),
)


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
        random.random()  # as clients that wait do
        return len(self._found(path)[0])

    def list(self, path: str) -> dict[str, int]:
        return {name: len(data) for name, (data, _) in list(self._objects.items()) if name.startswith(f"{path}/")}

    def names(self, path: str) -> list[str]:
        return [f"{path}/{name.removeprefix(f'{path}/').partition('/')[0]}" for name in self.list(path)]

    def delete(self, path: str) -> None:
        self._objects.pop(path, None)

    @contextlib.contextmanager
    def open_writer(self, path: str) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        self.put(path, stream.getvalue())
