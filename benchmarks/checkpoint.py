"""What a checkpoint costs training, against the usual ways to write one.

    python -m benchmarks.checkpoint [--ranks 2] [--hidden 768] [--layers 13] [--rollout-s 6] [--loads] [--store URL]

One run, one state (AdamW, float32) of at least 1 GB over FSDP2 ranks. Each of `--repeat` rounds measures

- `blocked`: seconds that a training loop waits for a save that is written behind its rollouts,
- `dcp.save`: the same state written synchronously, with fsync,
- `gather`: a full state dict gathered to rank 0 and `torch.save`d, with fsync,
- our write from begin to commit, against one process that writes the same number of bytes with fsync,
- our load, hashes checked, against reading the same files, also in CPU time, because machines are shared,
- the same of ours in an object store, against one process that puts and gets as many bytes, in one round.

It prints medians and ratios. Rollouts are stood in for by forward passes without gradients on the same cores, so the
writer has to share them. The store is at `--store`, where the benchmark deletes what it has written, or else moto's S3
server on this machine, which has to share the cores too; `--store none` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from benchmarks.ranks import make_batch
from tests.support.whole_batches import compute_batch, update_batch
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.buckets import client_of
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.sharded import ShardCheck, ShardedFiles
from trainer.checkpoint.storage import open_storage
from trainer.config import Config, RolloutConfig, policy_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.policy import PolicyWorker
from trainer.workers.rank import Rank

_BLOCK = 16 << 20
_LOADS = 3  # in each round, alternating with reading
DCP, GATHER, PLAIN = "dcp.save, synchronous", "gather to rank 0 and torch.save", "plain sequential write"
WRITE, LOAD = "our write, begin to durable and hashed", "our load, hashes checked"
READ, BLOCKED = "reading the files", "ours, blocked in a loop with rollouts"
STORE_WRITE, STORE_LOAD, STORE_BLOCKED = (f"store: {name}" for name in (WRITE, LOAD, BLOCKED))
STORE_PUT, STORE_GET = "store: one process puts as many bytes", "store: one process gets them"


class Measured:
    """One rank, with a policy and its optimizer, and the times of what it has done."""

    def __init__(self, number: int, args: argparse.Namespace, port: int, model: str):
        cfg = Config(rollout=RolloutConfig(max_logprob_diff=None))  # the log-probs of the batch are made up
        cfg.trainer.mini_batch_size = 2
        cfg.model.path = model
        self.number, self.args, self.size = number, args, 0
        self.times: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.rank = Rank(cfg, number, args.ranks, "cpu")
        self.rank.connect(f"127.0.0.1:{port}")
        self.rank.build([policy_role(self.rank.cfg)], model)
        worker = self.rank.roles["policy"]
        assert isinstance(worker, PolicyWorker)
        self.policy, self.data = worker, make_batch(np.full(4, 32), 256, completion=31)
        update_batch(self.rank, "policy", self.data, 1)  # the optimizer has a state from here on

    def clock(self, name: str, action: Callable[[], Any]) -> Any:
        """Measure what all ranks do together; return what `action` returns."""
        dist.barrier()
        started, cpu_started = time.monotonic(), time.process_time()
        result = action()
        cpu = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)  # without the waiting of gloo
        dist.barrier()
        self.times.setdefault(name, []).append(time.monotonic() - started)
        dist.all_reduce(cpu)
        self.cpu.setdefault(name, []).append(float(cpu))
        return result

    def synchronous(self, path: str) -> None:
        dcp.save(self.policy.state(), storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def gathered(self, path: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(self.policy.module, self.policy.optimizers.all, options=options)
        if self.number == 0:
            with open(os.path.join(path, "state.pt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def plain(self, path: str) -> None:
        if self.number == 0:
            block = os.urandom(_BLOCK)
            with open(os.path.join(path, "plain"), "wb") as file:
                for _ in range(self.size // len(block) + 1):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())

    def put(self, path: str) -> None:
        if self.number == 0:
            block = os.urandom(_BLOCK)
            with open_storage(path).open_writer("plain") as stream:
                for _ in range(self.size // len(block) + 1):
                    stream.write(block)

    def get(self, path: str) -> None:
        if self.number == 0:
            open_storage(path).digest("plain")

    def write(self, path: str) -> list[dict]:
        self.rank.begin_save(["policy"], ShardedFiles(path))
        return self.rank.finish_save()

    def commit(self, path: str, entries: list[dict]) -> None:
        """Write the manifest of a checkpoint; `entries` are this rank's."""
        every: list[Any] = [None] * self.args.ranks
        dist.all_gather_object(every, entries)
        files = [entry for part in every for entry in part]
        self.size = sum(entry["bytes"] for entry in files)
        if self.number == 0:
            content = {"step": 1, "parts": [], "saved_at": datetime.now(UTC).isoformat(), "parent_step": None}
            open_storage(path).write(MANIFEST, manifests.dump({**content, "files": files}))
        dist.barrier()

    def load(self, path: str) -> None:
        checkpoint = manifests.verify(path, "unsharded") if self.number == 0 else manifests.read(path)
        check = ShardCheck(checkpoint)
        every: list[Any] = [None] * self.args.ranks
        dist.all_gather_object(every, check.run())
        for problem, places in every:
            assert problem is None, problem
            check.share(places)
        dist.barrier()
        self.policy.load(ShardedFiles(path), ("weights", "optimizer", "rng"))
        dist.barrier()  # another rank may read from the memory of this one
        check.release()

    def read(self, path: str) -> None:
        base = os.path.join(path, "policy")
        for i, name in enumerate(sorted(os.listdir(base))):
            if i % self.args.ranks == self.number and os.path.isfile(os.path.join(base, name)):
                with open(os.path.join(base, name), "rb") as file:
                    while file.read(_BLOCK):
                        pass

    def rollout(self) -> None:
        started = time.monotonic()
        while True:
            compute_batch(self.rank, "policy", "logprobs", self.data)
            over = torch.tensor(float(time.monotonic() - started > self.args.rollout_s))
            dist.all_reduce(over, dist.ReduceOp.MAX)  # all ranks leave together
            if over > 0:
                return

    def loop(self, name: str, path: str) -> None:
        """Save, roll out, step, and note the seconds that the slowest rank stood still for the save."""
        self.rank.pop_stall_seconds()
        started = time.monotonic()
        self.rank.begin_save(["policy"], ShardedFiles(path))
        begun = time.monotonic() - started
        self.rollout()
        update_batch(self.rank, "policy", self.data, 2)
        blocked = torch.tensor(begun + self.rank.pop_stall_seconds())
        dist.all_reduce(blocked, dist.ReduceOp.MAX)
        self.times.setdefault(name, []).append(float(blocked))
        self.rank.finish_save()


