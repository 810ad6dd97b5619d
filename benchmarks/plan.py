"""How well `trainer plan` predicts: `python -m benchmarks.plan [--configs grpo tp cp recompute ppo] [--jobs ...]`.

For configs of real ranks on CPU, the peak memory and the time of a step's log-prob pass and update, planned and
measured. `planned`: of the fullest moment of a rank. `allocator`: the states that the rank holds, and what tensors took
beside them at most, by the events of torch's allocator. `resident`: how far the process grows over what it is before
its models are loaded, in a run of its own with an allocator of C that gives memory back. (The pages of each tensor are
new then, and an update takes 1.5 times as long.) Times are CPU seconds of one rank, which has one thread, so other work
on the machine changes them little. `-`: no such pass, because the update computes the log-probs that it needs. The
first line has the constants that the plan has measured of this machine. All plans of the run compute with them.

Then, for whole jobs, the time of a step by phase, planned / measured: medians of the steps but the first. Measured are
CPU seconds of the driver, the longest rank, the longest engine and the longest other process, one after the other;
`step` is their sum over a whole step, rewards included. The plan gets the lengths of the job's own prompts and
completions: the means, and that of the longest completion.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.models import SHAPES, Shape, add_data, make_model
from benchmarks.phases import run_job as measure_job
from benchmarks.ranks import PlannedRank, make_batch
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, RolloutConfig, compose
from trainer.plan.hardware import parse_cluster
from trainer.plan.plan import make_plan

SHAPE = Shape(8192, 384, 1152, 6, 6, 2)
PROMPT, RESPONSE, GROUPS, N = 64, 128, 4, 4
TOKENS = 2 * (PROMPT + N * RESPONSE)
"""Of a micro-batch: two groups fill it."""
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {"num_workers": 1},
    "sharded": {"num_workers": 2},
    "tp": {"num_workers": 2, "tensor_parallel_size": 2},
    "cp": {"num_workers": 2, "context_parallel_size": 2, "max_tokens_per_micro_batch": TOKENS // 2},
    "recompute": {"num_workers": 2, "recompute": "full"},
    "selective": {"num_workers": 1, "recompute": "selective"},
    "ppo": {"num_workers": 2, "ppo": True},
    "bfloat16": {"num_workers": 1, "dtype": "bfloat16"},
}
_MODEL = (
    *("model.path=MODEL", "rollout.max_prompt_tokens=128", "rollout.max_response_tokens=64", "rollout.n=4"),
    *("trainer.train_batch_size=8", "trainer.mini_batch_size=8"),
)
JOBS: dict[str, tuple[str, ...]] = {
    "demo grpo transformers": ("rollout=transformers",),
    "demo grpo": ("rollout=vllm",),
    "demo grpo 2 ranks": ("rollout=vllm", "trainer.num_workers=2"),
    "demo ppo": ("rollout=vllm", "algorithm=ppo"),
    "17M grpo": (*_MODEL, "rollout=vllm"),
    "17M grpo bfloat16": (
        *_MODEL,
        "rollout=vllm",
        "trainer.policy.fsdp.param_dtype=bfloat16",
        "rollout.dtype=bfloat16",
    ),
}
"""Overrides of whole jobs. `demo`: the built-in default."""
STEP_PHASES = ("rollout", "scores", "update", "sync")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def config_of(path: str, name: str) -> Config:
    """Return the config of a case, with `N` completions of `RESPONSE` tokens for each of `GROUPS` prompts."""
    settings = dict(CONFIGS[name])
    cfg = Config(rollout=RolloutConfig(max_logprob_diff=None))  # the log-probs of the batch are made up
    cfg.model.path = path
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = PROMPT, RESPONSE
    cfg.rollout.n = N
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = PROMPT, RESPONSE
    if settings.pop("ppo", False):
        cfg.algorithm.advantage_estimator, cfg.algorithm.kl_coef = "gae", 0.01
    mode, dtype = settings.pop("recompute", "none"), settings.pop("dtype", "float32")
    fsdp = cfg.trainer.policy.fsdp
    fsdp.activation_checkpointing, fsdp.param_dtype = mode, dtype
    settings = {"max_tokens_per_micro_batch": TOKENS, **settings}
    cfg.trainer = dataclasses.replace(cfg.trainer, train_batch_size=GROUPS, mini_batch_size=GROUPS, **settings)
    return cfg


def measure(cfg: Config, path: str) -> dict[str, float]:
    """Return what `PlannedRank.run` returns, the largest of all ranks: memory and times of two runs."""
    memory, times = _run(cfg, path, GIVES_BACK), _run(cfg, path, {})
    return {**times, "resident": memory["resident"]}


def _run(cfg: Config, path: str, variables: dict[str, str]) -> dict[str, float]:
    os.environ.update(variables)  # an allocator reads them as its process starts
    with ProcessCluster(cfg, "cpu") as cluster:
        group = cluster.launch_ranks("rank", functools.partial(PlannedRank, cfg), {"OMP_NUM_THREADS": "1"})
        lengths = np.full(GROUPS * N, PROMPT + RESPONSE)
        batch = make_batch(lengths, SHAPE.vocabulary, completion=RESPONSE, group=N)
        batch |= {name: np.zeros_like(batch["advantages"]) for name in ("values", "returns", "ref_logprobs")}
        results = group.call("run", cluster.rendezvous_address(group), path, cluster.put(batch))
    for name in variables:
        del os.environ[name]
    return {name: max(result[name] for result in results) for name in results[0]}


def compare_job(name: str, path: str, directory: str, steps: int) -> str:
    """Run a job and return its row: planned and measured seconds of each phase, and the error of the step."""
    overrides = [word.replace("MODEL", path) for word in JOBS[name]]
    run = measure_job(os.path.join(directory, name.replace(" ", "-")), steps, overrides)
    lengths = (
        f"plan.prompt_tokens={round(run.tokens - run.response)}",
        f"plan.response_tokens={round(run.response)}",
        f"rollout.max_response_tokens={round(run.longest)}",
    )
    cluster = parse_cluster("cpu")
    seconds = make_plan(compose([*overrides, *lengths, "trainer.ray_address=processes"]), cluster).time
    cells = [f"{seconds.phases.get(phase, 0.0):.2f} / {run.phases[phase]:.2f}" for phase in STEP_PHASES]
    whole = run.phases["whole"]
    by_kind = ", ".join(f"{kind} {value:.2f}" for kind, value in run.kinds.items())
    row = f"| {name} | {' | '.join(cells)} | {seconds.total:.2f} | {whole:.2f} | {seconds.total / whole - 1:+.0%} |"
    return f"{row} <!-- {lengths}; measured by kind: {by_kind} -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="*", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--steps", type=int, default=6, help="steps of a job that count (default: 6)")
    add_data(parser)
    args = parser.parse_args()
    head = (
        "config",
        "planned",
        "allocator",
        "error",
        "resident",
        "error",
        "scores",
        "measured",
        "error",
        "update",
        "measured",
        "error",
    )
    print(f"<!-- {parse_cluster('cpu').device} -->", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model")
        make_model(SHAPE, args.data, path)
        if args.configs:
            print(f"| {' | '.join(head)} |\n" + "|---" * len(head) + "|", flush=True)
        for name in args.configs:
            cfg = config_of(path, name)
            begin = time.perf_counter()
            plan = make_plan(cfg, parse_cluster("cpu"))
            planned = plan.members[0].peak
            print(f"<!-- planned in {time.perf_counter() - begin:.1f} s: {planned} -->")
            found = measure(cfg, path)
            crowd = max(1.0, cfg.trainer.num_workers / plan.cluster.per_node)
            cells = [name, f"{planned.total / 1e6:.0f} MB"]
            for measured in (found["allocator"], found["resident"]):
                cells += [f"{measured / 1e6:.0f} MB", f"{planned.total / measured - 1:+.1%}"]
            for phase in ("scores", "update"):
                seconds = plan.time.phases.get(phase, 0.0) / crowd
                if seconds:
                    cells += [f"{seconds:.2f} s", f"{found[phase]:.2f} s", f"{seconds / found[phase] - 1:+.0%}"]
                else:
                    cells += ["-"] * 3
            print(f"| {' | '.join(cells)} |", flush=True)
        if args.jobs:
            model = os.path.join(directory, "17M")
            make_model(SHAPES["17M"], args.data, model)
            columns = ("job", *STEP_PHASES, "step, planned", "measured", "error")
            print(f"\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)
            for name in args.jobs:
                print(compare_job(name, model, directory, args.steps), flush=True)


if __name__ == "__main__":
    main()
