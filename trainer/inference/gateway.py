"""The HTTP front of an inference server: it guards every route, and lets one job at a time use the engine.

Jobs use the routes below `/trainer/`. People use the OpenAI API of the engine (`_OPEN`) beside the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import ipaddress
import json
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory, check_owner, choose_directory
from trainer.generation import server_protocol as protocol
from trainer.generation.server_protocol import Job, error_body, owners_of, with_signs_of_life
from trainer.inference.backend import Backend
from trainer.process.model_server import LOGPROBS, SCORE, STATUS, VOCABULARY

_OPEN = re.compile(r"/(v1/(models|completions|chat/completions|responses)|health|metrics|tokenize|detokenize)")
"""Paths of the engine that people may use. All others, such as those that change the engine, are the front's alone."""
_SHORT_BODY, _BYTES_PER_TOKEN = 1 << 20, 256
"""Bytes that the request of a person may always have; and for each token of the longest sequence, if that is more."""
_LAST_LOAD_S = 5.0  # longest wait for a load of weights when the server ends
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")
_HOP_HEADERS = {"connection", "content-length", "transfer-encoding", "host", "keep-alive", "authorization"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RefusedError(Exception):
    """The job may not use the server. The text is what the server does, without a subject."""


class InUseError(RefusedError):
    """Another job has the server, for `left_s` seconds more if it gives no sign of life."""

    def __init__(self, user: str, left_s: float):
        super().__init__(f"is in use by {user}; choose another server, or end that job and wait {left_s:.0f} s")
        self.left_s = left_s


class Lease:
    """The job that uses the server: one at a time.

    Args:
        lease_s: seconds without a sign of life after which another job may take the server.
        now: returns seconds of a monotonic clock.
    """

    def __init__(self, lease_s: float, now: Callable[[], float]):
        self.lease_s = lease_s
        self._now = now
        self.job: Job | None = None  # the job that has taken the server last, unless it has left it
        self._seen = 0.0
        self._gone: deque[str] = deque(maxlen=1000)
        """Owners that have left, or that another process of their job has replaced. The owner of a job stands for all
        its processes."""

    def take(self, job: Job) -> bool:
        """Give the server to a process of `job`; return whether another process had it, or none.

        Raises:
            InUseError: another job uses it.
            RefusedError: a later start of the same run does.
            LookupError: the process or its job has left, or another process of the job has taken its place.
        """
        if any(one in self._gone for one in owners_of(job.owner)):
            raise LookupError("this process of the job has lost it")
        user = self.job
        if user is not None and user.owner != job.owner:
            left_s = self._seen + self.lease_s - self._now()
            if user.run != job.run:
                if left_s > 0:
                    raise InUseError(user.name, left_s)
            elif user.start > job.start:
                raise RefusedError(f"has been taken by a newer start of this run (start {user.start})")
            elif user.start == job.start and user.engine != job.engine:
                raise RefusedError("is in rollout.urls twice, under two names")
            self._gone.append(user.owner)
        self.job, self._seen = job, self._now()
        return user is None or user.owner != job.owner

    def renew(self, owner: str) -> None:
        """Note that the job with this secret lives.

        Raises:
            RefusedError: another job has taken the server.
            LookupError: the server does not know the job: it has been started since; or another process of the job has
                taken the place of this one.
        """
        if self.job is None:
            raise LookupError("the server has been started again, or the job has left it")
        if self.job.owner != owner:
            if owners_of(owner)[1] == owners_of(self.job.owner)[1]:
                raise LookupError("another process of this job uses it")
            raise RefusedError(f"has been taken by {self.job.name}: this job has lost it")
        self._seen = self._now()

    def release(self, owner: str) -> None:
        """Leave the server, if the process or the job with this secret uses it. It cannot take the server again."""
        if not owner:
            return
        self._gone.append(owner)
        if self.job is not None and owner in owners_of(self.job.owner):
            self.job = None


def find_difference(served: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return how the model of a job differs from the one that a server serves; None: it does not.

    Versions of transformers differ in the names that they know, so only names that both have are compared.
    """
    for name in sorted(served.keys() & wanted.keys()):
        if served[name] != wanted[name]:
            return f"serves another model: {name} is {served[name]!r} there, and {wanted[name]!r} in this job"
    return None


class Gateway:
    """The application.

    Args:
        token: which every request must carry; None: none, and only this machine can ask.
        description: what the server tells jobs about itself: `max_tokens`, the longest sequence; `model`;
            `repeats`, whether its completions repeat to the last bit; `computes` (see `process.model_server`).
        architecture: of the model (see `server_protocol.describe_architecture`).
        frozen: returns the digest of its weights, and the ids of its tokens by their texts. Called on a thread.
    """

    def __init__(
        self,
        token: str | None,
        lease_s: float,
        description: dict[str, Any],
        architecture: Mapping[str, Any],
        frozen: Callable[[], tuple[str, Mapping[str, int]]],
    ):
        self.backend: Backend
        self._token = token
        self._description = description
        self._architecture = architecture
        self._frozen = functools.cache(frozen)
        self._is_frozen = False  # a run reads the model that the server was started with, as a teacher
        self._is_changed = False  # the engine has had weights of a job
        self._lease_of_job = Lease(lease_s, time.monotonic)
        self._weights_of: str | None = None  # the owner whose weights the engine has
        self.version = -1  # of these weights
        self._calls: set[asyncio.Task[Any]] = set()  # of the job
        self._uploads: SharedDirectory | None = None
        self._copy_of: str | None = None  # the token of the ranks of whose weights this machine has a copy
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[Any]] = set()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=protocol.LARGEST_BODY, middlewares=[self._guard])
        app.router.add_get(STATUS, self._status)
        app.router.add_get(VOCABULARY, self._vocabulary)
        app.router.add_post(SCORE, self._score)
        self.add_routes_of_jobs(app)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    def add_routes_of_jobs(self, app: web.Application) -> None:
        """Add what a job that samples needs."""
        app.router.add_post(protocol.LEASE, self._lease)
        app.router.add_post(protocol.RENEW, self._renew)
        app.router.add_post(protocol.RELEASE, self._release)
        app.router.add_post(protocol.GENERATE, self._generate)
        app.router.add_post(protocol.WEIGHTS, self._weights)
        app.router.add_put(f"{protocol.UPLOAD}/{{name}}", self._upload)
        app.on_cleanup.append(self._clean_up)

    def begin_engine(self) -> None:
        """Note that a new engine has the weights that the server was started with."""
        self._is_changed = False
        self.forget_weights()

    def forget_weights(self) -> None:
        """Note that the engine has no weights of a job any more. A job sends all of them to the next one."""
        self._weights_of = None
        self._drop_uploads()

    async def _clean_up(self, _: web.Application) -> None:
        self._drop_uploads()
        with contextlib.suppress(TimeoutError):  # then the next process on this machine deletes the copy
            async with asyncio.timeout(_LAST_LOAD_S), self._loading:
                self._drop_copy()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return web.json_response({"error": "this server needs its token"}, status=401)
        elif "Origin" in request.headers or not is_loopback(_host(request)):
            # A web page that the user reads could send requests to this machine, under any name.
            return web.json_response({"error": "web pages may not use this server"}, status=403)
        try:
            return await handler(request)
        except InUseError as error:
            body = error_body(protocol.IN_USE, str(error)) | {"left_s": error.left_s}
            return web.json_response(body, status=409)
        except RefusedError as error:
            return web.json_response(error_body(protocol.REFUSED, str(error)), status=409)
        except LookupError as error:
            return web.json_response(error_body(protocol.LOST, str(error)), status=409)
        except (aiohttp.ClientError, ConnectionError) as error:
            return web.json_response(error_body(protocol.BUSY, f"its engine fails: {type(error).__name__}"), status=503)

    async def _status(self, _: web.Request) -> web.Response:
        job = self._lease_of_job.job
        state = "ready" if self.backend.is_ready else "starting"
        weights = (await asyncio.to_thread(self._frozen))[0] if self.backend.is_ready else ""
        return web.json_response({**self._description, "weights": weights, "state": state, "job": job and job.name})

    async def _vocabulary(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": (await asyncio.to_thread(self._frozen))[1]})

    async def _score(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        message = await _json(request)
        if message.get("weights") != (await asyncio.to_thread(self._frozen))[0]:
            raise RefusedError("serves other weights than those that this run began with; start it with those")
        if self._lease_of_job.job is not None or self._is_changed:
            raise RefusedError("has weights of a job that samples; start a server of its own for a frozen model")
        self._is_frozen = True
        if not self.backend.is_ready:
            return web.json_response(error_body(protocol.BUSY, "its engine is starting"), status=503)
        return await self._pipe(request, SCORE, body)

    async def _lease(self, request: web.Request) -> web.Response:
        message = await _json(request)
        try:
            given, tokens = message["job"], int(message["needs"]["tokens"])
            run, name, owner = (str(given[field]) for field in ("run", "name", "owner"))
            job = Job(run, int(given["start"]), name, int(given["engine"]), owner)
            architecture = dict(given.get("architecture") or {})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise web.HTTPBadRequest(text=f"no job: {error!r}") from error
        if self._is_frozen or self._description["computes"] != LOGPROBS:
            raise RefusedError("serves a frozen model to a run; start another server for this job")
        if tokens > self._description["max_tokens"]:
            raise RefusedError(
                f"takes {self._description['max_tokens']} tokens, prompt and completion together, and this job needs "
                f"{tokens}; start it with larger rollout.max_prompt_tokens or rollout.max_response_tokens"
            )
        if message["needs"].get("repeats") and not self._description["repeats"]:
            raise RefusedError(
                "runs on a GPU without trainer.deterministic=true, and this job has it; "
                "start it with trainer.deterministic=true"
            )
        if (difference := find_difference(self._architecture, architecture)) is not None:
            raise RefusedError(difference)
        if self._lease_of_job.take(job):
            for task in self._calls:
                task.cancel()
            self.forget_weights()
        if not self.backend.is_ready:
            return web.json_response(error_body(protocol.BUSY, "its engine is starting"), status=503)
        return web.json_response({"start": self.backend.start_id, "lease_s": self._lease_of_job.lease_s})

    async def _renew(self, request: web.Request) -> web.Response:
        with self._call_of_job(request):
            return web.json_response({})

    async def _release(self, request: web.Request) -> web.Response:
        self._lease_of_job.release(request.headers.get(protocol.OWNER, ""))
        if self._lease_of_job.job is None and not self._loading.locked():
            self._drop_copy()
        return web.json_response({})

    def _check_owner(self, owner: str, start: str | None) -> None:
        self._lease_of_job.renew(owner)
        if start != self.backend.start_id or not self.backend.is_ready:
            raise LookupError("its engine has been started again")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()  # which takes time, so the job may have lost the server at its end
        async with self._loading:  # a batch that is sent again may come while new weights are loaded
            pass
        with self._call_of_job(request) as owner:
            if owner != self._weights_of:
                raise LookupError("it has no weights of this job")
            asked, own = request.headers.get(protocol.VERSION, ""), self.version
            number = asked.removesuffix("+")
            if number.isdecimal() and not (int(number) == own or int(number) < own and asked != number):
                raise LookupError(f"it has the weights of version {own}, and this batch asks for {asked}")
            return await self._pipe(request, protocol.GENERATE, body)

    async def _upload(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            with self._call_of_job(request):
                if not _FILE.fullmatch(name):
                    raise RefusedError(f"takes no file {name[:80]!r}")
                if self._uploads is None:
                    self._uploads = SharedDirectory(choose_directory(int(request.headers.get(protocol.BYTES, "0"))))
                with open(os.path.join(self._uploads.path, name), "wb") as file:
                    async for piece in request.content.iter_chunked(1 << 20):
                        await asyncio.to_thread(file.write, piece)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f"({error.strerror})" if self._uploads is None else f"in {self._uploads.path}"
            raise RefusedError(f"has no space for the weights of this job {where}") from error
        return web.json_response({})

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        message = await _json(request)
        with self._call_of_job(request) as owner:
            try:
                order = {"path": message["path"], "version": int(message["version"]), "running": message["running"]}
                if "shards" in message:
                    from trainer.generation.weight_shards import Shards  # imports torch

                    order["shards"] = Shards.from_json(message["shards"])
            except (KeyError, TypeError, ValueError) as error:
                raise web.HTTPBadRequest(text=f"no weights: {error!r}") from error
            if order["path"] is not None and not _is_here(order["path"], message.get("files")):
                return web.json_response(error_body(protocol.ABSENT, "the files are on another machine"), status=404)
            return await self.answer_in_lines(request, self._loaded(owner, order, message.get("files")))

    async def answer_in_lines(self, request: web.Request, lines: AsyncIterator[bytes]) -> web.StreamResponse:
        """Answer with lines as they come, and with signs of life between them."""
        with _cut_on_failure(request):
            response = web.StreamResponse()
            await response.prepare(request)
            async for line in with_signs_of_life(lines):
                await response.write(line)
            return response

    async def _loaded(self, owner: str, order: dict[str, Any], files: Any) -> AsyncIterator[bytes]:
        load = asyncio.ensure_future(self._load(owner, self.backend.start_id, order, files))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        # A load that has begun goes on to its end, whoever still waits for it: the next one waits until then.
        yield json.dumps(await asyncio.shield(load)).encode() + b"\n"

    async def _load(self, owner: str, start: str, order: dict[str, Any], files: Any) -> dict[str, str]:
        """Let the engine load weights; return their digest, or the error."""
        async with self._loading, contextlib.AsyncExitStack() as stack:
            uploads = None
            try:
                self._check_owner(owner, start)  # again: another job may have taken the server meanwhile
                if "shards" in order:
                    order = await self._fetched(order, stack)
                    self._check_owner(owner, start)
                elif order["path"] is None:
                    uploads, self._uploads = self._uploads, None  # an upload of another job has a new directory
                    found = protocol.fingerprint(uploads.path) if uploads is not None else {}
                    if uploads is None or {name: size for name, (_, size, _) in found.items()} != files:
                        raise LookupError("it has not the files of this job")
                    order = {**order, "path": uploads.path}
                self._weights_of, self._is_changed = None, True
                answer = await self._ask_to_load(order)
            except (RefusedError, UserError) as error:
                return error_body(protocol.REFUSED, str(error))
            except LookupError as error:
                return error_body(protocol.LOST, str(error))
            except WorkerError as error:
                return error_body(protocol.ABSENT, f"cannot fetch the weights of the ranks ({error.message})")
            finally:
                if uploads is not None:
                    uploads.close()
            if answer is None:  # some of the weights may be new
                self.backend.fail("while it loaded weights", start)
                return error_body(protocol.LOST, "its engine has failed while it loaded weights")
            job = self._lease_of_job.job
            if "kind" not in answer and job is not None and job.owner == owner and start == self.backend.start_id:
                self._weights_of, self.version = owner, order["version"]
            return answer

    async def _fetched(self, order: dict[str, Any], stack: contextlib.AsyncExitStack) -> dict[str, Any]:
        """Bring this machine's copy to the ranks' weights, of which it may have most; return the order to load it.

        The copy does not change before the end of `stack`.
        """
        source = order["shards"]
        if self._copy_of != source.token:
            self._drop_copy()
        self._copy_of, opened = source.token, source.opened()
        path = await asyncio.to_thread(opened.__enter__)
        stack.push(opened)
        return {"path": path, "version": order["version"], "running": order["running"]}

    def _drop_copy(self) -> None:
        """Free the memory of the copy. Nothing may be loaded now."""
        if self._copy_of is not None:
            from trainer.generation.weight_shards import close_copies

            close_copies()
            self._copy_of = None

    async def _ask_to_load(self, order: dict[str, Any]) -> dict[str, str] | None:
        """Return the answer of the engine; None: it has failed."""
        answer: dict[str, str] | None = None
        if not await self.backend.answers():  # a hang that has begun is no slow load
            return None
        try:
            with self.backend.loading():
                async with self.backend.session.post(protocol.WEIGHTS, json=order) as response:
                    async for line in response.content:
                        if line.strip():
                            answer = json.loads(line)
        except (aiohttp.ClientError, ConnectionError, ValueError):
            return None
        return answer

    def _drop_uploads(self) -> None:
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None

    @contextlib.contextmanager
    def _call_of_job(self, request: web.Request) -> Iterator[str]:
        """Check that the request is of the job that uses the server, and for this start of the engine. Yield its owner.

        The current task ends when another job takes the server.
        """
        owner, task = request.headers.get(protocol.OWNER, ""), asyncio.current_task()
        self._check_owner(owner, request.headers.get(protocol.START))
        assert task is not None
        self._calls.add(task)
        try:
            yield owner
        finally:
            self._calls.discard(task)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if not _OPEN.fullmatch(request.path):
            return web.json_response({"error": f"no route {request.path[:80]}"}, status=404)
        body, most = bytearray(), max(_SHORT_BODY, _BYTES_PER_TOKEN * self._description["max_tokens"])
        async for piece in request.content.iter_chunked(1 << 20):
            body += piece
            if len(body) > most:  # the engine answers nobody while it makes tokens of it
                error = {"message": f"a request has at most {most:,} bytes here", "type": "invalid_request_error"}
                return web.json_response({"error": error}, status=413)
        if not self.backend.is_ready:
            return web.json_response({"error": "the engine is starting"}, status=503)
        return await self._pipe(request, request.path_qs, bytes(body))

    async def _pipe(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Pass a request on to the engine, and its answer back, as it comes."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        async with self.backend.session.request(request.method, path, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with _cut_on_failure(request):
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response


@contextlib.contextmanager
def _cut_on_failure(request: web.Request) -> Iterator[None]:
    """Close the connection if the block fails: its answer has begun, so no other answer can follow."""
    try:
        yield
    except BaseException:
        if request.transport is not None:
            request.transport.abort()
        raise


def _host(request: web.Request) -> str:
    """Return the name by which a request calls this server. Empty: it has none that can be read."""
    try:
        return request.url.host or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _is_here(path: Any, files: Any) -> bool:
    """Return whether `path` is a directory of this user with these very files (see `server_protocol.fingerprint`)."""
    try:
        check_owner(path)
        return bool(files) and protocol.fingerprint(path) == files
    except (UserError, OSError, TypeError, ValueError):
        return False


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        message = await request.json()
    except ValueError as error:
        raise web.HTTPBadRequest(text="no JSON") from error
    if not isinstance(message, dict):
        raise web.HTTPBadRequest(text="no JSON object")
    return message
