"""An engine that is an inference server, older than the job: `rollout.engine=server` (see `trainer.inference`)."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import httpx

from trainer.config import RolloutConfig
from trainer.errors import RESTART_HINT, UserError, WorkerError, one_line
from trainer.files.documents import ObjectShape, is_number, parse_object
from trainer.files.shared_memory import SharedDirectory, choose_directory
from trainer.generation import server_protocol as protocol
from trainer.generation.engine import CUT, Completion, Request, RunningRequests, generate_in_steps
from trainer.generation.server_protocol import Job
from trainer.process import time_limits
from trainer.process.log_setup import show
from trainer.process.model_server import TOKEN, read_token

if TYPE_CHECKING:
    from trainer.generation.weight_shards import Shards
    from trainer.generation.weight_sync import Broadcast, SharedMemory

_LEASE_SHAPE: dict[Any, Any] = {"start": str, "lease_s": lambda value: is_number(value) and value > 0}
_LARGEST_ANSWER = 1 << 20  # bytes of an answer that is no stream of completions
_TOKEN_BYTES = 40  # most bytes of a completion in a line of the answer, for each token
_ATTEMPTS = 3  # attempts of a request that cannot reach the server, before the server counts as lost
_PIECE = 1 << 20


class ServerEngine:
    """See `trainer.generation.engine.StreamingEngine`. It waits for its server in the constructor, and nowhere else.

    If the server fails later, the calls raise `WorkerError` with the cause `server`. The pool then gives the requests
    to other engines and starts a new process, which waits for the server and gets the weights again.

    Args:
        rollout: `urls[index]` is the server.
        job: who uses the server.
        absence_s: longest wait of the constructor for the server; None: `SERVER_ABSENCE_S`.
        repeats: the job has `trainer.deterministic`, and wants a server whose completions repeat to the last bit.

    Raises:
        UserError: the server refuses this job.
        WorkerError: the server has not answered in time (cause `server_absent`).
    """

    named = "rollout.urls: {}"  # what messages call a server, by its address

    def __init__(
        self,
        model_path: str,
        *,
        rollout: RolloutConfig,
        index: int,
        job: Job,
        repeats: bool = False,
        absence_s: float | None = None,
        **_: Any,
    ):
        self.url = rollout.urls[index].rstrip("/")
        self._name = self.named.format(self.url)
        self._later = "+" if rollout.in_flight_updates else ""  # later weights may generate a batch, too
        self._job = job.of_process(index)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity", **_authorization()},
            timeout=httpx.Timeout(time_limits.SERVER_SILENCE_S, connect=time_limits.SERVER_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy for the internet is no way to a server of the cluster
        )
        sizes = [size for name, size in job.architecture.items() if name.endswith("vocab_size") and is_number(size)]
        self._vocab = max(sizes, default=math.inf)
        self._version = -1  # of the weights that the server has, or gets now
        self._batches = 0  # number of the last batch before the last abort
        self._pending: set[int] = set()
        self._results: queue.Queue[tuple[int, dict[int, Completion] | Exception]] = queue.Queue()
        self._interrupted = threading.Event()
        self._error: Exception | None = None
        self._reaches_ranks = True
        tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
        self._claim = {"job": asdict(self._job), "needs": {"tokens": tokens, "repeats": repeats}}
        self._lease = self._wait_for_lease(time_limits.SERVER_ABSENCE_S if absence_s is None else absence_s)
        self._headers = {protocol.OWNER: self._job.owner, protocol.START: self._lease["start"]}
        self._ended = threading.Event()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def _wait_for_lease(self, timeout_s: float) -> dict[str, Any]:
        deadline, warned = time.monotonic() + timeout_s, time.monotonic() + time_limits.SERVER_WARNING_S
        free_at = None  # a job that was killed, perhaps an earlier start of this one elsewhere, gives no sign of life
        while True:
            try:
                return self._post(protocol.LEASE, self._claim, shape=_LEASE_SHAPE)
            except _InUseError as error:
                if free_at is None:
                    free_at = time.monotonic() + min(error.left_s, timeout_s) + time_limits.SERVER_RETRY_S
                    show(f"WARNING: {error}; waiting until then for a sign of life of that job", error=True)
                if time.monotonic() > free_at:
                    raise
            except WorkerError as error:
                now = time.monotonic()
                if now > deadline:
                    waited = f"{error.message}; waited for {timeout_s:g} s"
                    raise WorkerError(waited, RESTART_HINT, "server_absent") from error
                if now > warned:
                    show(f"WARNING: {error.message}; waiting for it, up to {timeout_s:g} s", error=True)
                    warned = deadline
            time.sleep(time_limits.SERVER_RETRY_S)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return generate_in_steps(self, requests)

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        """Send requests, and wait until some are complete; return these (see `StreamingEngine`)."""
        if requests:
            self._begin(requests)
        completions: dict[int, Completion] = {}
        began = time.monotonic()
        while self._pending and not self._interrupted.is_set():
            try:
                completions |= self._receive(None if not completions else time_limits.ENGINE_REPORT_S)
            except Exception as error:
                if not completions:
                    raise
                self._results.put((self._batches, error))  # the next step raises it
                break
            if completions and time.monotonic() > began + time_limits.ENGINE_REPORT_S:
                break
        self._interrupted.clear()
        return completions

    def _begin(self, requests: Mapping[int, Request]) -> None:
        """Send requests before any new weights, and let a thread read their completions."""
        ordered = dict(sorted(requests.items()))  # the order of their stream, as an engine of the job has it
        self._pending |= ordered.keys()
        lines, number = self._send(ordered, self._version), self._batches
        try:
            next(lines)
        except Exception as error:
            self._results.put((number, error))
            return
        arguments = (lines, number, ordered, self._version)
        threading.Thread(target=self._read_batch, args=arguments, name="batch", daemon=True).start()

    def interrupt(self) -> None:
        self._interrupted.set()
        self._results.put((self._batches, {}))

    def _receive(self, wait_s: float | None) -> dict[int, Completion]:
        """Wait for the next result of a batch. The server shows that it lives, or the connection breaks."""
        if self._error is not None:
            raise self._error
        try:
            number, result = self._results.get(timeout=wait_s)
        except queue.Empty:
            return {}
        if number != self._batches:
            return {}
        if isinstance(result, Exception):
            raise result
        self._pending -= result.keys()
        return result

    def _read_batch(self, lines: Iterator[bytes], number: int, requests: Mapping[int, Request], oldest: int) -> None:
        """Queue the completions of a batch, or why they do not come. `oldest`: version of the weights then."""
        missing = dict(requests)
        try:
            for line in lines:
                if number != self._batches:
                    return
                if not line:
                    continue
                with self._answers():
                    if line.startswith(b"{"):
                        raise self._error_of(parse_object(line))
                    completions = protocol.decode_completions(line)
                    for one, completion in completions.items():
                        versions = oldest, self._version
                        protocol.check_completion(completion, missing.pop(one, None), versions, self._vocab)
                        if completion.finish_reason == CUT and not self._later:  # an exact run begins it again
                            raise self._error_of(protocol.error_body(protocol.LEFT, ""))
                self._results.put((number, completions))
            if missing and number == self._batches:
                raise self._lost(f"the answer has ended without {len(missing)} completions")
        except Exception as error:
            self._results.put((number, error))

    def _send(self, requests: Mapping[int, Request], oldest: int) -> Iterator[bytes]:
        """Yield an empty line once the server has a batch, then the lines of the answer."""
        body = protocol.encode_requests(requests)
        if len(body) > protocol.LARGEST_BODY:
            most = f"{protocol.LARGEST_BODY >> 30} GiB"
            raise UserError(f"{self._name} takes {most} of requests at a time; use shorter prompts or more servers")
        tokens = sum(request.sampling.max_tokens for request in requests.values())
        headers = {**self._headers, protocol.VERSION: f"{oldest}{self._later}"}
        return self._stream(protocol.GENERATE, body, _LARGEST_ANSWER + _TOKEN_BYTES * tokens, headers)

    def sync_weights(
        self, source: SharedMemory | Shards | Broadcast, version: int, running: RunningRequests = "abort"
    ) -> str | None:
        """Let the server load the weights of `source`; return their digest, as the server says it."""
        if running == "abort":
            self._batches += 1
            self._pending.clear()
        self._version = version
        ask = functools.partial(self._ask_to_load, version=version, running=running)
        with contextlib.ExitStack() as stack:
            path = getattr(source, "path", None)
            if hasattr(source, "offers"):  # importing the class imports torch
                if self._reaches_ranks:  # the server fetches what has changed
                    try:
                        return ask(path=None, shards=asdict(source))
                    except _AbsentError as error:
                        self._reaches_ranks = False
                        show(f"WARNING: {self._name} {error}; this job sends it all weights in each sync", error=True)
                try:
                    path = stack.enter_context(source.opened())
                except WorkerError as error:
                    raise self._lost(error.message) from error
            elif path is None:
                path = self._receive_broadcast(source, stack)
            try:
                return ask(path=path, files=protocol.fingerprint(path))
            except _AbsentError:  # the server is on another machine
                return ask(path=None, files=self._upload(path))

    def _ask_to_load(self, **message: Any) -> str | None:
        """Let the server load weights; return their digest."""
        answer = b""
        for line in self._stream(protocol.WEIGHTS, json.dumps(message).encode()):
            answer = line or answer
        if not answer:
            raise self._lost("the answer has ended before the weights were loaded")
        with self._answers():
            result = parse_object(answer)
        if "kind" in result:
            raise self._error_of(result)
        digest = result.get("digest")
        return None if digest is None else str(digest)

    def _receive_broadcast(self, source: Broadcast, stack: contextlib.ExitStack) -> str:
        """Write what the ranks send to memory of this machine, one file a tensor; return the directory."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        directory = tempfile.gettempdir()

        def written(write: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return write(*arguments)
            except (OSError, SafetensorError) as error:
                reason = error.strerror if isinstance(error, OSError) else one_line(str(error))
                raise UserError(
                    f"rollout.urls: the weights for {self.url} cannot be written to {directory} ({reason}); make space "
                    "there, or set the environment variable TMPDIR to a larger directory"
                ) from error

        shared = written(lambda: SharedDirectory(choose_directory(source.total_bytes)))
        stack.callback(shared.close)
        directory = shared.path
        for count, (name, tensor) in enumerate(source.receive()):
            file = os.path.join(directory, f"{count}.safetensors")
            written(save_file, {name: tensor}, file, {"format": "pt"})
        return directory

    def _upload(self, directory: str) -> dict[str, int]:
        """Send the weights in `directory`, and return the size of each file."""
        names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))  # without an index
        sizes = {name: os.path.getsize(os.path.join(directory, name)) for name in names}

        def pieces(name: str) -> Iterator[bytes]:
            with open(os.path.join(directory, name), "rb") as file:
                while piece := file.read(_PIECE):
                    yield piece

        for name, size in sizes.items():
            headers = {**self._headers, "Content-Length": str(size), protocol.BYTES: str(sum(sizes.values()))}
            path = f"{protocol.UPLOAD}/{name}"
            with self._answers(), self._client.stream("PUT", path, content=pieces(name), headers=headers) as response:
                read_answer(self._checked(response))
        return sizes

    def set_version(self, version: int) -> None:
        """Set the version of the weights that are loaded. Raises if the server has lost them, or does not answer."""
        if self._error is not None:
            raise self._error
        self._post(protocol.RENEW, {}, self._headers)

    def sleep(self) -> int:
        """Do nothing: the server shares no GPU with the job."""
        return 0

    def wake(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Leave the server to other jobs."""
        self._ended.set()
        with contextlib.suppress(WorkerError, UserError):
            self._post(protocol.RELEASE, {}, self._headers)
        self._client.close()

    def _renew(self) -> None:
        every_s = min(max(self._lease["lease_s"] / 4, time_limits.POLL_INTERVAL_S), time_limits.SERVER_POLL_S)
        while not self._ended.wait(every_s):
            try:
                try:
                    self._post(protocol.RENEW, {}, self._headers)
                except WorkerError as error:  # the next call says so
                    if error.__cause__ is None:  # the server has been started again, and knows no job
                        with contextlib.suppress(WorkerError):
                            self._post(protocol.LEASE, self._claim)
            except UserError as error:  # another job has the server; the next call says so
                self._error = error
                self._results.put((self._batches, error))
                return

    def _post(
        self, path: str, message: Any, headers: Mapping[str, str] | None = None, shape: ObjectShape | None = None
    ) -> dict[str, Any]:
        for attempt in range(_ATTEMPTS):
            try:
                with self._answers(), self._client.stream("POST", path, json=message, headers=headers) as response:
                    return parse_object(read_answer(self._checked(response)), shape)
            except WorkerError as error:
                cause = error.__cause__
                passes = isinstance(cause, httpx.TransportError) and not isinstance(cause, httpx.ReadTimeout)
                if attempt == _ATTEMPTS - 1 or not passes:
                    raise
                time.sleep(time_limits.SERVER_RETRY_S)
        raise AssertionError

    def _stream(
        self, path: str, body: bytes, most: int = _LARGEST_ANSWER, headers: Mapping[str, str] | None = None
    ) -> Iterator[bytes]:
        """Post `body`, and yield an empty line once the server has it, then the lines of the answer (`most` bytes)."""
        headers = headers or self._headers
        with self._answers(), self._client.stream("POST", path, content=body, headers=headers) as response:
            self._checked(response)
            yield b""
            rest = bytearray()
            for piece in response.iter_raw():
                *lines, tail = piece.split(b"\n")
                for line in lines:
                    yield bytes(rest + line)
                    rest.clear()
                rest += tail
                if len(rest) > most:
                    raise ValueError("a line of the answer is too long")
            yield bytes(rest)

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Turn what httpx and a foreign server raise into an error of this server."""
        try:
            yield
        except (httpx.TransportError, httpx.StreamError, httpx.InvalidURL) as error:
            silent = isinstance(error, httpx.ReadTimeout)
            reason = f"no sign of life for {time_limits.SERVER_SILENCE_S:g} s" if silent else str(error)
            raise self._lost(reason or type(error).__name__) from error
        except RuntimeError as error:  # also of a thread that still sends when `shutdown` has closed the client
            if isinstance(error, WorkerError) or not self._client.is_closed:
                raise
            raise self._lost("this job has left it") from error
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            sentence = f"{self._name} is no inference server of this project"
            raise UserError(f"{sentence} ({one_line(str(error))})") from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 200:
            return response
        answer: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            answer = parse_object(read_answer(response))
        if "kind" in answer:
            raise self._error_of(answer)
        if response.status_code in (401, 403):
            raise UserError(
                f"{self._name} refuses the token of this job; set the environment variable {TOKEN} to that "
                "of the server"
            )
        if response.status_code >= 500:
            raise self._lost(f"HTTP {response.status_code}")
        raise UserError(f"{self._name} is no inference server of this project")

    def _error_of(self, answer: Mapping[str, Any]) -> Exception:
        text = one_line(str(answer.get("error", "")))
        match answer["kind"]:
            case protocol.REFUSED:
                return UserError(f"{self._name} {text}")
            case protocol.IN_USE:
                left_s = answer.get("left_s")
                return _InUseError(f"{self._name} {text}", left_s if is_number(left_s) else 0.0)
            case protocol.ABSENT:
                return _AbsentError(text)
            case protocol.LEFT:
                return WorkerError(f"the engine at {self.url} has left", "", protocol.LEFT)
            case _:
                return self._lost(text)

    def _lost(self, reason: str) -> WorkerError:
        return WorkerError(f"the inference server {self.url} does not serve ({one_line(reason)})", "", "server")


def leave_servers(urls: Sequence[str], job: Job) -> None:
    """Leave the servers of a job to other jobs, also those that its processes are about to take.

    One that does not answer soon keeps the job until its lease ends.
    """
    headers = {**_authorization(), protocol.OWNER: job.owner}
    for url in urls:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            httpx.post(
                f"{url.rstrip('/')}{protocol.RELEASE}",
                json={},
                headers=headers,
                timeout=time_limits.SERVER_RETRY_S,
                trust_env=False,
            )


def read_answer(response: httpx.Response) -> bytes:
    """Return the body of a short answer. Raises ValueError if it is longer: a foreign server may send without end."""
    body = b""
    for piece in response.iter_raw():
        if len(body := body + piece) > _LARGEST_ANSWER:
            raise ValueError("the answer is too long")
    return body


def _authorization() -> dict[str, str]:
    token = read_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


class _InUseError(UserError):
    """Another job has the server, for `left_s` seconds more if it gives no sign of life."""

    def __init__(self, text: str, left_s: float):
        super().__init__(text)
        self.left_s = left_s


class _AbsentError(Exception):
    """The server does not see the files."""
