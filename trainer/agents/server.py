"""The HTTP server of a job, through which agents ask the policy. It runs on the event loop of the rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from aiohttp import web

from trainer.agents.call_tree import Answer
from trainer.agents.episode import WIRES, AgentEpisode, Call, ended
from trainer.agents.messages import ApiError, event
from trainer.agents.requests import Wire
from trainer.process import time_limits
from trainer.process.network import listen, start_server
from trainer.sandbox.limits import LARGEST_MESSAGE

LOG = logging.getLogger(__name__)

_PATH = "/episodes/{secret}/v1"
_NO_RETRY = {"X-Should-Retry": "false"}  # OpenAI's and Anthropic's clients obey it

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """Serves the episodes that are added to it, on the event loop that calls `start`. All else runs there, too.

    Args:
        host: address to listen on.
        port: 0 lets the system choose one.
        url: how agents reach the server, if not by host and port.

    Raises:
        UserError: it cannot listen there.
    """

    def __init__(self, host: str, port: int = 0, url: str | None = None):
        shown = f"[{host}]" if ":" in host else host
        self._listener = listen(host, port, f"environment.agent_address={shown}:{port}")
        self._url = (url or f"http://{shown}:{self._listener.getsockname()[1]}").rstrip("/")
        self._episodes: dict[str, AgentEpisode] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[web.AppRunner]

    async def start(self) -> None:
        """Begin to serve, unless it does so already."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            app = web.Application(client_max_size=LARGEST_MESSAGE, middlewares=[_errors_as_json])
            for path in WIRES:
                app.router.add_post(f"{_PATH}/{path}", partial(self._ask, path))
            # An agent whose connection breaks may repeat its request at once: the handler must know.
            self._started = asyncio.ensure_future(start_server(app, self._listener, auto_decompress=False))
        await asyncio.shield(self._started)

    def close(self) -> None:
        """End the server, on another thread than that of its event loop, which still runs."""

        async def end() -> None:
            await (await self._started).cleanup()  # closes the listener, too

        if self._loop is None:
            self._listener.close()
        else:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self._loop).result(time_limits.LOOP_END_S)

    def address(self, secret: str) -> str:
        """Return the base URL of the episode with this secret."""
        return self._url + _PATH.format(secret=secret)

    def add(self, episode: AgentEpisode) -> None:
        """Begin to serve an episode."""
        self._episodes[episode.secret] = episode

    def discard(self, episode: AgentEpisode) -> None:
        """Refuse all further calls of an episode."""
        episode.end()
        self._episodes.pop(episode.secret, None)

    async def _ask(self, path: str, request: web.Request) -> web.StreamResponse:
        episode = self._episodes.get(request.match_info["secret"])
        if episode is None:
            raise ended()
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            problem = f"bodies must not be compressed (Content-Encoding: {encoding[:40]})"
            raise ApiError(problem, code="unsupported_encoding", status=415)
        with episode.asking(path, await request.read(), request.headers) as (call, answer):
            wire, stream = episode.wire(path), answer.request.stream
            kind = "text/event-stream" if stream else "application/json"
            response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
            waits = await _wait(call, answer, wire, request, response)
            if waits and (problem := call.reply.exception()) is not None:
                assert isinstance(problem, ApiError)
                await response.write(event("error", error=problem.body()["error"]))
                return response
            answer = dataclasses.replace(answer, message=call.reply.result())
            with call.delivering():
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the agent does not wait any more")
                if not waits:
                    await response.prepare(request)
                    await response.write(wire.start(answer) if stream else json.dumps(wire.whole(answer)).encode())
                for part in wire.events(answer, waits) if stream else ():
                    await response.write(part)
                await response.write_eof()
        return response


async def _wait(call: Call, answer: Answer, wire: Wire, request: web.Request, response: web.StreamResponse) -> int:
    """Wait for the reply of a call, or its failure; return how many events of `Wire.wait` the client has got meanwhile.

    A stream begins early where the reply is late: Claude Code gives up after 300 s, and so do other programs and
    proxies. A reply that comes in time, or fails, is the first that the client sees: so it can have a status.
    """
    waits = 0
    while not (await asyncio.wait([call.reply], timeout=time_limits.STREAM_QUIET_S))[0]:
        if not answer.request.stream:
            continue
        if not waits:
            await response.prepare(request)
            await response.write(wire.start(answer))
        await response.write(wire.wait(answer, waits))
        waits += 1
    return waits


_SHARED: dict[tuple[str, int, str | None], tuple[AgentServer, list[object]]] = {}


@contextlib.contextmanager
def shared_server(host: str, port: int, url: str | None) -> Iterator[AgentServer]:
    """Have a server in the block, one for all blocks of the main thread that want the same address.

    Raises:
        UserError: it cannot listen there.
    """
    key, user = (host, port, url), object()
    if key not in _SHARED:
        _SHARED[key] = AgentServer(host, port, url), []
    server, users = _SHARED[key]
    users.append(user)
    try:
        yield server
    finally:
        users.remove(user)
        if not users:
            del _SHARED[key]
            server.close()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        problem = error
    except web.HTTPRequestEntityTooLarge:
        message = f"the body has more than {LARGEST_MESSAGE:,} bytes"
        problem = ApiError(message, code="body_too_large")
    except web.HTTPMethodNotAllowed as error:
        message = f"{request.method} is not allowed here; use {', '.join(sorted(error.allowed_methods))}"
        # A client that would rather have a WebSocket takes 426 for a final answer, and tries again after 405.
        problem = ApiError(message, code="wrong_method", status=426 if "Upgrade" in request.headers else 405)
    except web.HTTPNotFound:
        message = f"this endpoint has {', '.join(WIRES)}, below its base URL"
        problem = ApiError(message, code="wrong_url", status=404)
    except ConnectionError:  # nobody reads the answer
        raise
    except Exception:
        LOG.exception("the endpoint for agents has failed")
        problem = ApiError("the endpoint has failed; the log of the job says why", status=500)
    return web.json_response(problem.body(), status=problem.status, headers=_NO_RETRY)
