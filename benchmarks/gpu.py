"""How fast a rank trains on one GPU: `python -m benchmarks.gpu [--models 0.6B 1.7B 4B] [--minutes 8]`.

For Qwen3 models with random weights, on one rank, without Ray, Hydra and vLLM: the seconds, tokens per second, model
FLOPs utilisation (MFU) and peak memory of the log-prob pass and of the update, at micro-batches of 4,096 and 16,384
packed tokens; the speed at which weights go to shared memory, beside a plain copy to the host; and the seconds until a
checkpoint is copied. What does not fit the GPU's memory is tried again with recomputed activations; if that does not
fit either, or no time is left, it is named and left out.

On a machine without a GPU, `--device cpu --models tiny` tries the program itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.whole_batches import compute_batch, update_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, policy_role
from trainer.metrics.timing import peak_flops
from trainer.models.attention import quadratic_cost, uses_varlen
from trainer.parallel.batching import Batch
from trainer.parallel.mesh import destroy_process_group
from trainer.workers.policy import PolicyWorker
from trainer.workers.rank import Rank

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
    },
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
ROW_TOKENS = (256, 1024)
"""Shortest and longest row; the first quarter of each is its prompt."""


def config_of(name: str) -> Qwen3Config:
    return Qwen3Config(**{**COMMON, **SHAPES[name]}, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def make_model(name: str, directory: str, device: str) -> str:
    """Write a Qwen3 model with random weights; returns its path."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    path = os.path.join(directory, name)
    model.save_pretrained(path)
    return path


