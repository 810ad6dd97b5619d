"""What a job and an inference server say to each other over HTTP: who asks, requests, completions, where weights are.

A stream of completions has one JSON list of completions a line. An empty line says that the server lives.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.trainer import ModelConfig
from trainer.files.documents import parse_json
from trainer.generation.engine import CUT, Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LEASE, RENEW, RELEASE = "/trainer/lease", "/trainer/renew", "/trainer/release"
GENERATE, WEIGHTS, UPLOAD = "/trainer/generate", "/trainer/weights", "/trainer/upload"
PROOF = "/trainer/proof"
"""Where an engine that has joined a job proves that it is the one of the registry. The only path without a token."""
OWNER, START = "X-Trainer-Owner", "X-Trainer-Start"
"""Headers of every request of a job: its `Job.owner`, and the start of the engine that it has sent weights to."""
BYTES = "X-Trainer-Bytes"  # header of an upload: bytes of all files of these weights
VERSION = "X-Trainer-Version"
"""Header of a batch: the version of the weights that must generate it, such as `7`; `7+`: it or a later one."""
LARGEST_BODY = 1 << 32  # bytes of the requests of one batch
ALIVE_S = 2.0  # between two empty lines of a stream

LOST, REFUSED, BUSY, ABSENT, IN_USE, LEFT = "lost", "refused", "busy", "absent", "in use", "left"
"""Kinds of errors: the engine has lost the weights, or the server another engine; the job must change something;
the server cannot answer now; the files are on another machine; another job has the server; the engine leaves the job,
and completes nothing any more."""

_STARTS_FILE = "starts.jsonl"  # file of a run with one line for each start (see `trainer.run.run_metadata`)


@dataclass(frozen=True)
class Job:
    """Who uses a server."""

    run: str
    """Digest of the first start of the run, and of its directory: that of all its starts. A copy has another one."""
    start: int  # Number of this start. A later one takes the server from an earlier one.
    name: str  # what messages call it
    engine: int = 0  # which engine of the job the process is
    owner: str = ""  # secret of the job, or of one of its processes (see `of_process`)
    architecture: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Of the model (see `describe_architecture`)."""

    def of_process(self, engine: int) -> Job:
        """Return the same for a new process that speaks to a server. Its secret begins with that of the job."""
        return replace(self, engine=engine, owner=f"{self.owner}.{secrets.token_hex(16)}")

    @staticmethod
    def of_run(run_dir: str, architecture: Mapping[str, Any]) -> Job:
        """Return the current start of the run in `run_dir`, whose lock this process holds, with a new secret."""
        try:
            with open(os.path.join(run_dir, _STARTS_FILE), "rb") as file:
                lines = file.readlines()
        except OSError:
            lines = []
        path = os.path.realpath(run_dir)
        inode = os.stat(path).st_ino if os.path.isdir(path) else 0  # without the device, which nodes number otherwise
        first = lines[0] if lines else b""  # a line names time, host and process
        run = hashlib.sha256(first + f"{inode} {path}".encode()).hexdigest()[:16]
        name = f"run {os.path.basename(path)} (process {os.getpid()} on {socket.gethostname()})"
        return Job(run, len(lines), name, owner=secrets.token_hex(16), architecture=architecture)


def owners_of(owner: str) -> tuple[str, str]:
    """Return the secret of a process and that of its job. They are equal for a job itself."""
    return owner, owner.partition(".")[0]


def encode_requests(requests: Mapping[int, Request]) -> bytes:
    """Return requests, by number, as JSON."""
    samplings: dict[Sampling, int] = {}
    rows = [
        [
            number,
            _packed(request.prompt_token_ids, "<i4"),
            request.seed,
            samplings.setdefault(request.sampling, len(samplings)),
        ]
        for number, request in requests.items()
    ]
    return json.dumps({"samplings": [asdict(sampling) for sampling in samplings], "requests": rows}).encode()


def decode_requests(body: bytes) -> dict[int, Request]:
    """Return the requests of `encode_requests`.

    Raises:
        ValueError: they are no such requests.
    """
    try:
        message = json.loads(body)
        samplings = [
            Sampling(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])})
            for sampling in message["samplings"]
        ]
        return {
            int(number): Request(_unpacked(prompt, "<i4"), int(seed), samplings[sampling])
            for number, prompt, seed, sampling in message["requests"]
        }
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no requests ({error!r})") from error


