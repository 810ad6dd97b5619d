"""The network interface of process groups, and the connections of HTTP servers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from trainer.process import network
from trainer.process.network import app_runner, listen, use_network_of

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
        runner = app_runner(app)
        await runner.setup()
        with listen("127.0.0.1", 0, "") as listener:
            await web.SockSite(runner, listener).start()
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(sent.encode())
            answer = await asyncio.wait_for(reader.read(), 50)
            writer.close()
            await runner.cleanup()
        return answer

    answer = asyncio.run(talk())
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"ok") if answered else answer == b""
