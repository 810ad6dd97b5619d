"""Weights between two nodes, by difference and by broadcast: `python -m benchmarks.weight_delta [--dtype float32]`.

Two ranks train a model of 100M parameters with AdamW at a learning rate of 1e-6. Two engines (transformers) compute in
bfloat16, or in float32, where nearly all numbers change. Ranks and engines are in two network namespaces, and `tc`
limits their link to 1 Gbit/s, which needs root. In each round, the ranks make one optimizer step. The engines then get
the same weights in each way, in an order that alternates; shared memory needs no link. Prints medians of the seconds
from the call to the new weights in both engines, of the CPU seconds of all processes, and of the bytes that the node of
the engines has received. Fails if the ways do not give the same bits.
"""

from __future__ import annotations

import argparse
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash

from tests.support.namespaces import TwoNetworks
from tests.support.whole_batches import update_batch
from trainer.config import Config, RolloutConfig, policy_role
from trainer.generation.transport import BUCKET_BYTES
from trainer.generation.weight_shards import ShardKeeper, Shards, close_copies
from trainer.generation.weight_sync import Broadcast, SharedMemory
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.weight_deltas import bits_of

RANKS = ENGINES = 2
LINK = "root tbf rate 1gbit burst 1mb latency 50ms"
SHAPE = TinyShape(hidden_size=768, intermediate_size=2304, num_layers=14, num_heads=24, num_kv_heads=12)


class RankProcess:
    """A rank in a process of its own, and the calls that the benchmark makes to it."""

    def __init__(self, number: int, path: str, store: str, dtype: str):
        from benchmarks.ranks import make_batch
        from trainer.workers.rank import Rank

        cfg = Config(rollout=RolloutConfig(dtype=dtype, max_logprob_diff=None))
        cfg.model.path, cfg.trainer.num_workers, cfg.trainer.mini_batch_size = path, RANKS, 10_000
        cfg.trainer.policy.optimizer.lr, cfg.trainer.policy.optimizer.warmup_steps = 1e-6, 0
        self._rank = Rank(cfg, number, RANKS, "cpu")
        self._rank.connect(store)
        self._rank.build([policy_role(cfg)], path)
        self._batch, self._step = make_batch(np.full(4, 24), 30, completion=8, group=2), 0

    def train(self) -> None:
        self._step += 1
        update_batch(self._rank, "policy", self._batch, self._step)

    def call(self, method: str, *args: Any) -> Any:
        return self._rank.call("policy", method, *args)


class EngineProcess:
    """An engine in a process of its own, and the calls that the benchmark makes to it."""

    def __init__(self, number: int, path: str, store: str, dtype: str):
        from trainer.generation.transformers_engine import TransformersEngine

        rollout = RolloutConfig(engine="transformers")
        self._engine = TransformersEngine(path, dtype=dtype, seed=1, rollout=rollout, device="cpu")

    def sync(self, source: Any) -> None:
        self._engine.sync_weights(source, 1)

    def digest(self) -> str:
        """Return a digest of all weights that the engine computes with."""
        content = xxhash.xxh3_128()
        for name, tensor in sorted(self._engine._model.state_dict().items()):
            content.update(name.encode())
            content.update(bits_of(tensor))
        return content.hexdigest()

    def received(self) -> int:
        """Return the bytes that this node has received from the other one."""
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.strip().startswith("outside:"))

    def end(self) -> None:
        close_copies()


class Member:
    """A process in one of the namespaces, and the calls to it."""

    def __init__(self, enter: Sequence[str], kind: str, number: int, interface: str, *where: str):
        self._link, end = Pipe()
        code = "import sys; from benchmarks.weight_delta import serve; serve(int(sys.argv[1]), *sys.argv[2:])"
        command = [*enter, sys.executable, "-c", code, str(end.fileno()), kind, str(number), *where]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        self.process = subprocess.Popen(command, pass_fds=[end.fileno()], env=env, stdout=sys.stderr)
        end.close()

    def begin(self, method: str, *args: Any) -> None:
        self._link.send((method, args))

    def result(self) -> tuple[Any, float]:
        """Return the answer, and the CPU seconds that it took."""
        answer, cpu = self._link.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer, cpu


def serve(handle: int, kind: str, number: str, *where: str) -> None:
    """Answer calls until the other side has ended."""
    import torch

    torch.set_num_threads(1)
    with Connection(handle) as link:
        member = {"rank": RankProcess, "engine": EngineProcess}[kind](int(number), *where)
        link.send((None, 0.0))
        while True:
            try:
                method, args = link.recv()
            except (EOFError, OSError):
                return
            began = time.process_time()
            try:
                answer = getattr(member, method)(*args)
            except Exception as error:
                answer = error
            try:
                link.send((answer, time.process_time() - began))
            except pickle.PicklingError:
                link.send((RuntimeError(repr(answer)), 0.0))