def encode_completions(completions: Mapping[int, Completion]) -> bytes:
    """Return completions, by the numbers of their requests, as one line."""
    rows = [
        [
            number,
            _packed(completion.token_ids, "<i4"),
            _packed(completion.logprobs, "<f4"),
            completion.finish_reason,
            completion.weight_versions,
            completion.version_spans,
        ]
        for number, completion in completions.items()
    ]
    return json.dumps(rows).encode() + b"\n"


def decode_completions(line: str | bytes) -> dict[int, Completion]:
    """Return the completions of a line.

    Raises:
        ValueError: they are no completions.
    """
    try:
        found: dict[int, Completion] = {}
        for number, tokens, logprobs, reason, (oldest, newest), spans in parse_json(line):
            found[int(number)] = completion = Completion(
                _unpacked(tokens, "<i4"),
                _unpacked(logprobs, "<f4"),
                reason,
                (int(oldest), int(newest)),
                tuple((int(version), int(size)) for version, size in spans),
            )
            if len(completion.token_ids) != len(completion.logprobs):
                raise ValueError("not as many log-probs as tokens")
        return found
    except (TypeError, OverflowError) as error:
        raise ValueError(f"no completions ({error})") from error


def check_completion(completion: Completion, request: Request | None, versions: tuple[int, int], vocab: float) -> None:
    """Raise a ValueError unless `completion` may be that of `request`; None: nobody waits for it.

    Args:
        versions: the oldest and the newest weights that may have generated it.
        vocab: number of tokens of the model.
    """
    tokens, used, spans = completion.token_ids, completion.weight_versions, completion.version_spans
    if request is None or completion.finish_reason not in ("stop", "length", CUT):
        raise ValueError("a completion that nobody waits for, or that has not ended")
    if not 0 < len(tokens) <= request.sampling.max_tokens or not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ValueError(f"{len(tokens)} tokens, more than were asked for, or some that the model does not have")
    if not versions[0] <= used[0] <= used[1] <= versions[1]:
        raise ValueError(f"tokens of the weights {used}, expected {versions}")
    if spans and (sum(size for _, size in spans) != len(tokens) or not {*used} <= {version for version, _ in spans}):
        raise ValueError("parts of several weights that are not the tokens")


def fingerprint(directory: str) -> dict[str, list[int]]:
    """Return what tells the files of `directory` from all others of any machine: inode, bytes and time of each."""
    with os.scandir(directory) as entries:
        stats = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    return {name: [stat.st_ino, stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())}


def error_body(kind: str, text: str) -> dict[str, str]:
    """Return the JSON of an error: one of the kinds above, and one sentence."""
    return {"kind": kind, "error": text}


def _packed(values: np.ndarray | Iterable[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()


async def with_signs_of_life(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of an answer that takes long, and an empty line whenever none has come for `ALIVE_S`."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(lines))
            while not (await asyncio.wait([waiting], timeout=ALIVE_S))[0]:
                yield b"\n"
            try:
                line, waiting = waiting.result(), None
            except StopAsyncIteration:
                return
            yield line
    finally:
        if waiting is not None:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await waiting
        await lines.aclose()  # type: ignore[attr-defined]


_WITHOUT_EFFECT = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict", "problem_type"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
}
"""Values that decide nothing of what a model computes from given weights."""
_WITHOUT_EFFECT_PARTS = ("_token_id", "dropout", "initializer", "loss_coef")


def describe_model(model: ModelConfig, path: str, longest: int) -> dict[str, Any]:
    """Return `describe_architecture` of the model at `path`, for sequences of up to `longest` tokens."""
    from trainer.models.files import fit_rotations, load_config

    config = load_config(model, path)
    fit_rotations(config, longest, f"model.path={path}")
    return describe_architecture(config)


def describe_architecture(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values that decide what a model computes from its weights, by name (`rope_parameters.rope_theta`)."""
    found: dict[str, Any] = {}

    def add(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if name in _WITHOUT_EFFECT or name.startswith("_") or any(part in name for part in _WITHOUT_EFFECT_PARTS):
                continue
            if isinstance(value, dict):
                add(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    add(json.loads(config.to_json_string(use_diff=False)), "")
    return found
