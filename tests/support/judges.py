"""Servers that judge completions over HTTP, for tests: real ones on the loopback interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


class Server:
    """What a server has received."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self.now = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        """Set when the test is over: a handler that hangs waits for it."""


@contextmanager
def serving(answer: Callable[[Server, Any], Answer]) -> Iterator[Server]:
    """Run a server whose answers to JSON requests `answer` gives."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(document)
                server.headers.append(dict(self.headers))
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            try:
                status, headers, body = answer(server, document)
            finally:
                with server.lock:
                    server.now -= 1
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client is gone
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        server.closing.set()
        http.shutdown()
        thread.join()
        http.server_close()


def rewards(values: list[Any]) -> Answer:
    return 200, {}, json.dumps({"rewards": values}).encode()


def by_length(server: Server, document: Any) -> Answer:
    """A judge that works: the reward is the length of the completion."""
    return rewards([len(item["completion"]) for item in document["completions"]])