def ask(members: Sequence[Member], method: str, *args: Any) -> tuple[list[Any], float]:
    """Return the answers of all, and the sum of their CPU seconds."""
    for member in members:
        member.begin(method, *args)
    answers = [member.result() for member in members]
    return [answer for answer, _ in answers], sum(cpu for _, cpu in answers)


class Sync:
    """The three ways, as the driver uses them."""

    def __init__(self, ranks: Sequence[Member], engines: Sequence[Member], address: str, directory: str, dtype: str):
        self._dtype = dtype
        self._ranks, self._engines = ranks, engines
        self._token = secrets.token_hex(16)
        self._keeper = ShardKeeper(self._token, (address,) * RANKS, 300.0)
        store = f"file://{directory}/engines"
        self._broadcast = Broadcast(store, ENGINES, "cpu", 300.0, BUCKET_BYTES)

    def delta(self) -> float:
        offers, first = ask(self._ranks, "call", "keep_shards", self._keeper, self._dtype)
        _, second = ask(self._engines, "sync", Shards(self._token, tuple(offers), 300.0))
        return first + second

    def broadcast(self) -> float:
        for rank in self._ranks:
            rank.begin("call", "send_weights", self._broadcast, self._dtype)
        _, cpu = ask(self._engines, "sync", self._broadcast)
        return cpu + sum(rank.result()[1] for rank in self._ranks)

    def shared_memory(self) -> float:
        (path,), opened = ask(self._ranks[:1], "call", "open_shared", self._dtype, 0)
        _, first = ask(self._ranks, "call", "write_weights", path, self._dtype)
        _, second = ask(self._engines, "sync", SharedMemory(path))
        ask(self._ranks[:1], "call", "close_shared")
        return opened + first + second


def measure(sync: Sync, ranks: Sequence[Member], engines: Sequence[Member], rounds: int) -> dict[str, list[tuple]]:
    """Return seconds, CPU seconds and bytes of each sync, by its way. The first round is not counted."""
    found: dict[str, list[tuple]] = {"broadcast": [], "delta": [], "shared_memory": []}
    for number in range(rounds + 1):
        ask(ranks, "train")
        digests = set()
        for way in list(found)[:: 1 if number % 2 else -1]:
            before = ask(engines[:1], "received")[0][0]
            began = time.perf_counter()
            cpu = getattr(sync, way)()
            seconds = time.perf_counter() - began
            size = ask(engines[:1], "received")[0][0] - before
            digests.update(ask(engines, "digest")[0])
            print(f"round {number}, {way}: {seconds:.2f} s, {cpu:.2f} CPU s, {size / 1e6:.1f} MB", file=sys.stderr)
            if number:
                found[way].append((seconds, cpu, size))
        if len(digests) != 1:
            raise SystemExit(f"the engines have different weights in round {number}: {digests}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are counted (default: 7)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the engines")
    arguments = parser.parse_args()
    with TwoNetworks() as networks, tempfile.TemporaryDirectory() as directory:
        for enter, interface in ((networks.inside, "inside"), (networks.outside, "outside")):
            subprocess.run(enter("tc", "qdisc", "replace", "dev", interface, *LINK.split()), check=True)
        where = f"{directory}/model", f"file://{directory}/ranks", arguments.dtype
        build_tiny(SHAPE, where[0])
        ranks = [Member(networks.inside(), "rank", n, "inside", *where) for n in range(RANKS)]
        engines = [Member(networks.outside(), "engine", n, "outside", *where) for n in range(ENGINES)]
        for member in [*ranks, *engines]:
            member.result()
        sync = Sync(ranks, engines, networks.INSIDE, directory, arguments.dtype)
        found = measure(sync, ranks, engines, arguments.rounds)
        ask(engines, "end")
        for member in [*ranks, *engines]:
            member.process.kill()
            member.process.wait()
    base = [median(column) for column in zip(*found["broadcast"], strict=True)]
    print("| way | seconds | CPU seconds | MB | of broadcast's seconds | CPU seconds | bytes |")
    print("|---|---|---|---|---|---|---|")
    for way, rows in found.items():
        seconds, cpu, size = (median(column) for column in zip(*rows, strict=True))
        ratios = " | ".join(f"{value / of:.2f}" for value, of in zip((seconds, cpu, size), base, strict=True))
        print(f"| {way} | {seconds:.2f} | {cpu:.2f} | {size / 1e6:.1f} | {ratios} |")


if __name__ == "__main__":
    main()