def local_round(ours: Measured, out: str) -> None:
    def fresh(name: str) -> str:
        path = os.path.join(out, name)
        if ours.number == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            os.sync()
        dist.barrier()
        return path

    checkpoint = fresh("ours/global_step_1")
    ours.commit(checkpoint, ours.clock(WRITE, lambda: ours.write(checkpoint)))
    for _ in range(_LOADS):
        ours.clock(LOAD, lambda: ours.load(checkpoint))
        ours.clock(READ, lambda: ours.read(checkpoint))
    if ours.args.loads:
        return
    path = fresh("dcp")
    ours.clock(DCP, lambda: ours.synchronous(path))
    path = fresh("gather")
    ours.clock(GATHER, lambda: ours.gathered(path))
    path = fresh("plain")
    ours.clock(PLAIN, lambda: ours.plain(path))
    ours.loop(BLOCKED, fresh("loop"))


def store_round(ours: Measured, url: str) -> None:
    draw = [f"{url}/{secrets.token_hex(8)}"]
    dist.broadcast_object_list(draw)
    root = draw[0]
    checkpoint = f"{root}/global_step_1"
    ours.commit(checkpoint, ours.clock(STORE_WRITE, lambda: ours.write(checkpoint)))
    ours.clock(STORE_PUT, lambda: ours.put(root))
    ours.clock(STORE_LOAD, lambda: ours.load(checkpoint))
    ours.clock(STORE_GET, lambda: ours.get(root))
    if not ours.args.loads:
        ours.loop(STORE_BLOCKED, f"{root}/global_step_2")
    dist.barrier()
    if ours.number == 0:
        open_storage(root).delete_below("")
    dist.barrier()


