"""Who takes part in a fleet: the job, and the engines that have joined it, as signed files beside the run.

The token of inference servers (`process.model_server.TOKEN`) signs each file. So nobody else can let a job send its
weights and prompts to an address, or let an engine load code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from trainer.checkpoint.storage import Storage, open_storage
from trainer.config import Config
from trainer.errors import UserError
from trainer.files.documents import parse_object
from trainer.files.uris import is_url
from trainer.process import time_limits
from trainer.process.model_server import TOKEN, read_token

LOG = logging.getLogger(__name__)

_FOLDER, _JOB = ".engines", "job.json"
_LEASE = re.compile(r"engine-\w+\.json")  # no file that is being written
_LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True)
class Lease:
    """What an engine says of itself while it takes part. It writes that again and again."""

    id: str
    """Of this process of the engine."""
    address: str
    """Where the job reaches it, such as `http://10.0.0.7:4242`."""
    kind: str
    """The value of `rollout.engine`."""
    model: str
    """`digest` of the architecture of the model."""
    version: int
    """Of the weights that it has; -1: none of the job."""
    capacity: int
    """Sequences that it generates at the same time."""
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


def registry_of(cfg: Config) -> str:
    """Return the root of the registry of a run: its object store if it has one, else its directory."""
    return cfg.trainer.ckpt_path if is_url(cfg.trainer.ckpt_path) else cfg.trainer.run_dir


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
        """Remove the lease of an engine."""
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
