"""The engines that join a running job and leave it: found in the registry, checked, and added to the job's engines.

The registry has signed files beside the run. The token of inference servers (`process.model_server.TOKEN`) signs each.
So nobody else can let a job send its weights and prompts to an address, or let an engine load code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import httpx

from trainer.checkpoint.storage import Storage, open_storage
from trainer.cluster.process_cluster import Processes, WorkerThread
from trainer.config import Config
from trainer.errors import UserError, WorkerError, describe_error, one_line
from trainer.files.documents import parse_object
from trainer.files.uris import is_url
from trainer.generation import server_protocol as protocol
from trainer.generation.lifecycle import State
from trainer.generation.server_engine import ServerEngine, leave_servers, read_answer
from trainer.generation.server_protocol import Job
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS
from trainer.process.model_server import TOKEN, read_token

if TYPE_CHECKING:
    from trainer.generation.engines import Engines

LOG = logging.getLogger(__name__)

_REMOTE_POLLS = 5  # an object store is looked at so much less often than a disk
_BACKENDS = Processes()


_FOLDER, _JOB = ".engines", "job.json"
_LEASE = re.compile(r"engine-\w+\.json")  # no file that is being written
_LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True)
class Lease:
    """What an engine says of itself while it takes part. It writes that again and again."""

    id: str  # of this process of the engine
    address: str  # where the job reaches it, such as `http://10.0.0.7:4242`
    kind: str  # the value of `rollout.engine`
    model: str  # `digest` of the architecture of the model
    version: int  # of the weights that it has; -1: none of the job
    capacity: int  # sequences that it generates at the same time
    time: float = field(default_factory=time.time)
    """Seconds since 1970 on the clock of the engine's machine. Only whether it changes counts."""


_SHAPE: dict[Any, Any] = get_type_hints(Lease)


def fleet_token() -> str:
    """Return the token of the job and of the engines that join it.

    Raises:
        UserError: there is none.
    """
    if (token := read_token()) is None:
        text = f"rollout.fleet: set the environment variable {TOKEN} to a secret, the same for the job and its engines"
        raise UserError(text)
    return token


def digest(architecture: Mapping[str, Any]) -> str:
    """Return a digest of `server_protocol.describe_architecture` of a model."""
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:32]


