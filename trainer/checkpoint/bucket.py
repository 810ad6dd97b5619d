"""Objects in S3 and Google Cloud Storage, through fsspec: read, write, list, and write on a condition.

Credentials, regions and endpoints are those that fsspec's users set: environment variables, profiles, fsspec's config.

A write on a condition happens only if the object is still as this process has seen it. Stores answer such a write for
one writer alone, so it is what commits a checkpoint and what takes a lock. A request that fails is sent again. Its
answer can be lost although it was done; then the second try is refused, and the object itself shows who wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import random
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from trainer.errors import UserError, one_line
from trainer.files.redaction import redact_text
from trainer.files.uris import SCHEMES

T = TypeVar("T")

_MAX_ATTEMPTS = 5
_TRIES_S = 60
"""No further try begins after this many seconds."""
_LONGEST_WAIT_S = 10
_JITTER = random.Random()
"""Of the waits between requests. Python's own generator belongs to user code, such as a loss, and its state to the
checkpoints: what user code draws must not depend on how often a request failed."""
_DRAWING = {
    "s3": ("aiohttp.connector", "botocore.retryhandler", "botocore.utils"),
    "gs": ("aiohttp.connector", "gcsfs.retry", "google.auth._exponential_backoff"),
}
"""Modules of the libraries that draw random numbers."""
_PART_BYTES = 16 << 20
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class StoreError(UserError, OSError):
    """The store does not answer, or refuses. This says nothing about whether an object is there, or is damaged."""


class Conflict(Exception):
    """The object is not as the condition of a write says."""


class Bucket:
    """The objects of one kind of store. A path is `bucket/key`.

    Every method raises FileNotFoundError if the object to read is missing, and StoreError if the store fails.
    """

    def __init__(self, fs: Any):
        self.fs = fs

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of an object, or its bytes from `start` to before `end`."""
        return self._try(lambda: self.fs.cat_file(path, start=start, end=end))

    def write(self, path: str, data: bytes) -> None:
        """Put an object, whole or not at all."""
        self._try(lambda: self.fs.pipe_file(path, data))

    def create(self, path: str, data: bytes) -> bool:
        """Put an object if there is none; return whether `data` is the object now."""
        return self._put_if(path, data, None)

    def replace(self, path: str, data: bytes, tag: str) -> bool:
        """Put an object if the present one has this tag; return whether `data` is the object now."""
        return self._put_if(path, data, tag)

    def read_tagged(self, path: str) -> tuple[bytes, str]:
        """Return the content of an object, and a tag that changes with every write."""
        return self._try(lambda: self._read_tagged(path))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return self._try(lambda: self._size(path))

    def exists(self, path: str) -> bool:
        """Return whether there is an object."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._try(lambda: self.fs.rm_file(path))

    def list(self, path: str) -> dict[str, int]:
        """Return the sizes of the objects below a prefix, by path. A store may answer with an older state."""

        def find() -> dict[str, int]:
            self.fs.invalidate_cache()
            return {name: entry["size"] for name, entry in self.fs.find(f"{path}/", detail=True).items()}

        with contextlib.suppress(FileNotFoundError):
            return self._try(find)
        return {}

    def names(self, path: str) -> list[str]:
        """Return the names of objects and folders directly below a prefix. A store may answer with an older state."""

        def find() -> list[str]:
            self.fs.invalidate_cache()
            return sorted({name.rstrip("/").rpartition("/")[2] for name in self.fs.ls(f"{path}/", detail=False)})

        with contextlib.suppress(FileNotFoundError):
            return self._try(find)
        return []

    @contextlib.contextmanager
    def open_for_writing(self, path: str) -> Iterator[IO[bytes]]:
        """Write a large object in parts. Without an error in the block the object is there after it."""
        with in_words(), self.fs.open(path, "wb", block_size=_PART_BYTES) as stream:
            yield stream

    def _put_if(self, path: str, data: bytes, tag: str | None) -> bool:
        try:
            self._try(lambda: self._put_on_condition(path, data, tag))
        except (Conflict, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and tag is None:
                raise StoreError(f"there is no bucket {path.partition('/')[0]}") from error
            with contextlib.suppress(FileNotFoundError):
                return self.read(path) == data  # the answer to an earlier try was lost
            return False
        return True

    def _try(self, request: Callable[[], T]) -> T:
        """Send a request, again if it fails in a way that may pass."""
        import tenacity  # slow to import

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_MAX_ATTEMPTS) | tenacity.stop_after_delay(_TRIES_S),
            wait=lambda tries: _JITTER.uniform(0, min(0.2 * 2 ** (tries.attempt_number - 1), _LONGEST_WAIT_S)),
            reraise=True,
        )
        with in_words():
            return retrying(request)

    def _read_tagged(self, path: str) -> tuple[bytes, str]:
        raise NotImplementedError

    def _size(self, path: str) -> int:
        raise NotImplementedError

    def _put_on_condition(self, path: str, data: bytes, tag: str | None) -> None:
        """Put an object if the present one has the tag (None: if there is none).

        Raises:
            Conflict: the condition does not hold.
        """
        raise NotImplementedError


class S3Bucket(Bucket):
    """Objects in S3, or in a store that speaks its protocol."""

    def _read_tagged(self, path: str) -> tuple[bytes, str]:
        from fsspec.asyn import sync

        async def read() -> tuple[bytes, str]:
            answer = await self.fs._call_s3("get_object", **self._place(path))
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        return sync(self.fs.loop, read)

    def _size(self, path: str) -> int:
        return self.fs.call_s3("head_object", **self._place(path))["ContentLength"]

    def _put_on_condition(self, path: str, data: bytes, tag: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            self.fs.call_s3("put_object", Body=data, **self._place(path), **condition)
        except FileExistsError as error:
            raise Conflict from error
        except OSError as error:
            answer = getattr(error.__cause__, "response", {})
            if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412):
                raise Conflict from error
            raise

    @staticmethod
    def _place(path: str) -> dict[str, str]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}


class GoogleBucket(Bucket):
    """Objects in Google Cloud Storage. The tag of an object is its generation."""

    def _read_tagged(self, path: str) -> tuple[bytes, str]:
        headers, data = self.fs.call("GET", self.fs.url(path))
        return data, headers["X-Goog-Generation"]

    def _size(self, path: str) -> int:
        bucket, _, key = path.partition("/")
        return int(self.fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)["size"])

    def _put_on_condition(self, path: str, data: bytes, tag: str | None) -> None:
        bucket, _, key = path.partition("/")
        boundary = b"--==0=="
        head = b"\nContent-Type: application/json; charset=UTF-8\n\n" + json.dumps({"name": key}).encode()
        body = boundary + head + b"\n" + boundary + b"\nContent-Type: application/octet-stream\n\n" + data
        try:
            self.fs.call(
                "POST",
                f"{self.fs._location}/upload/storage/v1/b/{bucket}/o",
                uploadType="multipart",
                headers={"Content-Type": 'multipart/related; boundary="==0=="'},
                data=body + b"\n" + boundary + b"--",
                ifGenerationMatch=tag or "0",
            )
        except Exception as error:
            if isinstance(error, FileExistsError) or getattr(error, "code", None) in (409, 412):
                raise Conflict from error
            raise


_KINDS: dict[str, type[Bucket]] = {"s3": S3Bucket, "gs": GoogleBucket}


@functools.cache
def bucket_of(scheme: str) -> Bucket:
    """Return the objects of the stores with this URL scheme.

    Raises:
        UserError: the package for these stores is not installed.
    """
    import fsspec

    try:
        fs = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        extra = SCHEMES[scheme]
        raise UserError(
            f"{scheme}:// needs a package that is not installed ({one_line(str(error))}); install the extra `{extra}`: "
            f"pip install 'trainer[{extra}]'"
        ) from error
    fs.retries = 1  # of s3fs; `Bucket` sends a request again, and so does botocore
    _give_own_generator(scheme)
    return _KINDS[scheme](fs)


def _give_own_generator(scheme: str) -> None:
    """Let the libraries of a store draw from `_JITTER`, which has the functions of the module `random`."""
    for name in _DRAWING[scheme]:
        importlib.import_module(name).random = _JITTER  # type: ignore[attr-defined]
    if scheme == "s3":
        from botocore.retries.standard import ExponentialBackoff

        begin: Any = ExponentialBackoff.__init__
        begin.__defaults__ = tuple(_JITTER.random if one == random.random else one for one in begin.__defaults__)


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Raise what the libraries of the stores raise as StoreError, in one line and without secrets."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, Conflict, UserError):
        raise
    except Exception as error:
        text = redact_text(f"{type(error).__name__}: {error}")
        raise StoreError(f"the object store fails ({one_line(text)})") from error


def _may_pass(error: BaseException) -> bool:
    return (
        isinstance(error, Exception)
        and not isinstance(error, (*_FINAL, Conflict))
        and "Credential" not in type(error).__name__
    )
