"""What a checkpoint costs training, against the usual ways to write one.

    python -m benchmarks.checkpoint [--ranks 2] [--hidden 768] [--layers 8] [--rollout-s 6] [--dir DIR] [--store URL]

One run, one state (AdamW, float32) of at least 1 GB over FSDP2 ranks. Each of `--repeat` rounds measures

- `ours`: seconds that a training loop stands still for a save that is written behind its rollouts,
- `dcp.save`: the same state written synchronously, with fsync,
- `gather`: a full state dict gathered to rank 0 and `torch.save`d, with fsync,
- our write from begin to commit, against one process that writes the same number of bytes with fsync,
- our load, hashes checked, against reading the same files,
- with `--store`, our write to and our read from an object store,

and prints medians and ratios. Rollouts are stood in for by forward passes without gradients on the same
cores, so the writer has to share them.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, TinyConfig
from trainer.models.tiny import build_tiny
from trainer.workers.policy import PolicyWorker
from trainer.workers.rank import Rank


def batch() -> dict[str, Any]:
    """A few short rows: the optimizer step is what matters, not the loss."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows, width = 4, 32
    mask = np.ones((rows, width), np.float32)
    mask[:, 0] = 0
    noise = rng.normal(size=(rows, width)).astype(np.float32)
    return {
        "input_ids": rng.integers(0, 256, (rows, width)), "mask": mask, "advantages": noise * mask,
        "lengths": np.full(rows, width), "group_ids": np.arange(rows) // 2, "old_logprobs": -5.5 * mask,
    }  # fmt: skip


def measure(number: int, args: argparse.Namespace, port: int, model: str, out: str) -> None:
    """One rank's process; rank 0 prints."""
    torch.set_num_threads(1)
    cfg = Config()
    cfg.trainer.mini_batch_size = 2
    cfg.model.path = model
    rank = Rank(cfg, number, args.ranks, "cpu")
    rank.connect(f"127.0.0.1:{port}")
    rank.build(["policy"], model)
    policy, data = rank.roles["policy"], batch()
    assert isinstance(policy, PolicyWorker) and rank.saver is not None
    policy.update(data, 1)  # the optimizer has a state from here on
    times: dict[str, list[float]] = {}

    def clock(name: str, action: Any) -> None:
        dist.barrier()
        started = time.monotonic()
        action()
        dist.barrier()
        times.setdefault(name, []).append(time.monotonic() - started)

    def fresh(name: str) -> str:
        path = os.path.join(out, name)
        if number == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            os.sync()
        dist.barrier()
        return path

    def synchronous(path: str) -> None:
        writer = dcp.FileSystemWriter(path, sync_files=True)
        dcp.save(policy.state(), storage_writer=writer)

    def gathered(path: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(policy.module, policy.optimizer, options=options)
        if number == 0:
            with open(os.path.join(path, "state.pt"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def plain(path: str, size: int) -> None:
        if number == 0:
            block = os.urandom(16 << 20)
            with open(os.path.join(path, "plain"), "wb") as file:
                for _ in range(size // len(block) + 1):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())

    def ours(path: str) -> list[dict]:
        rank.begin_save(["policy"], ShardedFiles(path))
        return rank.finish_save()

    def load(path: str) -> None:
        if number == 0:
            manifests.verify(path, "hash")
        dist.barrier()
        policy.load(ShardedFiles(path), ("weights", "optimizer", "rng"))

    def read(path: str) -> None:
        base = os.path.join(path, "policy")
        for i, name in enumerate(sorted(os.listdir(base))):
            if i % args.ranks == number and os.path.isfile(os.path.join(base, name)):
                with open(os.path.join(base, name), "rb") as file:
                    while file.read(16 << 20):
                        pass

    def rollout() -> None:
        started = time.monotonic()
        while True:
            policy.logprobs(data)
            over = torch.tensor(float(time.monotonic() - started > args.rollout_s))
            dist.all_reduce(over, dist.ReduceOp.MAX)  # all ranks leave together
            if over > 0:
                return

    def loop(path: str) -> float:
        """Save, roll out, step: seconds that this rank stood still for the save."""
        rank.take_blocked()
        started = time.monotonic()
        rank.begin_save(["policy"], ShardedFiles(path))
        begun = time.monotonic() - started
        rollout()
        policy.update(data, 2)
        return begun + rank.take_blocked()

    def one_round() -> int:
        clock("dcp.save, synchronous", lambda: synchronous(fresh("dcp")))
        clock("gather to rank 0 and torch.save", lambda: gathered(fresh("gather")))
        path = fresh("ours/global_step_1")
        entries: list[dict] = []
        clock("our write, begin to durable and hashed", lambda path=path: entries.extend(ours(path)))
        every: list[Any] = [None] * args.ranks
        dist.all_gather_object(every, entries)
        size = sum(entry["bytes"] for part in every for entry in part)
        if number == 0:
            files = [manifests.FileEntry(**entry) for part in every for entry in part]
            with open(os.path.join(path, "manifest.json"), "wb") as file:
                file.write(manifests.dump({"step": 1, "parts": []}, files))
        dist.barrier()
        if args.store:
            prefix = [f"{args.store}/{secrets.token_hex(8)}/global_step_1"]
            dist.broadcast_object_list(prefix)
            clock("our write to the store", lambda: ours(prefix[0]))
            clock("our read from the store", lambda: policy.load(ShardedFiles(prefix[0]), ("weights", "optimizer")))
        clock("plain sequential write", lambda: plain(fresh("plain"), size))
        clock("our load, hashes checked", lambda path=path: load(path))
        clock("reading the files", lambda path=path: read(path))
        blocked = torch.tensor(loop(fresh("loop")))
        dist.all_reduce(blocked, dist.ReduceOp.MAX)
        times.setdefault("ours, blocked in a loop with rollouts", []).append(float(blocked))
        rank.finish_save()
        return size

    size = 0
    for _ in range(args.repeat):
        size = one_round()
    if number == 0:
        show(times, size, args)
    dist.barrier()
    dist.destroy_process_group()


def show(times: dict[str, list[float]], size: int, args: argparse.Namespace) -> None:
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"state: {size / 1e9:.2f} GB on {args.ranks} ranks; medians of {args.repeat}, seconds (smallest, largest)")
    for name, value in median.items():
        print(f"  {name:<42} {value:7.3f}  ({min(times[name]):.3f}, {max(times[name]):.3f})")
    blocked = median["ours, blocked in a loop with rollouts"]
    print(f"blocked, ours / synchronous dcp.save        {blocked / median['dcp.save, synchronous']:8.2%}")
    print(f"blocked, ours / gather and torch.save       {blocked / median['gather to rank 0 and torch.save']:8.2%}")
    write = median["our write, begin to durable and hashed"]
    print(f"write bandwidth, ours / plain write         {median['plain sequential write'] / write:8.2%}")
    load = median["our load, hashes checked"]
    print(f"load time, ours / reading the files         {load / median['reading the files']:8.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--rollout-s", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--store", help="s3:// or gs:// prefix to write to and read from as well; nothing is deleted")
    parser.add_argument("--dir", help="where to write; the default is a temporary directory")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        model = os.path.join(scratch, "model")
        heads = args.hidden // 64
        build_tiny(TinyConfig(hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_layers=args.layers,
                              num_heads=heads, num_kv_heads=heads, head_dim=64), model)  # fmt: skip
        probe.close()
        mp.spawn(measure, (args, port, model, scratch), nprocs=args.ranks)


if __name__ == "__main__":
    main()