def sign(token: str, *parts: str) -> str:
    """Return the HMAC-SHA256 of texts, in hexadecimal."""
    return hmac.new(token.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


class Registry:
    """The files of one run. Every method raises OSError if the storage fails.

    Args:
        root: the run directory, or the URL of the run's checkpoints.
    """

    def __init__(self, root: str, token: str):
        self._storage: Storage = open_storage(root)
        self._token = token
        self.is_remote = is_url(root)
        self._seen: dict[str, tuple[bytes, float]] = {}  # the last content of each file, and since when it is there
        self._warned: dict[str, str] = {}

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Say what engines that join must be."""
        self._write(_JOB, job)

    def clear(self) -> None:
        """Let the engines end: the run has. Those that were killed have left their leases."""
        for name in self._storage.names(_FOLDER):
            self._storage.delete(f"{_FOLDER}/{name}")

    def read_job(self) -> dict[str, Any]:
        """Return what engines that join must be.

        Raises:
            FileNotFoundError: no job takes engines here, or it has ended.
            UserError: the file is not of a job with this token.
        """
        return self._checked(_JOB, self._content(_JOB))

    def write(self, lease: Lease) -> None:
        """Write or renew the lease of an engine."""
        self._write(_name(lease.id), asdict(lease))

    def remove(self, engine: str) -> None:
        self._storage.delete(f"{_FOLDER}/{_name(engine)}")

    def leases(self, now: float) -> dict[str, Lease]:
        """Return the leases that are renewed, by the id of the engine. The others are removed.

        A file that is not signed with the token, or is none, is named in a warning, once.

        Args:
            now: seconds of a monotonic clock.
        """
        names = [name for name in self._storage.names(_FOLDER) if _LEASE.fullmatch(name)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        found: dict[str, Lease] = {}
        for name in names:
            try:
                content = self._content(name)
                if name not in self._seen or self._seen[name][0] != content:
                    self._seen[name] = content, now
                elif now - self._seen[name][1] > time_limits.FLEET_LEASE_S:
                    self._storage.delete(f"{_FOLDER}/{name}")
                    continue
                fields = self._checked(name, content, _SHAPE)
                lease = Lease(**{field: fields[field] for field in _SHAPE})
                if name != _name(lease.id):
                    raise self._refusal(name, "is the copy of another file")
            except FileNotFoundError:
                continue
            except UserError as error:
                self.warn(name, str(error))
            else:
                found[lease.id] = lease
        return found

    def warn(self, name: str, text: str) -> None:
        """Warn of a file or an engine, once."""
        if self._warned.get(name) != text:
            self._warned[name] = text
            LOG.warning("%s", text)

    def _write(self, name: str, body: Mapping[str, Any]) -> None:
        text = json.dumps(body)
        signed = {"signed": text, "signature": sign(self._token, name, text)}
        self._storage.put(f"{_FOLDER}/{name}", json.dumps(signed).encode())

    def _content(self, name: str) -> bytes:
        if self._storage.size(f"{_FOLDER}/{name}") > _LARGEST:
            raise self._refusal(name, "is too large")
        return self._storage.get(f"{_FOLDER}/{name}")

    def _checked(self, name: str, content: bytes, shape: dict[Any, Any] | None = None) -> dict[str, Any]:
        try:
            signed = parse_object(content, {"signed": str, "signature": str})
            expected = sign(self._token, name, signed["signed"])
            if not hmac.compare_digest(signed["signature"].encode(), expected.encode()):
                raise self._refusal(name, f"is signed with another {TOKEN} than that of this process")
            return parse_object(signed["signed"], shape)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise self._refusal(name, f"is no file of a fleet ({error})") from error

    def _refusal(self, name: str, problem: str) -> UserError:
        return UserError(f"{os.path.join(self._storage.root, _FOLDER, name)}: {problem}; it is not used")


def _name(engine: str) -> str:
    return f"engine-{engine}.json"


class JoinedEngine(ServerEngine):
    """An engine that has joined the job. It proves that it is the one of the registry before it gets the token.

    Raises:
        UserError: something else answers at its address, or it refuses this job.
        WorkerError: it does not answer.
    """

    named = "the engine at {}"

    def __init__(self, lease: Lease, token: str, **arguments: Any):
        check_proof(lease, token)
        rollout = replace(arguments.pop("rollout"), urls=[lease.address])
        super().__init__("", rollout=rollout, index=0, absence_s=time_limits.SERVER_WARNING_S, **arguments)

    def abandon(self) -> None:
        """End the calls that wait for the engine, and its lease of this job. Any thread may call this."""
        self._ended.set()
        self._error = self._error or self._lost("this job has given it up")
        self._results.put((self._batches, self._error))
        self._client.close()


def check_proof(lease: Lease, token: str) -> None:
    """Check that the engine of the lease is at its address. Nothing secret is sent.

    Raises:
        UserError: something else is there.
        WorkerError: nothing is.
    """
    nonce, answer = secrets.token_hex(16), {}
    url, limit_s = f"{lease.address}{protocol.PROOF}", time_limits.SERVER_CONNECT_S
    try:
        with httpx.stream("GET", url, params={"nonce": nonce}, timeout=limit_s, trust_env=False) as response:
            answer = parse_object(read_answer(response), {"proof": str})
    except (httpx.TransportError, httpx.StreamError) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise WorkerError(f"the engine at {lease.address} does not answer ({reason})", "", "server") from error
    except (httpx.InvalidURL, ValueError):
        pass
    expected = sign(token, protocol.PROOF, nonce, lease.id, lease.address)
    if not hmac.compare_digest(str(answer.get("proof", "")).encode(errors="replace"), expected.encode()):
        raise UserError(
            f"the engine at {lease.address} does not prove that it is the one of its lease: something else answers "
            "there, or it has another token; nothing was sent to it"
        )


class _Host(WorkerThread):
    """The thread of a `JoinedEngine`. It ends with the calls that wait for the engine."""

    def kill(self) -> None:
        super().kill()
        self._abandon()

    def serve(self, channel: str) -> None:
        super().serve(channel)
        self._abandon()  # it may have been built after `kill`

    def _abandon(self) -> None:
        if self.built.done() and self.built.exception() is None:
            self.built.result().abandon()


class Fleet:
    """The engines that have joined a job, as members of its `Engines`.

    A thread reads the registry. `update` and `lose` are for whoever may call `Engines.poll`.

    Args:
        device: of engines that join, `cuda` or `cpu`.

    Raises:
        UserError: the token is missing.
    """

    def __init__(self, cfg: Config, model_path: str, device: str):
        token = fleet_token()
        t = cfg.trainer
        self._root = t.ckpt_path if is_url(t.ckpt_path) else t.run_dir  # of the registry
        self._registry = Registry(self._root, token)
        architecture = protocol.describe_model(cfg.model, model_path, cfg.longest_sequence)
        self._kind, self._model = cfg.rollout.engine, digest(architecture)
        self._registry.write_job(
            {
                "engine": self._kind,
                "model": self._model,
                "model_path": model_path,
                "rollout": asdict(cfg.rollout_of_engines),
                "device": device,
                "seed": cfg.trainer.seed,
                "deterministic": cfg.trainer.deterministic,
                "trust_remote_code": cfg.model.trust_remote_code,
                "longest": cfg.longest_sequence,
            }
        )
        self._job = Job.of_run(cfg.trainer.run_dir, architecture)
        repeats = {"repeats": True} if cfg.trainer.deterministic else {}
        self._arguments = {"token": token, "rollout": cfg.rollout_of_engines, "job": self._job, **repeats}
        self._present: dict[str, Lease] = {}
        self._members: dict[int, Lease] = {}  # by their number among the engines
        self._vacant: list[int] = []  # numbers of engines that have gone
        self._absent_until: dict[str, float] = {}
        self._losses: dict[str, tuple[int, int]] = {}  # the step, and how often it was lost in it
        self._serving: set[str] = set()  # ids of those that have had weights since they were lost
        self._waits = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="registry", daemon=True).start()

    def _watch(self) -> None:
        every_s = time_limits.FLEET_POLL_S * (_REMOTE_POLLS if self._registry.is_remote else 1)
        while not self._ended.wait(every_s):
            try:
                leases = self._registry.leases(time.monotonic())
            except OSError as error:
                self._registry.warn("", f"the registry of engines cannot be read ({describe_error(error)})")
                continue
            present: dict[str, Lease] = {}
            for name, lease in leases.items():
                if lease.kind != self._kind:
                    problem = f"is rollout.engine={lease.kind}, and this job has {self._kind}"
                elif lease.model != self._model:
                    problem = "has another model than this job"
                else:
                    present[name] = lease
                    continue
                self._registry.warn(lease.id, f"the engine at {lease.address} {problem}; it gets nothing")
            self._present = present

    def update(self, engines: Engines) -> None:
        """Add the engines that have joined, and end those that have left."""
        present, now = self._present, time.monotonic()
        for number, lease in list(self._members.items()):
            if lease.id not in present and engines.end([number]) and lease.id in self._serving:
                self._serving.discard(lease.id)
                LOG.info("the engine at %s has left; the other engines take its requests", lease.address)
            if engines.lifecycle[number] is State.DEAD and engines.is_idle(number):
                del self._members[number]
                self._vacant.append(number)
        members = {lease.id for lease in self._members.values()}
        for name, lease in present.items():
            if name not in members and self._absent_until.get(name, 0.0) < now:
                factory = functools.partial(JoinedEngine, lease, **self._arguments)
                title = f"the engine at {lease.address}"
                host = _Host(title, factory, (), contextlib.nullcontext())
                number = engines.admit(self._vacant.pop() if self._vacant else None, title, host, _BACKENDS)
                self._members[number] = lease

    def lose(self, lost: Iterable[int], error: Exception) -> list[int]:
        """Note that engines have failed. Those that have joined cost no restart: return the others."""
        own: list[int] = []
        for number in lost:
            if (lease := self._members.get(number)) is None:
                own.append(number)
                continue
            fact = error.message if isinstance(error, WorkerError) else describe_error(error)
            if isinstance(error, WorkerError) and error.cause == protocol.LEFT:
                self._absent_until[lease.id] = float("inf")
                LOG.info("%s; the other engines take its requests", fact)
            elif isinstance(error, WorkerError) and error.cause == "server":
                step, count = self._losses.get(lease.id, (INCIDENTS.step, 0))
                count = count + 1 if step == INCIDENTS.step else 1
                self._losses[lease.id] = INCIDENTS.step, count
                delay_s = min(time_limits.RESTART_LONGEST_DELAY_S, time_limits.SERVER_RETRY_S * 2**count)
                self._absent_until[lease.id] = time.monotonic() + delay_s
                if lease.id in self._serving:
                    LOG.warning("%s; the other engines take its requests", fact)
                else:
                    self._registry.warn(lease.id, f"{fact}; the job goes on without it")
            else:
                self._absent_until[lease.id] = float("inf")
                LOG.warning("%s; the job does without this engine", fact)
            self._serving.discard(lease.id)
        return own

    def note_joined(self, number: int) -> None:
        """Note that an engine has the current weights for the first time."""
        self._waits = False
        lease = self._members.get(number)
        if lease is not None and lease.id not in self._serving:
            self._serving.add(lease.id)
            LOG.info("the engine at %s has joined", lease.address)

    def note_wait(self) -> None:
        """Say, once, that the run waits for an engine."""
        if not self._waits:
            self._waits = True
            LOG.warning("no engine serves: the run waits until one joins (trainer engine --join %s)", self._root)

    def shutdown(self) -> None:
        """Let the engines that have joined end: the run has."""
        self.leave()
        with contextlib.suppress(OSError):
            self._registry.clear()

    def leave(self) -> None:
        """Look for no more engines. Those that have joined wait for the next start of the run."""
        if self._ended.is_set():
            return
        self._ended.set()
        proved = [lease.address for lease in self._members.values() if lease.id in self._serving]
        leave_servers(proved, self._job)  # the others must not get the token
