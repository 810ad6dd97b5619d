"""A prefix in an object store, with the operations of `Storage`.

A client sends single requests to one kind of store. This module adds what all kinds need. A request that fails is sent
again. The answer to a write on a condition can be lost although the write was done; then the second attempt is refused,
and the object itself shows who wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import posixpath
import random
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol, TypeVar

from trainer.checkpoint.storage import StoreError, for_each
from trainer.errors import UserError, one_line
from trainer.files.redaction import redact_text
from trainer.files.uris import StoreSpec, store_spec
from trainer.process import time_limits

T = TypeVar("T")

_MAX_ATTEMPTS = 5
PART_BYTES = 16 << 20
"""The bytes of a large object that one request sends."""
_JITTER = random.Random()
"""Of the waits between requests. Python's own generator belongs to user code, such as a loss, and its state to the
checkpoints: what user code draws must not depend on how often a request failed."""
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class PreconditionFailed(Exception):
    """The object is not as the condition of a write says."""


class ObjectStoreClient(Protocol):
    """Single requests to one kind of object store. A path is `bucket/key`.

    A request to read raises FileNotFoundError if the object is missing. Every other exception means that the store or
    the network fails.
    """

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]:
        """Return the content of an object, or its bytes from `start` to before `end`; and its etag."""
        ...

    def put(self, path: str, data: bytes) -> None: ...

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
        """Put an object if the present one has this etag; None: if there is none.

        Raises:
            PreconditionFailed: the condition does not hold.
        """
        ...

    def size(self, path: str) -> int: ...

    def list(self, path: str) -> dict[str, int]:
        """Return the sizes of the objects below a prefix, by path. The store may answer with an older state."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the paths of objects and folders directly below a prefix."""
        ...

    def delete(self, path: str) -> None: ...

    def open_writer(self, path: str, send: Callable[[Callable[[], T]], T]) -> contextlib.AbstractContextManager[Any]:
        """Write a large object in parts; after a block without an error, the object is there.

        Args:
            send: sends one request, again if it fails in a way that may pass.
        """
        ...


@functools.cache
def client_of(scheme: str) -> ObjectStoreClient:
    """Return the client of the stores with this URL scheme.

    Raises:
        UserError: the package for these stores is not installed.
    """
    spec = _spec_of(scheme)
    module, _, name = spec.path.partition(":")
    try:
        client = getattr(importlib.import_module(module), name)
        for drawing in spec.drawing:
            importlib.import_module(drawing).random = _JITTER  # type: ignore[attr-defined]
        return client()
    except ImportError as error:
        remedy = f"; install the extra `{spec.extra}` (docs/install.md)" if spec.extra else ""
        raise UserError(
            f"{scheme}:// needs a package that is not installed ({one_line(str(error))}){remedy}"
        ) from error


def _spec_of(scheme: str) -> StoreSpec:
    spec = store_spec(f"{scheme}://")
    assert spec is not None, f"{scheme}:// was accepted"
    return spec


class ObjectStorage:
    """The objects below a URL. Every method raises StoreError if the store fails."""

    disk = None

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self._scheme, _, self._path = self.root.partition("://")

    def exists(self) -> bool:
        """Return True: a prefix needs no directory."""
        return True

    def make(self) -> None:
        """Do nothing: a prefix needs no directory."""

    @property
    def client(self) -> ObjectStoreClient:
        """The client of this kind of store."""
        return client_of(self._scheme)

    def path(self, key: str) -> str:
        """Return the path of a key, as the client takes it."""
        return posixpath.join(self._path, key).rstrip("/")

    def get(self, key: str) -> bytes:
        """Return the content of an object."""
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the content of an object, and a tag that changes with every write."""
        return self._send(lambda: self.client.get(self.path(key), None, None))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to before `end`."""
        data = self._send(lambda: self.client.get(self.path(key), start, end))[0]
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{key} ends after {start + len(data)} bytes")
        return data

    def put(self, key: str, data: bytes) -> None:
        """Put an object, whole or not at all."""
        self._send(lambda: self.client.put(self.path(key), data))

    def put_if(self, key: str, data: bytes, etag: str | None) -> bool:
        """Put an object if the present one has this etag (None: if there is none).

        Returns:
            whether `data` is the object now.
        """
        try:
            self._send(lambda: self.client.put_if(self.path(key), data, etag))
        except (PreconditionFailed, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and etag is None:
                raise StoreError(f"there is no bucket {self._path.partition('/')[0]}") from error
            with contextlib.suppress(FileNotFoundError):
                return self.get(key) == data  # the answer to an earlier attempt was lost
            return False
        return True

    def delete_if_match(self, key: str, etag: str) -> bool:
        """Return False: not every store knows a delete on a condition."""
        return False

    @contextlib.contextmanager
    def open_writer(self, key: str) -> Iterator[IO[bytes]]:
        """Write a large object in parts. After a block without an error the object is there."""
        with _named_errors(), self.client.open_writer(self.path(key), self._send) as stream:
            yield stream

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self._send(lambda: self.client.size(self.path(key)))

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of the objects below a prefix, by key. The store may answer with an older state."""
        with contextlib.suppress(FileNotFoundError):
            found = self._send(lambda: self.client.list(self.path(prefix)))
            return {path.removeprefix(f"{self._path}/"): size for path, size in sorted(found.items())}
        return {}

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of objects and folders directly below a prefix. The store may answer with an older state."""
        with contextlib.suppress(FileNotFoundError):
            found = self._send(lambda: self.client.names(self.path(prefix)))
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})
        return []

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._send(lambda: self.client.delete(self.path(key)))

    def delete_below(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        for_each(self.delete, self.list(prefix))

    def _may_pass(self, error: BaseException) -> bool:
        if not isinstance(error, Exception) or isinstance(error, (*_FINAL, PreconditionFailed, UserError)):
            return False
        return not any(name in type(error).__name__ for name in _spec_of(self._scheme).final_errors)

    def _send(self, request: Callable[[], T]) -> T:
        """Send a request, again if it fails in a way that may pass."""
        import tenacity  # slow to import

        longest_s = time_limits.STORAGE_LONGEST_BACKOFF_S
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._may_pass),
            stop=tenacity.stop_after_attempt(_MAX_ATTEMPTS) | tenacity.stop_after_delay(time_limits.STORAGE_RETRY_S),
            wait=lambda tries: _JITTER.uniform(0, min(0.1 * 2**tries.attempt_number, longest_s)),
            reraise=True,
        )
        with _named_errors():
            return retrying(request)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Raise what the clients raise as StoreError, in one line and without secrets."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, PreconditionFailed, UserError):
        raise
    except Exception as error:
        text = redact_text(f"{type(error).__name__}: {error}")
        raise StoreError(f"the object store fails ({one_line(text)})") from error