def measure(number: int, args: argparse.Namespace, port: int, model: str, out: str) -> None:
    """One rank's process; rank 0 prints."""
    torch.set_num_threads(1)
    ours = Measured(number, args, port, model)
    for _ in range(args.repeat):
        local_round(ours, out)
    if args.store != "none":
        store_round(ours, args.store)
    if number == 0:
        show(ours, args)
    dist.barrier()
    dist.destroy_process_group()


def show(ours: Measured, args: argparse.Namespace) -> None:
    times, size = ours.times, ours.size
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"state: {size / 1e9:.2f} GB on {args.ranks} ranks; medians of {args.repeat}, seconds (smallest, largest)")
    for name, value in median.items():
        print(f"  {name:<46} {value:7.3f}  ({min(times[name]):.3f}, {max(times[name]):.3f})")
    cpu = {name: statistics.median(values) for name, values in ours.cpu.items()}
    print(f"load time, ours / reading the files               {median[LOAD] / median[READ]:8.2f}x")
    print(f"load, CPU time of the ranks, ours / reading       {cpu[LOAD] / cpu[READ]:8.2f}x")
    if BLOCKED in median:
        print(f"blocked, ours / synchronous dcp.save              {median[BLOCKED] / median[DCP]:8.2%}")
        print(f"blocked, ours / gather and torch.save             {median[BLOCKED] / median[GATHER]:8.2%}")
        print(f"write bandwidth, ours / plain write               {median[PLAIN] / median[WRITE]:8.2%}")
    if STORE_WRITE in median:
        if BLOCKED in median:
            print(f"blocked, ours in the store / on the disk          {median[STORE_BLOCKED] / median[BLOCKED]:8.2f}x")
        print(f"store: write bandwidth, ours / one process        {median[STORE_PUT] / median[STORE_WRITE]:8.2%}")
        print(f"store: load time, ours / one process reads        {median[STORE_LOAD] / median[STORE_GET]:8.2f}x")


@contextmanager
def place_in_store(url: str | None) -> Iterator[str]:
    """Yield `url`, or without one the URL of a bucket on an S3 server in this process."""
    if url is not None:
        yield url.rstrip("/")
        return
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # or it prints every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
            "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": 600}}),  # it joins the parts of an object slowly
        }
        client_of("s3").api.create_bucket(Bucket="benchmark")
        yield "s3://benchmark"
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--rollout-s", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--loads", action="store_true", help="measure loads alone")
    parser.add_argument("--store", help="s3:// or gs:// prefix, or none; the default is an S3 server on this machine")
    parser.add_argument("--dir", help="where to write; the default is a temporary directory")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(dir=args.dir) as scratch,
        socket.socket() as probe,
        place_in_store(args.store) as args.store,
    ):
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        model = os.path.join(scratch, "model")
        heads = args.hidden // 64
        size = TinyShape(hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_layers=args.layers,
                          num_heads=heads, num_kv_heads=heads, head_dim=64)  # fmt: skip
        build_tiny(size, model)
        probe.close()
        mp.spawn(measure, (args, port, model, scratch), nprocs=args.ranks)


if __name__ == "__main__":
    main()
