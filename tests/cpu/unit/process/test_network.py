"""The network interface of process groups, and the connections of HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

import pytest
from aiohttp import web

from trainer.process import network
from trainer.process.network import listen, start_server, use_network_of

HEAD, END = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", "\r\n"


def test_groups_use_the_interface_of_an_address_unless_the_user_has_chosen_another():
    environment: dict[str, str] = {}
    use_network_of("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "VLLM_HOST_IP": "10.0.0.7"}
    environment = dict(chosen)
    use_network_of("127.0.0.1", environment)
    assert environment == {**chosen, "NCCL_SOCKET_IFNAME": "lo"}
    environment = {}
    use_network_of("203.0.113.1", environment)
    assert environment == {"VLLM_HOST_IP": "203.0.113.1"}, "no interface of this machine has this address"


@pytest.mark.parametrize(
    ("idle_s", "sent", "answered"), [(0.2, "", False), (0.2, HEAD, False), (60.0, HEAD + END, True)]
)
def test_a_connection_that_sends_no_whole_head_is_closed(monkeypatch, idle_s, sent, answered):
    monkeypatch.setattr(network, "IDLE_S", idle_s)

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text="ok", headers={"Connection": "close"})

    async def talk() -> bytes:
        app = web.Application()
        app.router.add_get("/", handle)
        with listen("127.0.0.1", 0, "") as listener:
            runner = await start_server(app, listener)
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(sent.encode())
            answer = await asyncio.wait_for(reader.read(), 50)
            writer.close()
            await runner.cleanup()
        return answer

    answer = asyncio.run(talk())
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"ok") if answered else answer == b""


SERVER = """
import asyncio, resource, sys
from aiohttp import web
from trainer.metrics.prometheus import MetricsServer
from trainer.process import network
from trainer.process.network import listen, start_server

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

async def handle(_):
    files = [open("/dev/null") for _ in range(40)]  # what the run needs beside its connections
    return web.Response(text=f"{len(files)} files")

async def serve():
    app = web.Application()
    app.router.add_get("/", handle)
    listener = listen("127.0.0.1", 0, "")
    runner = await start_server(app, listener)
    with MetricsServer("127.0.0.1", 0, "run", 1) as metrics:
        print(listener.getsockname()[1], metrics.address[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()
    assert listener.fileno() == -1

asyncio.run(serve())
"""


def test_silent_clients_take_neither_a_server_nor_the_descriptors_of_its_process():
    command = [sys.executable, "-c", SERVER]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as clients,
    ):
        ports = [int(word) for word in process.stdout.readline().split()]
        for port in ports:
            for _ in range(300):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=9) as client:
            client.sendall((HEAD + END).encode())
            assert client.makefile().read().endswith("40 files")
        clients.close()
        process.stdin.close()
        assert process.wait(60) == 0
