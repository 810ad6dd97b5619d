"""`trainer engine --join RUN`: start an engine that joins a running job, and leaves it when a signal comes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from trainer.config import RolloutConfig
from trainer.config.command_line import Outcome, outcome_of
from trainer.config.engines import find_engine
from trainer.config.trainer import ModelConfig
from trainer.errors import UserError, WorkerError, describe_error, one_line
from trainer.generation import server_protocol as protocol
from trainer.generation.engine import Completion, Request, SharedMemory, build_engine
from trainer.generation.fleet import Lease, Registry, digest, fleet_token, sign
from trainer.inference.gateway import Gateway, Handler, is_loopback
from trainer.process import time_limits
from trainer.process.log_setup import ToolParser, guard_output, show_messages
from trainer.process.model_server import LOGPROBS
from trainer.process.network import listen, start_server
from trainer.process.signals import SIGNALS, Stopped

LOG = logging.getLogger(__name__)

_HAND_BACK_S = 5.0  # longest wait for the tokens of requests that an engine has not finished when it leaves
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(eq=False)
class _Batch:
    """Requests that came together, and who waits for them."""

    requests: Mapping[int, Request]
    answers: asyncio.Queue[dict[int, Completion] | dict[str, str]]
    """Some completions by number; or an error, after which nothing follows (see `server_protocol.error_body`)."""


class EngineHost:
    """An engine on a thread of its own, used by the coroutines of a server.

    Args:
        build: returns the engine. Called on its thread.
        streaming: it takes requests while it generates (see `EngineSpec.streaming`).
    """

    def __init__(self, build: Callable[[], Any], streaming: bool):
        self.start_id = secrets.token_hex(8)
        self.is_ready = False
        self.failure: BaseException | None = None  # why the engine is of no more use
        self._build = build
        self._streaming = streaming
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: set[_Batch] = set()
        self._numbers = itertools.count()  # the engine's own: those of two starts of a job are the same
        self._running: dict[int, tuple[_Batch, int]] = {}  # the batch of each request, and its number there
        self._new: dict[int, Request] = {}  # those of them that the engine has not yet
        self._is_leaving = False
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def wait_ready(self) -> None:
        """Wait until the engine is built.

        Raises:
            Exception: it cannot be built.
        """
        while not (await asyncio.wait([self._built], timeout=time_limits.POLL_INTERVAL_S))[0]:
            SIGNALS.check()
        self._built.result()
        self.is_ready = True

    def add(self, requests: Mapping[int, Request]) -> _Batch:
        """Queue requests, before all that is queued later."""
        batch = _Batch(requests, asyncio.Queue())
        if self._is_leaving:
            batch.answers.put_nowait(_leaving())
            return batch
        self._waiting.add(batch)
        self._order(self._take, batch)
        return batch

    async def answers(self, batch: _Batch) -> AsyncIterator[bytes]:
        """Yield the lines of the answer to a batch."""
        left = len(batch.requests)
        try:
            while left:
                answer = await batch.answers.get()
                if "kind" in answer:
                    yield json.dumps(answer).encode() + b"\n"
                    return
                left -= len(answer)
                yield protocol.encode_completions(answer)  # type: ignore[arg-type]
        finally:
            self._waiting.discard(batch)

    async def load(self, order: Mapping[str, Any]) -> dict[str, str] | None:
        """Load weights; return their digest or the error, and None if the engine has failed."""
        return await self._order(self._load, order)

    async def leave(self) -> None:
        """Hand back all that is not complete, with the tokens that it has, if the engine can do so soon."""
        self._is_leaving = True
        if self.is_ready and self._waiting and hasattr(self._engine, "hand_back"):
            await asyncio.wait([self._order(self._hand_back)], timeout=_HAND_BACK_S)
        for batch in self._waiting:
            batch.answers.put_nowait(_leaving())

    def fail(self, reason: str, start_id: str) -> None:
        self.is_ready = False
        self.failure = self.failure or WorkerError(f"the engine has failed ({reason})", "start it again")
        for batch in self._waiting:
            batch.answers.put_nowait(protocol.error_body(protocol.LOST, "its engine has failed"))

    def _order(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Let the engine's thread call a function, before all that is ordered later; return its result."""
        answer = self._loop.create_future()

        def call() -> None:
            result = function(*arguments)
            self._loop.call_soon_threadsafe(answer.set_result, result)

        self._orders.put(call)
        if self._streaming and self.is_ready:
            self._engine.interrupt()
        return answer

    # --- On the engine's thread ---

    def _run(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._built.set_result, None)
        try:
            while True:
                while not self._running or not self._orders.empty():
                    self._orders.get()()
                new, self._new = self._new, {}
                for own, completion in self._engine.step(new).items():
                    self._hand_out(own, completion)
        except BaseException as error:
            if self._loop.is_closed():  # the server has ended while the engine generated
                return
            LOG.warning("the engine has failed", exc_info=error)
            self._loop.call_soon_threadsafe(self.fail, describe_error(error), self.start_id)

    def _take(self, batch: _Batch) -> None:
        numbers = {next(self._numbers): number for number in batch.requests}
        self._running |= {own: (batch, number) for own, number in numbers.items()}
        if self._streaming:
            self._new |= {own: batch.requests[number] for own, number in numbers.items()}
        else:
            completions = self._engine.generate(list(batch.requests.values()))
            for own, completion in zip(numbers, completions, strict=True):
                self._hand_out(own, completion)

    def _hand_back(self) -> None:
        for own, completion in self._engine.hand_back().items():
            self._hand_out(own, completion)
        self._running, self._new = {}, {}

    def _hand_out(self, own: int, completion: Completion) -> None:
        batch, number = self._running.pop(own)
        self._loop.call_soon_threadsafe(batch.answers.put_nowait, {number: completion})

    def _load(self, order: Mapping[str, Any]) -> dict[str, str]:
        running = (order["running"],) if self._streaming else ()
        if order["running"] == "abort":
            self._running, self._new = {}, {}
        try:
            digest = self._engine.sync_weights(SharedMemory(order["path"]), order["version"], *running)
        except (UserError, ValueError) as error:
            return protocol.error_body(protocol.REFUSED, f"cannot load these weights ({one_line(str(error))})")
        return {} if digest is None else {"digest": digest}


