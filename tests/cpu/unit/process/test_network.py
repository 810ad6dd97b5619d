"""The network interface of process groups, and the connections of HTTP servers."""

from __future__ import annotations

import asyncio

from aiohttp import web

from trainer.process import network
from trainer.process.network import app_runner, listen, use_network_of


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


def test_a_connection_that_sends_no_whole_head_is_closed(monkeypatch):
    """One whose request is worked on stays."""
    monkeypatch.setattr(network, "IDLE_S", 0.2)

    async def handle(_: web.Request) -> web.Response:
        await asyncio.sleep(1.0)
        return web.Response(text="ok")

    async def answer(port: int, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    async def talk() -> list[bytes]:
        app = web.Application()
        app.router.add_get("/", handle)
        runner = app_runner(app)
        await runner.setup()
        with listen("127.0.0.1", 0, "") as listener:
            await web.SockSite(runner, listener).start()
            head = b"GET / HTTP/1.1\r\nHost: x\r\n"
            port = listener.getsockname()[1]
            answers = await asyncio.gather(*(answer(port, sent) for sent in (b"", head, head + b"\r\n")))
            await runner.cleanup()
        return answers

    nothing, half, whole = asyncio.run(talk())
    assert nothing == half == b"" and whole.startswith(b"HTTP/1.1 200 OK") and whole.endswith(b"ok")