def make_batch(tokens: int, vocabulary: int) -> Batch:
    """Rows of random tokens, `tokens` in all, in groups of eight."""
    rng = np.random.default_rng(tokens)
    lengths: list[int] = []
    while sum(lengths) + ROW_TOKENS[1] <= tokens:
        lengths.append(int(rng.integers(*ROW_TOKENS)))
    rows, width = len(lengths), max(lengths)
    columns = np.arange(width)
    sizes = np.asarray(lengths)
    mask = ((columns >= sizes[:, None] // 4) & (columns < sizes[:, None])).astype(np.float32)
    return {
        "input_ids": rng.integers(2, vocabulary, (rows, width)),
        "mask": mask,
        "lengths": sizes,
        "group_ids": np.arange(rows) // 8,
        "advantages": rng.normal(size=(rows, width)).astype(np.float32) * mask,
        "old_logprobs": -8 * mask,
        "rollout_logprobs": -8 * mask,
    }


def seconds(function: Callable[[], Any], device: str, repeat: int = 3) -> float:
    """Return the median of the times of `function`, after one run that is not counted."""
    times = []
    for i in range(repeat + 1):
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        if i:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gb(function: Callable[[], Any], device: str) -> float:
    """Return the largest number of GB that tensors take while `function` runs; NaN on a CPU."""
    if device != "cuda":
        function()
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() / 1e9


def forward_flops(worker: PolicyWorker, batch: Batch) -> float:
    """FLOPs of a forward pass over `batch`: two a parameter and token, and the causal attention."""
    config = worker.module.config
    parameters = worker.num_parameters()[0]
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size  # looking up an embedding computes nothing
    sizes = batch["lengths"].astype(np.float64)
    return float(2 * parameters * (sizes + quadratic_cost(worker.module) * sizes**2).sum())


def measure_passes(rank: Rank, name: str, micro_tokens: int, device: str, peak: float) -> None:
    """Print a line each for the log-prob pass and the update at micro-batches of `micro_tokens`."""
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    worker.max_tokens = micro_tokens
    batch = make_batch(2 * micro_tokens, worker.module.config.vocab_size)
    tokens, flops = int(batch["lengths"].sum()), forward_flops(worker, batch)
    scored = {key: batch[key] for key in ("input_ids", "mask", "lengths", "group_ids")}
    for phase, run, cost in (
        ("log-probs", lambda: compute_batch(rank, "policy", "logprobs", scored), flops),
        ("update", lambda: update_batch(rank, "policy", batch, 1), 3 * flops),
    ):
        took = seconds(run, device)
        print(
            f"| {name} | {phase} | {micro_tokens:,} | {took:.3f} s | {tokens / took:,.0f} | {cost / took / peak:.1%} | "
            f"{peak_gb(run, device):.1f} GB |",
            flush=True,
        )


def measure_sync(rank: Rank, name: str, device: str, directory: str) -> None:
    """Print how fast weights go to shared memory, beside a plain copy of as many bytes to the host."""
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    size = worker.weight_bytes("bfloat16")
    whole = torch.empty(size, dtype=torch.uint8, device=device)
    copy = seconds(partial(whole.to, "cpu", copy=True), device)
    del whole
    write = seconds(lambda: worker.write_weights(os.path.join(directory, "sync"), "bfloat16"), device)
    shutil.rmtree(os.path.join(directory, "sync"))
    gather = seconds(lambda: [None for _ in worker.stream_weights("bfloat16")], device)
    print(
        f"{name}: weights of {size / 1e9:.2f} GB: to shared memory {size / write / 1e9:.2f} GB/s "
        f"({copy / write:.0%} of a plain copy to the host), gathered {size / gather / 1e9:.1f} GB/s",
        flush=True,
    )


def measure_staging(rank: Rank, name: str, directory: str) -> None:
    """Print how long the first optimizer step after the begin of a save waits, for the first save and the second."""
    assert rank.saver is not None
    waits = []
    for number in (1, 2):
        files = ShardedFiles(os.path.join(directory, f"save{number}"))
        begin = time.perf_counter()
        rank.begin_save(["policy"], files)
        rank.saver.wait_until_staged()
        waits.append(time.perf_counter() - begin)
        entries = rank.finish_save()
        written = time.perf_counter() - begin
        size = sum(entry["bytes"] for entry in entries)
        shutil.rmtree(files.directory)
    print(
        f"{name}: checkpoint of {size / 1e9:.2f} GB: copied in {waits[0]:.2f} s, then {waits[1]:.2f} s "
        f"({size / waits[1] / 1e9:.1f} GB/s), written after {written:.1f} s",
        flush=True,
    )


def fits(rank: Rank, name: str, micro_tokens: int, device: str, peak: float) -> bool:
    """Return whether the passes fit the memory of the GPU, and print how fast they are.

    The caller continues after the `except` block, because the traceback of the error holds the worker and its memory.
    """
    try:
        measure_passes(rank, name, micro_tokens, device, peak)
    except torch.OutOfMemoryError:
        return False
    return True


def build_again(rank: Rank, path: str, recompute: str) -> None:
    """Build the policy again with this kind of recomputation, because its passes were interrupted."""
    rank.roles.clear()
    gc.collect()
    if rank.device == "cuda":
        torch.cuda.empty_cache()
    rank.cfg.trainer.policy.fsdp.activation_checkpointing = recompute
    rank.build([policy_role(rank.cfg)], path)


def measure_micro_batches(rank: Rank, name: str, path: str, args: argparse.Namespace, peak: float) -> None:
    """Print how fast the passes are at each size of the micro-batches, with recomputation where it must be."""
    for micro_tokens in args.tokens:
        if fits(rank, name, micro_tokens, args.device, peak):
            continue
        if rank.cfg.trainer.policy.fsdp.activation_checkpointing != "full":
            print(f"| {name} | out of memory, so activations are recomputed now | {micro_tokens:,} |", flush=True)
            build_again(rank, path, "full")
            if fits(rank, name, micro_tokens, args.device, peak):
                continue
        print(f"| {name} | out of memory, left out | {micro_tokens:,} |", flush=True)
        build_again(rank, path, "full")


def measure(name: str, args: argparse.Namespace, directory: str, peak: float) -> None:
    path = make_model(name, directory, args.device)
    cfg = Config()
    cfg.model.path = path
    cfg.trainer.mini_batch_size = 10_000  # one optimizer step an update
    cfg.rollout.max_logprob_diff = None  # the log-probs of the batch are invented
    cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
    cfg.trainer.policy.fsdp.activation_checkpointing = args.recompute
    rank = Rank(cfg, 0, 1, args.device)
    rank.connect(f"file://{directory}/store-{name}")
    try:
        begin = time.perf_counter()
        rank.build([policy_role(rank.cfg)], path)
        print(f"{name}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        measure_micro_batches(rank, name, path, args, peak)
        measure_sync(rank, name, args.device, directory)
        if name in args.no_staging:
            pass
        elif shutil.disk_usage(directory).free < 1.1 * 12 * count_parameters(name):  # bytes of a checkpoint
            print(f"{name}: no checkpoint, {directory} has no room for it", flush=True)
        else:
            measure_staging(rank, name, directory)
    finally:
        rank.roles.clear()
        destroy_process_group()
        shutil.rmtree(path)


def count_parameters(name: str) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name)).num_parameters()


def problem_of(name: str, memory: int) -> str | None:
    """Return why a GPU of `memory` bytes cannot train the model; None: it may.

    Weights, gradients and two moments of AdamW in float32 take 16 bytes a parameter, without any activations.
    """
    needed = 16 * count_parameters(name)
    return None if needed < memory else f"it needs {needed / 1e9:.0f} GB, and the GPU has {memory / 1e9:.0f} GB"


def place_for(name: str, saves: bool = True) -> str | None:
    """Return `/dev/shm` if it has room for the files of a model; None: a temporary directory on a disk.

    They take 4 bytes a parameter for weights and one sync in bfloat16, and 12 for a checkpoint.
    """
    size = 16 if saves else 4
    has_room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1.1 * size * count_parameters(name)
    return "/dev/shm" if has_room else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="tokens of a micro-batch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--no-staging", nargs="*", choices=list(SHAPES), default=[], help="write no checkpoint of these"
    )
    modes = ["none", "selective", "full"]
    parser.add_argument("--recompute", choices=modes, default="none", help="activation checkpointing")
    parser.add_argument("--minutes", type=float, default=8, help="begin no further model after this time")
    args = parser.parse_args()
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = peak_flops(device_name) or float("nan")
    began = time.perf_counter()
    kernel = uses_varlen(args.device, torch.bfloat16, COMMON["head_dim"], None)
    print(f"{device_name}, torch {torch.__version__}, attention by the variable-length kernel: {kernel}\n")
    print("| model | phase | micro-batch | time | tokens/s | MFU | peak memory |\n" + "|---" * 7 + "|", flush=True)
    for name in args.models:
        if time.perf_counter() - began > args.minutes * 60:
            print(f"{name}: left out, the time is over")
            continue
        memory = torch.cuda.get_device_properties(0).total_memory if args.device == "cuda" else None
        if memory is not None and (problem := problem_of(name, memory)) is not None:
            print(f"{name}: left out, {problem}")
            continue
        with tempfile.TemporaryDirectory(dir=place_for(name, name not in args.no_staging)) as directory:
            measure(name, args, directory, peak)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
