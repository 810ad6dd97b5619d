"""Requests to S3, or to a store that speaks its protocol, through botocore.

Credentials, regions, endpoints, proxies and certificates come from where AWS's own tools read them: environment
variables, profiles, the role of the machine. The settings of fsspec for `s3` are read, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import botocore
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from trainer.checkpoint.object_storage import PART_BYTES, PreconditionFailed

_MOST_PARTS = 9000
"""Of the 10,000 parts that S3 allows for an object: later parts are larger."""


class S3Client:
    """Objects in S3 (see `ObjectStoreClient`)."""

    def __init__(self) -> None:
        import fsspec.config

        settings = fsspec.config.conf.get("s3", {})
        options: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 15, "max_pool_connections": 32}
        options |= settings.get("config_kwargs", {})
        if settings.get("anon"):
            options["signature_version"] = botocore.UNSIGNED
        # `ObjectStorage` sends a request again. botocore would draw its waits from the generator of user code.
        options["retries"] = {"mode": "standard", "total_max_attempts": 1}
        self.api = botocore.session.Session(profile=settings.get("profile")).create_client(
            "s3",
            **{
                "endpoint_url": settings.get("endpoint_url"),
                "aws_access_key_id": settings.get("key"),
                "aws_secret_access_key": settings.get("secret"),
                "aws_session_token": settings.get("token"),
                "use_ssl": settings.get("use_ssl", True),
                "config": Config(**options),
                **settings.get("client_kwargs", {}),
            },
        )

    def get(self, path: str, start: int | None, end: int | None) -> tuple[bytes, str]:
        span = {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
        answer = self.call("get_object", path, **span)
        with contextlib.closing(answer["Body"]) as body:
            return body.read(), answer["ETag"]

    def put(self, path: str, data: bytes) -> None:
        self.call("put_object", path, Body=data)

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        self.call("put_object", path, Body=data, **condition)

    def size(self, path: str) -> int:
        return self.call("head_object", path)["ContentLength"]

    def list(self, path: str) -> dict[str, int]:
        bucket = path.partition("/")[0]
        found = [entry for page in self._pages(path) for entry in page.get("Contents", [])]
        return {f"{bucket}/{entry['Key']}": entry["Size"] for entry in found if not entry["Key"].endswith("/")}

    def names(self, path: str) -> list[str]:
        pages = self._pages(path, Delimiter="/")
        folders = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return folders + [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def delete(self, path: str) -> None:
        self.call("delete_object", path)

    @contextlib.contextmanager
    def open_writer(self, path: str, send: Callable[[Callable[[], Any]], Any]) -> Iterator[_Upload]:
        upload = _Upload(self, path, send)
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def call(self, operation: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Send one request about an object."""
        bucket, _, key = path.partition("/")
        with _errors():
            return getattr(self.api, operation)(Bucket=bucket, Key=key, **arguments)

    def _pages(self, path: str, **options: str) -> list[dict[str, Any]]:
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        with _errors():
            return list(self.api.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **options))


class _Upload:
    """A large object that is sent in parts. A small one is sent with one put."""

    def __init__(self, client: S3Client, path: str, send: Callable[[Callable[[], Any]], Any]):
        self._client, self._path, self._send = client, path, send
        self._buffer = bytearray()
        self._sent = 0
        self._id = ""
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Any) -> None:
        self._buffer += data
        while len(self._buffer) >= (size := PART_BYTES * (1 + len(self._parts) // (_MOST_PARTS // 4))):
            self._send_part(bytes(self._buffer[:size]))
            del self._buffer[:size]

    def finish(self) -> None:
        if not self._id:
            return self._send(lambda: self._client.put(self._path, bytes(self._buffer)))
        if self._buffer:
            self._send_part(bytes(self._buffer))
        self._send(self._complete)

    def abort(self) -> None:
        """Forget the parts. Those that the store still has after an error cost money until its lifecycle rule acts."""
        if self._id:
            with contextlib.suppress(Exception):
                self._client.call("abort_multipart_upload", self._path, UploadId=self._id)

    def _send_part(self, data: bytes) -> None:
        call, number = self._client.call, len(self._parts) + 1
        self._id = self._id or self._send(lambda: call("create_multipart_upload", self._path))["UploadId"]
        part = {"PartNumber": number, "UploadId": self._id}
        sent = self._send(lambda: call("upload_part", self._path, Body=data, **part))
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})
        self._sent += len(data)

    def _complete(self) -> None:
        parts = {"Parts": self._parts}
        try:
            self._client.call("complete_multipart_upload", self._path, UploadId=self._id, MultipartUpload=parts)
        except FileNotFoundError:  # the answer to an earlier attempt was lost, unless the object is not there
            if self._client.size(self._path) != self._sent:
                raise


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise the errors of S3 that have a meaning for the caller as those of Python."""
    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status == 404:
            raise FileNotFoundError(str(error)) from error
        if status in (409, 412):
            raise PreconditionFailed from error
        if status in (401, 403):
            raise PermissionError(str(error)) from error
        raise
