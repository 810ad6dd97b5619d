"""The network interface of this process's groups, and the sockets and connections of HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import traceback
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import psutil

from trainer.errors import UserError
from trainer.process import time_limits

if TYPE_CHECKING:
    from aiohttp import web

IDLE_S = 60.0
"""Seconds after which a server closes a connection: one that has sent no whole head of a request, and one that still
sends the body of a request that has its answer."""


def use_network_of(address: str, environment: MutableMapping[str, str]) -> None:
    """Let process groups use the network interface with this address, unless the user has chosen another one."""
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address for entry in entries):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", name)
    environment.setdefault("VLLM_HOST_IP", address)


def listen(host: str, port: int, named: str) -> socket.socket:
    """Return a socket that is bound to an address of this machine, which the config calls `named` in the error. Port 0
    is a free one. Raises UserError: it cannot be bound there."""
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise UserError(f"{named}: cannot listen there ({error.strerror})") from error
        stack.pop_all()
        return listener


def _leave_out_requests(record: logging.LogRecord) -> bool:
    """Leave the text of an error out of a log record: it may quote a request, whose path can be a permission."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        frames = "".join(traceback.format_tb(error.__traceback__))
        record.msg, record.args = f"{record.getMessage()} ({type(error).__name__})\n{frames}".rstrip(), ()
        record.exc_info = record.exc_text = None
    return True


async def start_server(app: web.Application, listener: socket.socket, auto_decompress: bool = True) -> web.AppRunner:
    """Serve an application on a bound socket until the `cleanup` of what is returned, which closes the socket.

    A handler is cancelled when its client is gone. Connections without a request are closed: clients that open many and
    send nothing must not keep others away. The rest of a refused body is read and dropped: many clients send all of it
    before they read the answer, and see a reset connection if the server closes earlier. Without `auto_decompress`,
    handlers get bodies as they were sent, and refuse what is compressed.
    """
    from aiohttp import web
    from aiohttp.log import server_logger

    async def end(_: web.Application) -> None:
        accepting.cancel()
        listener.close()

    server_logger.addFilter(_leave_out_requests)
    limits: dict[str, Any] = {"keepalive_timeout": IDLE_S, "lingering_time": IDLE_S, "auto_decompress": auto_decompress}
    app.on_shutdown.append(end)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, **limits)
    await runner.setup()
    listener.listen(1024)
    listener.setblocking(False)
    accepting = asyncio.ensure_future(_accept(listener, runner.server))
    return runner


async def _accept(listener: socket.socket, server: Any) -> None:
    """Accept connections, as many at a time as `most_connections`. The oldest one without a request makes way."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:  # the client has gone, or the process has no descriptor left
            await asyncio.sleep(time_limits.POLL_INTERVAL_S)
            continue
        while len(handlers := [one for one in server.connections if one.transport is not None]) >= most_connections():
            idle = next((one for one in handlers if one._current_request is None), None)
            if idle is not None:
                idle.force_close()
            await asyncio.sleep(0 if idle is not None else time_limits.POLL_INTERVAL_S)
        await loop.connect_accepted_socket(server, connection)


def most_connections() -> int:
    """Return how many connections a server may have: a quarter of the descriptors of this process."""
    return max(1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 16384) // 4)
