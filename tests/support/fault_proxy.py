"""An HTTP proxy in front of an object store, which does to requests what networks and busy stores do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASS, ERROR, SLOW_DOWN, FULL, CUT, LOST, SLOW = "pass", "500", "503", "507", "cut", "lost", "slow"
"""Answer as the store does; an error; throttling; the disks of the store are full (in the words of MinIO); close before
the store sees the request; let the store do it and close without an answer; answer late."""

_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_BROKEN = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We met an internal error.</Message></Error>"

_FULL = (
    b"<?xml version='1.0'?><Error><Code>XMinioStorageFull</Code><Message>Storage backend has reached its minimum free "
    b"drive threshold. Please delete a few objects to proceed.</Message></Error>"
)
_ANSWERS = {ERROR: _BROKEN, SLOW_DOWN: _BUSY, FULL: _FULL}


@dataclass
class Faults:
    """What happens to requests; a test may change it at any time."""

    plan: Callable[[str, str], str] = lambda method, path: PASS
    """Returns what happens to a request."""
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and fault of each request."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def fault_proxy(upstream: str, faults: Faults) -> Iterator[str]:
    """Run a proxy in front of the server at `upstream`; yields its URL."""
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self._body()
            with faults.lock:
                fault = faults.plan(self.command, self.path)
                faults.seen.append((self.command, self.path, fault))
            if fault == CUT:
                return self._close()
            if fault in _ANSWERS:
                return self._answer(int(fault), [], _ANSWERS[fault])
            answer = self._ask(body)
            if fault == SLOW:
                time.sleep(0.1)
            if fault == LOST:
                return self._close()
            self._answer(*answer)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

        def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(host, timeout=60)
            dropped = ("transfer-encoding", "content-length", "expect", "connection")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            result = answer.status, answer.getheaders(), answer.read()
            connection.close()
            return result

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            length = str(len(body))
            for name, value in headers:
                if name.lower() == "content-length":
                    length = value  # of the object, in an answer to HEAD
                elif name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _close(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