def _leaving() -> dict[str, str]:
    return protocol.error_body(protocol.LEFT, "it leaves the job")


class EngineGateway(Gateway):
    """The application of one engine. People have no routes: it serves the job alone.

    Args:
        lease: the engine's own, with its address.
    """

    def __init__(self, token: str, lease: Lease, description: dict[str, Any], architecture: Mapping[str, Any]):
        super().__init__(token, time_limits.SERVER_LEASE_S, description, architecture, lambda: ("", {}))
        self._own, self._secret = lease, token
        self.backend: EngineHost

    def application(self) -> web.Application:
        app = web.Application(client_max_size=protocol.LARGEST_BODY, middlewares=[self._guard])
        app.router.add_get(protocol.PROOF, self._prove)
        self.add_routes_of_jobs(app)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == protocol.PROOF:
            return await handler(request)
        return await super()._guard(request, handler)

    async def _prove(self, request: web.Request) -> web.Response:
        """Prove that this is the engine of the lease, before the job sends anything."""
        parts = protocol.PROOF, request.query.get("nonce", ""), self._own.id, self._own.address
        return web.json_response({"proof": sign(self._secret, *parts)})

    async def _pipe(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        try:
            batch = self.backend.add(protocol.decode_requests(body))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return await self.answer_in_lines(request, self.backend.answers(batch))

    async def _ask_to_load(self, order: dict[str, Any]) -> dict[str, str] | None:
        return await self.backend.load(order)


async def _serve(options: argparse.Namespace, registry: Registry, job: Mapping[str, Any], token: str) -> None:
    """Serve until a signal comes, or the run has ended."""
    from trainer.models.files import resolve_model_path

    spec, rollout = find_engine(job["engine"]), RolloutConfig(**job["rollout"])
    os.environ.update(spec.environment_on(job["device"], job["deterministic"]))  # before torch is imported
    try:
        path = resolve_model_path(job["model_path"])
    except UserError as error:
        raise UserError(f"the model of the job is not on this machine ({error})") from error
    model = replace(ModelConfig(), trust_remote_code=job["trust_remote_code"])
    architecture = protocol.describe_model(model, path, job["longest"])
    if digest(architecture) != job["model"]:
        raise UserError(f"{path}: is another model than that of the job {options.join}; copy the job's model there")
    build = functools.partial(
        build_engine,
        spec,
        None,
        job["deterministic"] and spec.deterministic_torch,
        path,
        0,
        dtype=rollout.dtype,
        seed=job["seed"],
        rollout=rollout,
        device=job["device"],
        trust_remote_code=job["trust_remote_code"],
    )
    description = {
        "model": path,
        "max_tokens": rollout.max_prompt_tokens + rollout.max_response_tokens,
        "repeats": job["device"] == "cpu" or job["deterministic"],
        "computes": LOGPROBS,
    }
    with listen(options.host, options.port, f"--host {options.host} --port {options.port}") as listener:
        address = options.address or _address_of(options.host, listener.getsockname()[1])
        lease = Lease(secrets.token_hex(8), address, job["engine"], job["model"], -1, rollout.max_num_seqs)
        host = EngineHost(build, spec.streaming)
        await host.wait_ready()
        gateway = EngineGateway(token, lease, description, architecture)
        gateway.backend = host
        runner = await start_server(gateway.application(), listener)
        try:
            await _take_part(registry, lease, gateway)
        finally:
            await host.leave()
            with contextlib.suppress(OSError):
                registry.remove(lease.id)
            await asyncio.sleep(0)
            await runner.cleanup()


async def _take_part(registry: Registry, lease: Lease, gateway: EngineGateway) -> None:
    """Renew the lease until the run has ended, or the engine has failed."""
    LOG.info("serving on %s", lease.address)
    loop = asyncio.get_running_loop()
    renewed_at = -time_limits.FLEET_LEASE_S
    while gateway.backend.failure is None:
        SIGNALS.check()
        if loop.time() > renewed_at + time_limits.FLEET_LEASE_S / 5:
            renewed_at = loop.time()
            try:
                await asyncio.to_thread(registry.read_job)
                await asyncio.to_thread(registry.write, replace(lease, version=gateway.version, time=time.time()))
            except FileNotFoundError:
                LOG.info("the run has ended")
                return
            except OSError as error:
                registry.warn("", f"the lease cannot be renewed ({describe_error(error)})")
        await asyncio.sleep(time_limits.POLL_INTERVAL_S)
    raise gateway.backend.failure


def _address_of(host: str, port: int) -> str:
    if host in _EVERYWHERE:
        host = socket.gethostbyname(socket.gethostname())
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def join(options: argparse.Namespace) -> None:
    """Join a job, and serve it until a signal comes or its run has ended.

    Raises:
        UserError: no job takes engines there, or this machine has not what it needs.
        WorkerError: the engine has failed.
    """
    token = fleet_token()
    registry = Registry(options.join.rstrip("/"), token)
    try:
        job = registry.read_job()
    except FileNotFoundError as error:
        raise UserError(
            f"--join {options.join}: no job takes engines there; start it with rollout.fleet=true first"
        ) from error
    if options.address is None and options.host in _EVERYWHERE and is_loopback(_address_of(options.host, 0)[7:-2]):
        raise UserError(f"--host {options.host}: this machine's name is no address for others; give --address URL")
    try:
        asyncio.run(_serve(options, registry, job, token))
    except Stopped:
        LOG.info("left the job %s", options.join)


def main() -> None:
    """Join as the command line says; ends the process."""
    parser = ToolParser(prog="trainer engine", description=__doc__)
    parser.add_argument("--join", metavar="RUN", required=True, help="run directory, or URL of the run's checkpoints")
    parser.add_argument("--host", default="127.0.0.1", help="address on which the engine listens")
    parser.add_argument("--port", type=int, default=0, help="its port (default: a free one)")
    parser.add_argument("--address", metavar="URL", help="how the job reaches it, if not by --host and --port")
    guard_output()
    outcome = Outcome(0)
    try:
        options = parser.parse_args(sys.argv[1:])
        time_limits.read_environment()
    except UserError as error:
        outcome = outcome_of(error)
    else:
        SIGNALS.trains = False
        show_messages()
        with SIGNALS.listening():
            try:
                join(options)
            except BaseException as error:
                outcome = outcome_of(error)
            SIGNALS.ignore()
    outcome.show()
    outcome.exit()


if __name__ == "__main__":
    main()
