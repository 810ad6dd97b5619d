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

from trainer.checkpoint.object_storage import PART_BYTES, PreconditionFailed, use_own_generator

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
        use_own_generator("botocore.utils")
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
        with _errors(), contextlib.closing((answer := self.api.get_object(**_address(path), **span))["Body"]) as body:
            return body.read(), answer["ETag"]

    def put(self, path: str, data: bytes) -> None:
        with _errors():
            self.api.put_object(Body=data, **_address(path))

    def put_if(self, path: str, data: bytes, etag: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with _errors():
            self.api.put_object(Body=data, **_address(path), **condition)

    def size(self, path: str) -> int:
        with _errors():
            return self.api.head_object(**_address(path))["ContentLength"]

    def list(self, path: str) -> dict[str, int]:
        return {
            f"{path.partition('/')[0]}/{entry['Key']}": entry["Size"]
            for page in self._pages(path)
            for entry in page.get("Contents", [])
            if not entry["Key"].endswith("/")
        }

    def names(self, path: str) -> list[str]:
        pages = self._pages(path, Delimiter="/")
        folders = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return folders + [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def delete(self, path: str) -> None:
        with _errors():
            self.api.delete_object(**_address(path))

    @contextlib.contextmanager
    def open_writer(self, path: str, send: Callable[[Callable[[], Any]], Any]) -> Iterator[_Upload]:
        upload = _Upload(self, path, send)
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def _pages(self, path: str, **options: str) -> list[dict[str, Any]]:
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        with _errors():
            return list(self.api.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **options))


class _Upload:
    """A large object that is sent in parts. A small one is sent with one put."""

    def __init__(self, client: S3Client, path: str, send: Callable[[Callable[[], Any]], Any]):
        self._client, self._path, self._address, self._send = client, path, _address(path), send
        self._buffer = bytearray()
        self._sent = 0
        self._upload: dict[str, str] = {}
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Any) -> None:
        self._buffer += data
        while len(self._buffer) >= (size := PART_BYTES * (1 + len(self._parts) // (_MOST_PARTS // 4))):
            self._send_part(bytes(self._buffer[:size]))
            del self._buffer[:size]

    def finish(self) -> None:
        if not self._upload:
            return self._send(lambda: self._client.put(self._path, bytes(self._buffer)))
        if self._buffer:
            self._send_part(bytes(self._buffer))
        self._send(self._complete)

    def abort(self) -> None:
        """Forget the parts. Those that the store still has after an error cost money until its lifecycle rule acts."""
        if self._upload:
            with contextlib.suppress(Exception):
                self._client.api.abort_multipart_upload(**self._upload)

    def _send_part(self, data: bytes) -> None:
        api, number = self._client.api, len(self._parts) + 1
        if not self._upload:
            begun = self._send(lambda: _translated(api.create_multipart_upload, **self._address))
            self._upload = {**self._address, "UploadId": begun["UploadId"]}
        put = self._send(lambda: _translated(api.upload_part, Body=data, PartNumber=number, **self._upload))
        self._parts.append({"PartNumber": number, "ETag": put["ETag"]})
        self._sent += len(data)

    def _complete(self) -> None:
        try:
            _translated(
                self._client.api.complete_multipart_upload, MultipartUpload={"Parts": self._parts}, **self._upload
            )
        except FileNotFoundError:  # the answer to an earlier attempt was lost, unless the object is not there
            if self._client.size(self._path) != self._sent:
                raise


def _address(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _translated(call: Callable[..., Any], **arguments: Any) -> Any:
    with _errors():
        return call(**arguments)


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
