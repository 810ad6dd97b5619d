"""How well `trainer plan` predicts a GPU: `python -m benchmarks.gpu_plan [--models 0.6B 1.7B] [--gpu 1xH100]`.

For Qwen3 models with random weights on one rank, without Ray, Hydra and vLLM: the peak memory and the time of a step's
log-prob pass and update, planned and measured. `tensors`: the most that torch's tensors take, beside the plan without
its reserve. `GPU`: what the whole GPU has in use at the end, the context of CUDA and what the allocator keeps included,
beside the fullest phase of the plan. Times are the median of three.

`--device cpu --models tiny` tries the program itself.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import SHAPES, config_of, make_model, peak_gb, place_for, seconds
from benchmarks.ranks import make_batch
from tests.support.whole_batches import compute_batch, update_batch
from trainer.config import Config
from trainer.parallel.mesh import destroy_process_group
from trainer.plan.hardware import parse_cluster
from trainer.plan.plan import Plan, make_plan
from trainer.workers.rank import Rank

PROMPT, RESPONSE, N = 128, 512, 8
COLUMNS = (
    *("model", "recompute", "tokens", "phase", "planned", "tensors", "error", "planned", "GPU", "error"),
    *("planned", "time", "error"),
)


def make_config(path: str, tokens: int, recompute: str) -> Config:
    """Return the config of a step of two micro-batches of about `tokens` tokens in each of two optimizer steps."""
    cfg = Config()
    cfg.model.path = path
    cfg.rollout.max_logprob_diff = None  # the log-probs of the batch are invented
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = PROMPT, RESPONSE
    cfg.rollout.n = N
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = PROMPT, RESPONSE
    group = PROMPT + N * RESPONSE
    cfg.trainer.max_tokens_per_micro_batch = tokens
    cfg.trainer.train_batch_size = 4 * (tokens // group)
    cfg.trainer.mini_batch_size = 2 * (tokens // group)
    cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
    cfg.trainer.policy.fsdp.activation_checkpointing = recompute
    cfg.trainer.policy.optimizer.lr = 1e-6
    return cfg


def measure(cfg: Config, device: str, directory: str, plan: Plan, name: str) -> None:
    """Print a row each for the log-probs and the update of a step."""
    rank = Rank(cfg, 0, 1, device)
    rank.connect(f"file://{directory}/store")
    try:
        rank.build(cfg.roles, cfg.model.path)
        lengths = np.full(cfg.trainer.train_batch_size * N, PROMPT + RESPONSE)
        batch = make_batch(lengths, config_of(name).vocab_size, completion=RESPONSE, group=N)
        scored = {key: batch[key] for key in ("input_ids", "mask", "lengths", "group_ids")}
        calls: dict[str, Callable[[], Any]] = {
            "scores": lambda: compute_batch(rank, "policy", "logprobs", scored),
            "update": lambda: update_batch(rank, "policy", batch, 1),
        }
        calls["update"]()  # the optimizer has its states
        phases = {phase.name.split()[0]: phase for phase in plan.members[0].phases}
        for name_of_phase, run in calls.items():
            took = seconds(run, device)
            tensors = peak_gb(run, device)
            phase = phases[name_of_phase]
            own = (phase.total - phase.sizes.get("reserved", 0)) / 1e9
            whole = plan.members[0].peak.total / 1e9
            planned = plan.time.phases.get(name_of_phase, float("nan"))
            if name_of_phase == "scores":  # a step leaves out what its first optimizer step computes
                planned *= 2
            cells = [name, cfg.trainer.policy.fsdp.activation_checkpointing]
            cells += [f"{cfg.trainer.max_tokens_per_micro_batch:,}", name_of_phase]
            cells += [f"{own:.2f} GB", f"{tensors:.2f} GB", f"{own / tensors - 1:+.1%}"]
            if name_of_phase == "update" and device == "cuda":
                free, total = torch.cuda.mem_get_info()
                used = (total - free) / 1e9
                cells += [f"{whole:.2f} GB", f"{used:.2f} GB", f"{whole / used - 1:+.1%}"]
            else:
                cells += ["-"] * 3
            cells += [f"{planned:.3f} s", f"{took:.3f} s", f"{planned / took - 1:+.0%}"]
            print(f"| {' | '.join(cells)} | <!-- {dict(phase.sizes)} -->", flush=True)
    finally:
        rank.roles.clear()
        destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["0.6B", "1.7B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8704, 17408], help="tokens of a micro-batch")
    modes = ["none", "selective", "full"]
    parser.add_argument("--recompute", nargs="+", choices=modes, default=["none", "selective"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpu", default="1xH100", help="the cluster of the plan")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=place_for(name, saves=False)) as directory:
            path = make_model(name, directory, args.device)
            for recompute in args.recompute:
                for tokens in args.tokens:
                    cfg = make_config(path, tokens, recompute)
                    plan = make_plan(cfg, parse_cluster(args.gpu))
                    try:
                        measure(cfg, args.device, tempfile.mkdtemp(dir=directory), plan, name)
                    except torch.OutOfMemoryError:
                        print(f"| {name} | {recompute} | {tokens:,} | out of memory; {plan.problems} |", flush=True)
                    gc.collect()  # behind the `except` block, because the traceback of its error holds the rank
                    if args.device == "cuda":
                        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
