"""Where the jobs of a soak run: a small disk, an object store behind a proxy, a model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.soak.cluster import Cluster
from tests.soak.kinds import Kind
from tests.soak.processes import family
from tests.soak.wire import Wire
from tests.support.buckets import make_bucket, s3_server, use_s3
from tests.support.fault_proxy import CUT, ERROR, LOST, PASS, SLOW, SLOW_DOWN, Faults, fault_proxy
from tests.support.fleets import TOKEN, Crew
from tests.support.gcs import gcs_server, use_gcs
from tests.support.inference import Server
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process.model_server import TOKEN as VARIABLE

DISK_BYTES = 96 << 20
_BUCKET = "soak"
_SERVER = (*("rollout.max_response_tokens=256", "rollout.max_num_seqs=32"),)
_SERVER_LIMITS = "SERVER_LEASE_S=5 SERVER_HANG_S=10"


class Scene:
    """What all jobs of one soak share: `with Scene(directory) as scene`.

    Args:
        has_mounts: this process may mount, and no other process sees its mounts.
    """

    def __init__(self, directory: Path, has_mounts: bool):
        self.directory = directory
        self.has_disk = has_mounts
        self.disk = directory / "disk"
        self.model = directory / "model"
        self.store = Faults()
        self._server: tuple[Server, Wire] | None = None

    def __enter__(self) -> Scene:
        self._stack = contextlib.ExitStack()
        self.disk.mkdir()
        if self.has_disk:
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.disk)], check=True)
            self._stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
        build_tiny(TinyShape(**sizes, head_dim=32), str(self.model))
        build_tiny(TinyShape(**sizes, head_dim=16), str(self.directory / "teacher"))
        games = [{"prompt": f"p{i}", "turns": 3, "stops": False} for i in range(10)]
        (self.directory / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
        pairs = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
        (self.directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        self._s3, google = (self._stack.enter_context(server()) for server in (s3_server, gcs_server))
        proxies = [self._stack.enter_context(fault_proxy(server, self.store)) for server in (self._s3, google)]
        patch = pytest.MonkeyPatch()
        self._stack.callback(patch.undo)
        use_gcs(patch, google)
        patch.setenv(VARIABLE, TOKEN)
        self.environment = {**use_s3(patch, self._s3), "AWS_ENDPOINT_URL": proxies[0]}
        for name in ("FSSPEC_GS", "FSSPEC_GCS"):
            self.environment[name] = json.dumps({"endpoint_url": proxies[1], "token": "anon"})
            patch.setenv(name, self.environment[name])  # for the process whose forks the jobs are
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def server(self) -> tuple[Server, Wire]:
        """Return the inference server, and the wire to it. It starts at the first call."""
        if self._server is None:
            log = self.directory / "server.log"
            words = (f"model.path={self.model}", *_SERVER)
            server = self._stack.enter_context(Server(log, *words, limits=_SERVER_LIMITS)).wait()
            self._server = server, self._stack.enter_context(Wire(server.port))
        return self._server

    def empty_store(self) -> None:
        """Let the object store work again; delete everything in that of S3, and make the bucket again."""
        self.store.plan, self.store.seen = lambda *_: PASS, []
        request = urllib.request.Request(f"{self._s3}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).close()

        make_bucket(_BUCKET)

    @contextlib.contextmanager
    def full_disk(self, bytes_left: int) -> Iterator[None]:
        """Fill the disk while the block runs."""
        filler = self.disk / "filler"
        try:
            with open(filler, "wb", buffering=0) as file:
                _fill(file.fileno())
                os.ftruncate(file.fileno(), max(0, os.fstat(file.fileno()).st_size - bytes_left))
            yield
        finally:
            filler.unlink(missing_ok=True)

    @contextlib.contextmanager
    def faulty_store(self, numbers: random.Random, share: float) -> Iterator[None]:
        """Let this share of the requests fail or wait while the block runs, each in a way that is drawn."""
        ways = (ERROR, SLOW_DOWN, CUT, LOST, SLOW)
        self.store.plan = lambda *_: numbers.choice(ways) if numbers.random() < share else PASS
        try:
            yield
        finally:
            self.store.plan = lambda *_: PASS

    @contextlib.contextmanager
    def cut_store(self) -> Iterator[None]:
        """Let no request reach the store while the block runs."""
        self.store.plan = lambda *_: CUT
        try:
            yield
        finally:
            self.store.plan = lambda *_: PASS


def _fill(descriptor: int) -> None:
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, bytes(size))


class Workspace(contextlib.ExitStack):
    """Where one job runs: directories, a prefix in the object store, perhaps nodes."""

    def __init__(self, scene: Scene, kind: Kind, directory: Path):
        super().__init__()
        self.scene = scene
        self.kind = kind
        self.directory = directory
        self.run = directory / "run"
        self.local = directory / "local" if kind.storages == {"disk", "store"} else None
        self.root = (
            f"{kind.scheme}://{_BUCKET}/{directory.name}" if "store" in kind.storages else str(self.run / "checkpoints")
        )
        self.log = directory / "log"
        self.cluster: Cluster | None = None
        self._crew = Crew(self.run, every_s=0.5) if kind.has_fleet else None

    def __enter__(self) -> Workspace:
        self.directory.mkdir()
        if self._crew is not None:
            self.callback(self._crew.kill)
        if self.kind.is_served:
            _ = self.server  # it starts before the job is timed
        if self.kind.on_nodes:
            self.cluster = self.enter_context(Cluster())
        return self

    def disturb_fleet(self) -> None:
        """Let engines come and go, if the job has a fleet. Called all the time while it runs."""
        if self._crew is not None:
            self._crew.disturb(0)

    @property
    def server(self) -> tuple[Server, Wire]:
        """The inference server of the job, and the wire to it."""
        return self.scene.server()

    @property
    def overrides(self) -> list[str]:
        """The settings of the job."""
        given = [word.replace("{scene}", str(self.scene.directory)) for word in self.kind.overrides]
        given += [f"model.path={self.scene.model}", f"trainer.run_dir={self.run}", f"trainer.ckpt_path={self.root}"]
        given += [f"trainer.ckpt_cache_dir={self.local}"] if self.local else []
        given += [f"rollout.urls=[{self.server[1].url}]"] if self.kind.is_served else []
        return [*given, f"trainer.ray_address={self.cluster.head.ray_address}"] if self.cluster else given

    def driver(self, job: int) -> int | None:
        """Return the process of the driver; None: it has not started yet, or has ended.

        On nodes, the process of the job is the one that has entered the node, and the driver is its child.
        """
        if self.cluster is None:
            return job
        return next((child.pid for child in psutil.Process(job).children()), None)

    def processes(self, job: int) -> list[psutil.Process]:
        """Return the processes of a job; empty if it has ended."""
        return [*family(job), *(self.cluster.members() if self.cluster else [])]

    def lines(self) -> int:
        """Return the number of steps in `metrics.jsonl`."""
        try:
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0
