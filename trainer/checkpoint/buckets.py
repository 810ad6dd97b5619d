"""A prefix in an object store, with the operations of `Storage`.

A client sends requests to one kind of store, and sends those again that fail in a way that may pass. The answer to a
write on a condition can be lost although the write was done; then the second attempt is refused, and the object itself
shows who wrote it.

S3 is reached through obstore, Google Cloud Storage through gcsfs. Both find credentials, endpoints and regions where
the tools of the stores do. obstore speaks to Google, too, but in its XML interface, for which there is no server to
test against.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import posixpath
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Protocol

from trainer.checkpoint.storage import Storage, StoreError, for_each
from trainer.errors import UserError, one_line
from trainer.files.uris import StoreSpec, split_http_url, store_spec
from trainer.process import time_limits

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_GENERATOR = random.Random()
"""Of the waits between requests. Python's own generator belongs to user code, such as a loss, and its state to the
checkpoints: what user code draws must not depend on how often a request failed."""

MAX_ATTEMPTS = 5
_PART_BYTES = 16 << 20
"""The bytes of a large object that one request sends. S3 allows 10,000 parts: 160 GB a file."""
_LONGEST_ANSWER = 20_000  # characters of an error of a store in which its cause is looked for
_PARTS_AT_ONCE = 4


class PreconditionFailed(Exception):
    """The object is not as the condition of a write says."""


class ObjectStoreClient(Protocol):
    """Requests to one kind of object store. A path is `bucket/key`.

    A request to read raises FileNotFoundError if the object is missing. `put_if` puts an object if the present one has
    this etag (None: if there is none); else, or if this write has been done and its answer was lost, it raises
    PreconditionFailed. Every other exception means that the store or the network fails.
    """

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]: ...  # all or a range; the etag
    def put(self, path: str, data: bytes) -> None: ...
    def put_if(self, path: str, data: bytes, etag: str | None) -> None: ...
    def size(self, path: str) -> int: ...
    def list(self, path: str) -> dict[str, int]: ...  # sizes of the objects below a prefix, by path
    def names(self, path: str) -> list[str]: ...  # paths of objects and folders directly below a prefix
    def delete(self, path: str) -> None: ...
    def open_writer(self, path: str) -> contextlib.AbstractContextManager[Any]: ...

    # Writes a large object in parts. After a block without an error the object is there; else it is not.


@functools.cache
def client_of(scheme: str) -> ObjectStoreClient:
    """Return the client of the stores with this URL scheme. Raises UserError: the package for them is not installed."""
    spec: StoreSpec | None = store_spec(f"{scheme}://")
    assert spec is not None, f"{scheme}:// was accepted"
    module, _, name = spec.path.partition(":")
    try:
        client = getattr(importlib.import_module(module), name)
        for drawing in spec.drawing:
            importlib.import_module(drawing).random = _GENERATOR  # type: ignore[attr-defined]
        return client()
    except ImportError as error:
        remedy = f"; install the extra `{spec.extra}` (docs/install.md)" if spec.extra else ""
        raise UserError(
            f"{scheme}:// needs a package that is not installed ({one_line(str(error))}){remedy}"
        ) from error


class ObjectStorage(Storage):
    """The objects below a URL. Every method raises StoreError if the store fails."""

    def __init__(self, root: str):
        super().__init__(root.rstrip("/"))
        self._scheme, _, self._path = self.root.partition("://")

    @property
    def client(self) -> ObjectStoreClient:
        """The client of this kind of store."""
        return client_of(self._scheme)

    def path(self, key: str) -> str:
        """Return the path of a key, as the client takes it."""
        return posixpath.join(self._path, key).rstrip("/")

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        with _named_errors():
            return self.client.get(self.path(key), None, None)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with _named_errors():
            data = self.client.get(self.path(key), start, end)[0]
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{key} ends after {start + len(data)} bytes")
        return data

    def put(self, key: str, data: bytes) -> None:
        with _named_errors():
            self.client.put(self.path(key), data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> bool:
        """Put an object if the present one has this etag; return whether `data` is the object now."""
        try:
            with _named_errors():
                self.client.put_if(self.path(key), data, etag)
        except (PreconditionFailed, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and etag is None:
                raise StoreError(f"there is no bucket {self._path.partition('/')[0]}") from error
            with contextlib.suppress(FileNotFoundError):
                return self.get(key) == data  # the answer to an earlier attempt was lost
            return False
        return True

    @contextlib.contextmanager
    def open_stream(self, key: str) -> Iterator[IO[bytes]]:
        with _named_errors(), self.client.open_writer(self.path(key)) as stream:
            yield stream

    def size(self, key: str) -> int:
        with _named_errors():
            return self.client.size(self.path(key))

    def list(self, prefix: str = "") -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError), _named_errors():
            found = self.client.list(self.path(prefix))
            return {path.removeprefix(f"{self._path}/"): size for path, size in sorted(found.items())}
        return {}

    def names(self, prefix: str = "") -> list[str]:
        with contextlib.suppress(FileNotFoundError), _named_errors():
            return sorted({path.rstrip("/").rpartition("/")[2] for path in self.client.names(self.path(prefix))})
        return []

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), _named_errors():
            self.client.delete(self.path(key))

    def delete_below(self, prefix: str) -> None:
        for_each(self.delete, self.list(prefix))


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Raise what the clients raise as StoreError, in one line and without secrets."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, PreconditionFailed, UserError):
        raise
    except Exception as error:
        raise StoreError(f"the object store fails ({type(error).__name__}: {_reason(str(error))})") from error


def _reason(text: str) -> str:
    """Return the cause that a message of a client names, without a password in a URL.

    Of the body of an answer it is the store's own message: other fields may repeat the request, with its credentials.
    """
    summary, _, details = (part[:_LONGEST_ANSWER] for part in text.partition("\n\nDebug source:"))
    cause = re.search(r"<Message>([^<]*+)</Message>", summary) or re.search(r'\bmessage: "([^"\n]*+)"', details)
    summary = re.sub(r"^Generic \w+ error: ", "", re.split(r"<\?xml|<Error>", summary)[0].rstrip(": \n"))
    summary = re.sub(r" in [\d.]++\w++(, after \d+ retries, max_retries: \d+, retry_timeout: \w+ )?", "", summary)
    return one_line(re.sub(r"//[^/\s@]*@", "//…@", f"{cause[1]}: {summary}" if cause else summary))


def request_options(**options: Any) -> dict[str, Any]:
    """Return what a store of obstore is opened with: how long a request may take, and when it is sent again. `options`:
    further options of the connections (see `obstore.store.ClientConfig`)."""
    longest = timedelta(seconds=time_limits.STORAGE_LONGEST_BACKOFF_S)
    times = {"connect_timeout": timedelta(seconds=5), "read_timeout": timedelta(seconds=60)}
    return {
        "client_options": {**times, "timeout": timedelta(minutes=5), **options},
        "retry_config": {
            "max_retries": MAX_ATTEMPTS - 1,
            "retry_timeout": timedelta(seconds=time_limits.STORAGE_RETRY_S),
            "backoff": {"init_backoff": min(timedelta(seconds=0.1), longest), "max_backoff": longest, "base": 2},
        },
    }


class ObstoreClient:
    """Objects in a kind of store that obstore knows (see `ObjectStoreClient`)."""

    def __init__(self) -> None:
        self._buckets: dict[str, ObjectStore] = {}

    def open(self, bucket: str) -> ObjectStore:
        """Return obstore's store of a bucket (see `request_options`)."""
        raise NotImplementedError

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]:
        store, key = self._at(path)
        answer = store.get(key, options=None if start is None or end is None else {"range": (start, end)})
        return bytes(answer.bytes()), answer.meta["e_tag"] or ""

    def put(self, path: str, data: bytes) -> None:
        store, key = self._at(path)
        store.put(key, data, use_multipart=False)

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        store, key = self._at(path)
        try:
            store.put(key, data, mode="create" if etag is None else {"e_tag": etag}, use_multipart=False)
        except (AlreadyExistsError, PreconditionError) as error:
            raise PreconditionFailed from error

    def size(self, path: str) -> int:
        store, key = self._at(path)
        return store.head(key)["size"]

    def list(self, path: str) -> dict[str, int]:
        store, key = self._at(path)
        bucket = path.partition("/")[0]
        return {f"{bucket}/{found['path']}": found["size"] for some in store.list(key) for found in some}

    def names(self, path: str) -> list[str]:
        store, key = self._at(path)
        found = store.list_with_delimiter(key)
        return [*found["common_prefixes"], *(one["path"] for one in found["objects"])]

    def delete(self, path: str) -> None:
        store, key = self._at(path)
        store.delete(key)

    @contextlib.contextmanager
    def open_writer(self, path: str) -> Iterator[Any]:
        import obstore

        store, key = self._at(path)
        with obstore.open_writer(store, key, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE) as stream:
            # It sends later what it is given and copies nothing, and callers use their memory again.
            yield SimpleNamespace(write=lambda data: stream.write(bytes(data)))

    def _at(self, path: str) -> tuple[ObjectStore, str]:
        bucket, _, key = path.partition("/")
        if bucket not in self._buckets:
            self._buckets[bucket] = self.open(bucket)
        return self._buckets[bucket], key


