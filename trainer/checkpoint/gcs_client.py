"""Requests to Google Cloud Storage, through gcsfs, which finds credentials and endpoints as Google's own tools do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from trainer.checkpoint.object_storage import PART_BYTES, PreconditionFailed


class GoogleClient:
    """Objects in Google Cloud Storage (see `ObjectStoreClient`). The etag of an object is its generation."""

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

    def open_writer(self, path: str, send: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
        return self.fs.open(path, "wb", block_size=PART_BYTES)
