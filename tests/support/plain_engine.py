"""An engine and ranks without a model, in processes of their own: the weights are a number, and a GPU is a file."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.jobs import has_ended
from trainer.cluster.worker_groups import CallFutures, WorkerGroup
from trainer.config import RolloutConfig
from trainer.config.engines import EngineSpec
from trainer.errors import UserError, WorkerError
from trainer.files.atomic_io import write_file
from trainer.generation.engine import Completion, Request, RunningRequests
from trainer.generation.weight_sync import Adapter, Broadcast, Ipc, SharedMemory, WeightSource
from trainer.models.weight_deltas import digest_of

SPEC = EngineSpec(path=f"{__name__}:PlainEngine", transports=("shared_memory", "broadcast"), max_lora_rank=8,
                  environment={"PLAIN": "1"}, cpu_environment={"PLAIN_CPU": "1"})  # fmt: skip


class Gpu:
    """The memory of this process's GPU, of which each living process has a share; more than 100 percent is an error."""

    def __init__(self, directory: Path):
        self._path, self._holder = directory / f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES')}", str(os.getpid())

    def hold(self, percent: int) -> None:
        """Hold this much, instead of what this holder has held."""
        with open(self._path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            held = {pid: share for pid, share in json.loads(file.read() or "{}").items() if not has_ended(int(pid))}
            held[self._holder] = percent
            if sum(held.values()) > 100:
                raise MemoryError(f"CUDA out of memory: {held}")
            file.truncate(0)
            file.write(json.dumps(held))


class PlainEngine:
    """Answers each request with its prompt, its seed, the weights, and the process that has answered."""

    def __init__(self, model_path: str, *, rollout: RolloutConfig, device: str, lora_rank: int | None = None, **_: Any):
        assert os.environ["PLAIN"] == "1" and os.environ.get("PLAIN_CPU") == ("1" if device == "cpu" else None)
        self._directory = Path(model_path)
        self._shares = rollout.colocate and device == "cuda"
        self._gpu = Gpu(self._directory)
        self._lora_rank = lora_rank
        self._weights, self._version, self._asleep = 0, 0, False
        self._take(60)

    def _take(self, percent: int) -> None:
        if self._shares:
            self._gpu.hold(percent)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        assert not self._asleep, "asleep"
        return [
            Completion([*r.prompt_token_ids, r.seed, self._weights], [float(os.getpid())], "length", self._version)
            for r in requests
        ]

    def sync_weights(self, source: WeightSource, version: int) -> None:
        if self._asleep:
            self._take(20)
        match source:
            case SharedMemory(path):
                self._weights = int((Path(path) / "weights").read_text())
            case Adapter(config, weights):
                assert self._lora_rank is not None and config == str(self._directory)
                self._weights = int(weights)
            case Broadcast() | Ipc():
                self._weights = self._receive(version)
        self._version = version
        if self._asleep:
            self._take(0)

    def _receive(self, version: int) -> int:
        """Wait for what the ranks send after they have sent earlier versions."""
        received = [map(int, path.name.split()[1:]) for path in self._directory.glob("received *")]
        last, count = max((number for other, number in received if other != version), default=0), 0
        while count <= last:
            threading.Event().wait(0.01)
            if (self._directory / "sent").exists():
                count, weights = map(int, (self._directory / "sent").read_text().split())
        (self._directory / f"received {version} {count}").touch()
        return weights

    def set_version(self, version: int) -> None:
        self._version = version

    def sleep(self) -> int:
        assert self._shares, "no rank needs its memory"
        self._take(0)
        self._asleep = True
        return 60

    def wake(self) -> None:
        self._take(60)
        self._asleep = False

    def shutdown(self) -> None:
        if (self._directory / "fails at its end").exists():
            raise RuntimeError("CUDA Error: invalid argument")
        self._asleep = True


WAITS = 1000
"""The request `[WAITS, count]` is not answered before `count` others."""


class PatientEngine(PlainEngine):
    """Answers the request `[WAITS, count]` after `count` others, of this engine or others."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = super().generate(requests)
        for first, second in (request.prompt_token_ids.tolist() for request in requests):
            if first == WAITS:
                while len(list(self._directory.glob("answered *"))) < second:
                    threading.Event().wait(0.01)
            else:
                (self._directory / f"answered {first}").touch()
        return completions


class _Streaming(PlainEngine):
    """Completes one request at a time, in their order."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._queue: list[tuple[int, Request, int]] = []
        self._most = options["rollout"].max_num_seqs

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        self._queue += [(number, request, self._version) for number, request in requests.items()]
        assert len(self._queue) <= self._most
        number, request, oldest = self._queue.pop(0)
        completion = self.generate([request])[0]
        return {number: dataclasses.replace(completion, weight_versions=(oldest, self._version))}

    def interrupt(self) -> None:
        """A step returns soon."""

    def sync_weights(self, source: WeightSource, version: int, running: RunningRequests = "abort") -> None:
        if running == "abort":
            self._queue.clear()
        super().sync_weights(source, version)


class StreamingEngine(_Streaming, PatientEngine):
    """Answers as a `PatientEngine`, one request at a time."""


class FaultyEngine(PlainEngine):
    """Fails as files say: `fault KIND PLACE`, where PLACE is a token that begins a prompt, `start`, `sync` or `synced`.

    The engine that comes there first deletes the file.
    """

    def __init__(self, model_path: str, **options: Any):
        super().__init__(model_path, **options)
        self._meet("start")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        kinds = [self._meet(str(request.prompt_token_ids[0])) for request in requests]
        completions = super().generate(requests)
        return [
            dataclasses.replace(completion, logprobs=[math.nan]) if kind == "nan" else completion
            for kind, completion in zip(kinds, completions, strict=True)
        ]

    def sync_weights(self, source: WeightSource, version: int) -> None:
        self._meet("sync")
        super().sync_weights(source, version)
        self._meet("synced")

    def _meet(self, place: str) -> str | None:
        """Fail, or return the kind of fault that the caller brings about."""
        for path in self._directory.glob(f"fault * {place}"):
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another engine came first
            kind = path.name.split()[1]
            if kind == "memory":
                raise MemoryError("no memory")
            if kind == "server":
                raise WorkerError("its server has gone", "", "server")
            while kind == "wait" and not (self._directory / "go on").exists():
                threading.Event().wait(0.01)
            if kind == "nan":
                return kind
            if kind != "wait":
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        return None


class FaultyStreamingEngine(_Streaming, FaultyEngine):
    """Fails as a `FaultyEngine`, and completes one request at a time."""


class SlowEngine(PlainEngine):
    """Starts once there is a file `go`."""

    def __init__(self, model_path: str, **options: Any):
        while not (Path(model_path) / "go").exists():
            threading.Event().wait(0.01)
        super().__init__(model_path, **options)


class ProvingEngine(PlainEngine):
    """Says which adapter it has. The first engine that finds a file `stuck` keeps its old one."""

    _digest = ""

    def sync_weights(self, source: WeightSource, version: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "stuck").unlink()
            self._version = version
            return self._digest
        super().sync_weights(source, version)
        self._digest = digest_of(source.weights)
        return self._digest


class ForgetfulEngine(PlainEngine):
    """Keeps the version that it has."""

    def set_version(self, version: int) -> None:
        pass


class PlainRank:
    """Holds the policy, a number, and after a step the memory that the step took, as torch does."""

    def __init__(self, directory: str, rank: int, world_size: int, device: str):
        self._directory = Path(directory)
        self._gpu, self._rank = Gpu(self._directory), rank
        self._weights = 0

    def compute(self) -> None:
        self._gpu.hold(90)

    def train(self) -> None:
        self.compute()
        self._weights += 1

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None:
        """It keeps 20 percent, or what a file `keeps` says."""
        path = self._directory / "keeps"
        kept = int(path.read_text()) if path.exists() else 20
        self._gpu.hold(kept)
        if self._rank in colocated and needed > 100 - kept:
            raise UserError(f"an engine needs {needed} beside {kept}")

    def weight_bytes(self, dtype: str) -> int:
        return 1000

    def find_address(self, host: str) -> str:
        return f"{host}:1"

    def write_weights(self) -> str:
        (self._directory / "weights").write_text(str(self._weights))
        return str(self._directory)

    def drop_weights(self) -> None:
        (self._directory / "weights").unlink()

    def call(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def send_weights(self, group: Broadcast | Ipc, dtype: str) -> None:
        if self._weights > 1:
            raise ValueError("cannot be sent")
        sent = self._directory / "sent"
        if self._rank == 0:
            count = int(sent.read_text().split()[0]) if sent.exists() else 0
            write_file(str(sent), f"{count + 1} {self._weights}")

    def adapter_config(self, base_model: str) -> str:
        return base_model

    def adapter_weights(self) -> bytes:
        return str(self._weights).encode()


class PlainRanks:
    """The ranks of a policy (see `trainer.learner.train_workers.TrainWorkers`)."""

    def __init__(self, policy: WorkerGroup):
        self.policy = policy

    def call(self, role: str, method: str, *args: Any) -> Any:
        return self.policy.call("call", role, method, *args)[0]

    def call_one(self, role: str, method: str, *args: Any) -> Any:
        return self.policy.call_one(0, "call", role, method, *args)

    def start(self, role: str, method: str, *args: Any) -> CallFutures:
        return self.policy.start("call", role, method, *args)

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None:
        self.policy.call("release_memory", needed, colocated)

    def check_shared(self, dtype: str) -> None:
        pass

    def share_weights(self, dtype: str) -> tuple[str, int]:
        return self.policy.call("write_weights")[0], 0

    def drop_shared(self) -> None:
        self.policy.call_one(0, "drop_weights")