class S3Client(ObstoreClient):
    """Objects in S3, or in a store that speaks its protocol."""

    def __init__(self) -> None:
        super().__init__()
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = boto3.Session()
        if session.get_credentials() is None:
            raise StoreError("no credentials for S3 are where AWS's own tools look for them")
        self.api = session.client("s3")  # botocore's client: its endpoint and its region are used
        self._credentials = Boto3CredentialProvider(session)

    def open(self, bucket: str) -> ObjectStore:
        from obstore.store import S3Store

        endpoint, options = self.api.meta.endpoint_url, {}
        if split_http_url(endpoint) is None:
            raise ValueError("the endpoint of S3 is no address of an HTTP server")
        if endpoint.startswith("http://"):
            options["allow_http"] = True
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            try:
                with open(bundle, "rb") as file:
                    options["root_certificate"] = file.read()
            except OSError as error:  # it must not look like a missing object
                raise StoreError(f"AWS_CA_BUNDLE={bundle}: {error.strerror}") from error
        region = self.api.meta.region_name
        return S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1" if region == "aws-global" else region,  # no region is configured
            credential_provider=self._credentials,
            **request_options(**options),
        )


class GoogleClient:
    """Objects in Google Cloud Storage. The etag of an object is its generation."""

    def __init__(self) -> None:
        import fsspec

        self.fs: Any = fsspec.filesystem("gs", use_listings_cache=False)

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]:
        span = {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
        headers, data = self.fs.call("GET", self.fs.url(path), headers=span)
        return data, headers["X-Goog-Generation"]

    def put(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(path, data)

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
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
                ifGenerationMatch=etag or "0",
            )
        except Exception as error:
            if isinstance(error, FileExistsError) or getattr(error, "code", None) in (409, 412):
                raise PreconditionFailed from error
            raise

    def size(self, path: str) -> int:
        bucket, _, key = path.partition("/")
        return int(self.fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)["size"])

    def list(self, path: str) -> dict[str, int]:
        self.fs.invalidate_cache()
        return {name: entry["size"] for name, entry in self.fs.find(f"{path}/", detail=True).items()}

    def names(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        return self.fs.ls(f"{path}/", detail=False)

    def delete(self, path: str) -> None:
        self.fs.rm_file(path)

    def open_writer(self, path: str) -> contextlib.AbstractContextManager[Any]:
        return self.fs.open(path, "wb", block_size=_PART_BYTES)
