"""How fast weights reach an engine: `python -m benchmarks.weight_sync [--hidden N] [--layers N] [--syncs N]`.

One or more ranks and one engine (transformers) are processes of this machine, as `trainer.ray_address=processes` starts
them. Prints, for each way on this device, the median GB/s from the call to the engine's new weights, and its ratio to a
plain copy of the same bytes in memory, in the same run. Also prints what part of the CPU time in which an engine loads
weights is the digest that proves them. With `--joins N`: how long an engine that joins a job takes to
fetch all weights, as a ratio to the reading of their files. On GPUs, rank and engine share the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import tempfile
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from statistics import median

import torch

from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, RolloutConfig
from trainer.generation.engine import SharedMemory
from trainer.generation.engine_pool import EnginePool
from trainer.generation.fleet import JoinedEngine, Lease
from trainer.generation.server_protocol import Job
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_shards import Shards, ShardServer
from trainer.generation.weight_sync import read_weights
from trainer.inference.engine import EngineGateway, EngineHost
from trainer.learner.train_workers import TrainWorkers
from trainer.models.export_weights import plan_layout
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.weight_deltas import WeightsDigest
from trainer.process.model_server import TOKEN
from trainer.process.network import listen, start_server


def plain_copy(size: int, device: str, repeats: int) -> float:
    """Return the seconds of a copy of so many bytes."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def syncs(cfg: Config, device: str, path: str, count: int) -> tuple[list[float], int]:
    """Return the seconds of each sync, without the first, and its bytes."""
    with ProcessCluster(cfg, device) as cluster:
        ranks = TrainWorkers(cfg, cluster)
        pool = EnginePool(cfg, cluster, ranks, path)
        pool.wait_ready()
        ranks.begin(path)()
        pool.start(version=1, is_initial=True)
        seconds = []
        for version in range(2, count + 3):
            begin = time.perf_counter()
            pool.sync_weights(version)
            seconds.append(time.perf_counter() - begin)
        return seconds[1:], pool.synced_bytes


def proof(path: str, device: str, count: int) -> tuple[float, float]:
    """Return the CPU seconds in which an engine loads the files of a model, and those of the digest of these."""
    engine = TransformersEngine(path, dtype="auto", seed=1, rollout=RolloutConfig(engine="transformers"), device=device)
    loads, digests = [], []
    for version in range(count + 1):
        begin = time.process_time()
        engine.sync_weights(SharedMemory(path), version)
        middle = time.process_time()
        WeightsDigest().add_files(path)
        loads.append(middle - begin)
        digests.append(time.process_time() - middle)
    return median(loads[1:]), median(digests[1:])


def serve_rank(path: str, token: str, end: Connection) -> None:
    """Serve the weights of a model as the only rank does, until the other side has ended."""
    weights = dict(read_weights(path))
    blocks = ((name, (0,) * tensor.dim(), tensor) for name, tensor in weights.items())
    server = ShardServer(token, "127.0.0.1", 300.0)
    end.send(server.keep(plan_layout(weights), blocks))
    end.poll(None)


def join(path: str, device: str, token: str, source: Shards) -> tuple[float, float]:
    """Return the CPU seconds in which an engine reads the files of its model, and in which it fetches all weights."""
    rollout = RolloutConfig(engine="transformers")

    def build() -> TransformersEngine:
        return TransformersEngine(path, dtype="float32", seed=1, rollout=rollout, device=device)

    async def serve() -> tuple[float, float]:
        host = EngineHost(build, streaming=False)
        await host.wait_ready()
        began = time.process_time()
        await host.load({"path": path, "version": 0, "running": "abort"})
        read_s = time.process_time() - began
        with listen("127.0.0.1", 0, "benchmark") as listener:
            lease = Lease("one", f"http://127.0.0.1:{listener.getsockname()[1]}", "transformers", "", -1, 1)
            gateway = EngineGateway(token, lease, {"max_tokens": 8192, "computes": "logprobs", "repeats": True}, {})
            gateway.backend = host
            runner = await start_server(gateway.application(), listener)
            began = time.process_time()
            job = Job("benchmark", 1, "benchmark", owner="benchmark")
            engine = await asyncio.to_thread(JoinedEngine, lease, token, rollout=rollout, job=job)
            await asyncio.to_thread(engine.sync_weights, source, 1)
            pull_s = time.process_time() - began
            engine.abandon()
            await runner.cleanup()
        return read_s, pull_s

    return asyncio.run(serve())


def joining(hidden: int, layers: int, device: str, count: int) -> str:
    """Return a line that says how long an engine that joins takes until it serves."""
    os.environ[TOKEN] = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as path:
        build_tiny(TinyShape(hidden_size=hidden, intermediate_size=3 * hidden, num_layers=layers), path)
        (end, other), token = Pipe(), os.environ[TOKEN]
        rank = get_context("spawn").Process(target=serve_rank, args=(path, token, other), daemon=True)
        rank.start()
        source = Shards(token, (end.recv(),), 300.0)
        rounds = [join(path, device, token, source) for _ in range(count + 1)][1:]
        rank.kill()
    read_s, pull_s = (median(column) for column in zip(*rounds, strict=True))
    ratio = median(pull / read for read, pull in rounds)
    return (
        f"CPU seconds of an engine: reads files in {read_s:.2f}, fetches all weights in {pull_s:.2f}; ratio {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (default: 512)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: 12)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument("--syncs", type=int, default=7, help="syncs that are measured (default: 7)")
    parser.add_argument("--joins", type=int, default=0, help="only measure so many engines that join a job")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.joins:
        print(joining(arguments.hidden, arguments.layers, device, arguments.joins))
        return
    ways = ["ipc", "shared_memory"] if device == "cuda" else ["shared_memory", "broadcast"]
    hidden = arguments.hidden
    tiny = TinyShape(hidden_size=hidden, intermediate_size=3 * hidden, num_layers=arguments.layers)
    with tempfile.TemporaryDirectory() as path:
        build_tiny(tiny, path)
        rows = []
        for way in ways:
            shares = device == "cuda"
            cfg = Config(rollout=RolloutConfig(engine="transformers", weight_sync=way, colocate=shares))
            cfg.trainer.num_workers = arguments.ranks
            cfg.trainer.ray_address = "processes"
            seconds, size = syncs(cfg, device, path, arguments.syncs)
            rows.append((way, median(seconds), size))
        copy = plain_copy(rows[0][2], device, arguments.syncs)
        load, digest = proof(path, device, arguments.syncs)
    print(f"{rows[0][2] / 1e6:.0f} MB, {device}, {arguments.ranks} rank(s); a plain copy: {size / 1e9 / copy:.2f} GB/s")
    print("| way | seconds | GB/s | to a plain copy |\n|---|---|---|---|")
    for way, seconds, size in rows:
        print(f"| {way} | {seconds:.3f} | {size / 1e9 / seconds:.2f} | {copy / seconds:.1%} |")
    print(f"digest of the weights: {digest / load:.3f} of the CPU seconds in which an engine loads them")


if __name__ == "__main__":
    main()
