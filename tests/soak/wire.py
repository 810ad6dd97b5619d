"""A TCP connection to a server that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

_CHUNK = 1 << 16


class Wire:
    """Forwards connections to a port of this machine: `with Wire(port) as wire`."""

    def __init__(self, port: int):
        self._upstream = ("127.0.0.1", port)
        self._is_cut = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Wire:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._close_all()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Close all connections, and each new one at once, while the block runs."""
        self._is_cut = True
        self._close_all()
        try:
            yield
        finally:
            self._is_cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                try:
                    if self._is_cut:
                        raise ConnectionError
                    server = socket.create_connection(self._upstream)
                except OSError:  # the server is away
                    caller.close()
                    continue
                threading.Thread(target=self._forward, args=(caller, server), daemon=True).start()

    def _forward(self, caller: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._open |= {caller, server}
        if self._is_cut:
            self._close({caller, server})
        replies = threading.Thread(target=_pump, args=(server, caller), daemon=True)
        replies.start()
        _pump(caller, server)
        replies.join()
        self._close({caller, server})

    def _close_all(self) -> None:
        with self._lock:
            connections = set(self._open)
        self._close(connections)

    def _close(self, connections: set[socket.socket]) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        with self._lock:
            self._open -= connections


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Send on what arrives, until the end or until one of the two is closed."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
