"""A small server of Google Cloud Storage's JSON interface, for tests: objects in memory, with generations.

The emulators on PyPI do not know the conditions (`ifGenerationMatch`) that commits and locks rest on.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
import pytest

from trainer.checkpoint.buckets import client_of


def use_gcs(patch: pytest.MonkeyPatch, url: str) -> None:
    """Point this process, and its children, at a server."""
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks for the kind of a bucket over gRPC
    import gcsfs
    from fsspec.config import conf

    settings = {"endpoint_url": url, "token": "anon"}
    for name in ("gs", "gcs"):
        patch.setitem(conf, name, settings)
        patch.setenv(f"FSSPEC_{name.upper()}", json.dumps(settings))
    client_of.cache_clear()
    gcsfs.GCSFileSystem.clear_instance_cache()


@contextlib.contextmanager
def gcs_server() -> Iterator[str]:
    """Run the server; yields its URL. Every bucket exists."""
    objects: dict[tuple[str, str], tuple[bytes, int]] = {}
    uploads: dict[str, tuple[str, str, bytearray]] = {}
    generations, lock = itertools.count(1), threading.RLock()

    def described(bucket: str, name: str) -> dict:
        data, generation = objects[bucket, name]
        crc = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "size": str(len(data)),
            "generation": str(generation),
            "crc32c": crc,
        }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            url = urlsplit(self.path)
            asked = {name: values[0] for name, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                upload = re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", url.path)
                one = re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)", url.path)
                many = re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", url.path)
                if upload:
                    self._upload(unquote(upload[1]), asked, body)
                elif one:
                    self._object(unquote(one[1]), unquote(one[2]), asked)
                elif many and self.command == "GET":
                    self._list(unquote(many[1]), asked)
                else:
                    self._answer(404, {"error": {"code": 404, "message": f"no such address: {url.path}"}})

        do_GET = do_POST = do_PUT = do_DELETE = handle_one

        def _upload(self, bucket: str, asked: dict, body: bytes) -> None:
            if asked["uploadType"] == "multipart":
                boundary = b"--" + re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
                _, head, content, _ = body.split(boundary, 3) if body.count(boundary) == 3 else _split(body, boundary)
                name = json.loads(head.partition(b"\n\n")[2])["name"]
                self._put(bucket, name, content.partition(b"\n\n")[2][:-1], asked.get("ifGenerationMatch"))
            elif "upload_id" not in asked:
                token = str(next(generations))
                uploads[token] = (bucket, asked.get("name") or json.loads(body)["name"], bytearray())
                host = self.headers["Host"]
                place = f"http://{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={token}"
                self._answer(200, {}, {"Location": place})
            else:
                _, name, data = uploads[asked["upload_id"]]
                data += body
                total = self.headers.get("Content-Range", "").rpartition("/")[2]
                if total == "*" or total and len(data) < int(total):
                    self._answer(308, {}, {"Range": f"bytes=0-{len(data) - 1}"})
                else:
                    self._put(bucket, name, bytes(data), asked.get("ifGenerationMatch"))

        def _put(self, bucket: str, name: str, data: bytes, condition: str | None) -> None:
            present = objects.get((bucket, name), (b"", 0))[1]
            if condition is not None and int(condition) != present:
                return self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            objects[bucket, name] = (data, next(generations))
            self._answer(200, described(bucket, name))

        def _object(self, bucket: str, name: str, asked: dict) -> None:
            if (bucket, name) not in objects:
                return self._answer(404, {"error": {"code": 404, "message": f"No such object: {bucket}/{name}"}})
            if self.command == "DELETE":
                del objects[bucket, name]
                return self._answer(204, None)
            if asked.get("alt") != "media":
                return self._answer(200, described(bucket, name))
            data, generation = objects[bucket, name]
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted:
                data = data[int(wanted[1]) : int(wanted[2]) + 1 if wanted[2] else None]
            self._answer(206 if wanted else 200, data, {"X-Goog-Generation": str(generation)})

        def _list(self, bucket: str, asked: dict) -> None:
            prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
            items, folders = [], set()
            for _, name in sorted(key for key in objects if key[0] == bucket and key[1].startswith(prefix)):
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    items.append(described(bucket, name))
            self._answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)})

        def _answer(self, status: int, content: dict | bytes | None, headers: dict | None = None) -> None:
            body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
            self.send_response_only(status)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _split(body: bytes, boundary: bytes) -> list[bytes]:
    """Split a body whose content may hold the boundary."""
    first = body.index(boundary) + len(boundary)
    second = body.index(boundary, first) + len(boundary)
    last = body.rindex(boundary)
    return [b"", body[first : second - len(boundary)], body[second:last], b""]
