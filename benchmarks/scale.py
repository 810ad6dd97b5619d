"""The tables of docs/scale.md: `python -m benchmarks.scale [--cases 8B-8 …]`.

One plan for each size of model and cluster: its memory, time, weight sync and checkpoint. The
plans are those of `trainer plan` with the overrides that `--commands` prints.
"""

from __future__ import annotations

import argparse
import shlex

from trainer.config import compose
from trainer.plan.hardware import GB, parse_cluster
from trainer.plan.plan import Plan, make_plan

_SHARED = (
    "data=gsm8k",
    "rollout.n=8",
    "rollout.max_prompt_tokens=512",
    "rollout.max_response_tokens=4096",
    "plan.prompt_tokens=200",
    "plan.response_tokens=1500",
    "rollout.colocate=true",
    "trainer.offload=all",
    "rollout.gpu_memory_utilization=0.8",
    "trainer.policy.fsdp.activation_checkpointing=full",
)


def _case(model: str, gpus: str, ranks: int, prompts: int, tp: int, tokens: int, *others: str) -> tuple[str, ...]:
    return (
        *_SHARED,
        f"model.path={model}",
        f"plan.gpus={gpus}",
        f"trainer.num_workers={ranks}",
        f"rollout.num_engines={ranks // tp}",
        f"rollout.tensor_parallel_size={tp}",
        f"trainer.train_batch_size={prompts}",
        f"trainer.mini_batch_size={prompts // 2}",
        f"trainer.max_tokens_per_micro_batch={tokens}",
        *others,
    )


CASES = {
    "0.6B-1": _case("Qwen/Qwen3-0.6B", "1xH100", 1, 64, 1, 16384),
    "1.7B-8": _case("Qwen/Qwen3-1.7B", "8xH100", 8, 128, 1, 16384),
    "8B-8": _case("Qwen/Qwen3-8B", "8xH100", 8, 128, 1, 16384),
    "8B-64": _case("Qwen/Qwen3-8B", "8x8xH100", 64, 512, 1, 16384),
    "32B-64": _case("Qwen/Qwen3-32B", "8x8xH100", 64, 512, 2, 16384),
    "70B-128": _case("meta-llama/Llama-3.3-70B-Instruct", "16x8xH100", 128, 512, 4, 16384),
    "70B-1024": _case(
        "meta-llama/Llama-3.3-70B-Instruct", "128x8xH100", 1024, 1024, 4, 16384, "trainer.dp_replicate=8"
    ),
}
HEADS = {
    "memory": (
        "run",
        "fits",
        "fullest moment of a GPU",
        "weights, optimizer",
        "activations",
        "KV cache",
        "host of a node",
    ),
    "time": ("run", "step", "rollout", "scores", "update", "sync", "host copies", "tokens/s"),
    "state": ("run", "checkpoint", "a save"),
}


def plan_of(name: str) -> Plan:
    cfg = compose(list(CASES[name]))
    return make_plan(cfg, parse_cluster(cfg.plan.gpus))


def row_of(table: str, name: str, plan: Plan) -> str:
    """Return the line of a table for a case."""
    model, gpus = name.split("-")
    cells = [f"{model} on {int(gpus):,} GPU{'s' if gpus != '1' else ''}"]
    time, disk = plan.time, plan.disk
    if table == "memory":
        peak = plan.members[0].peak
        (sizes,) = (phase.sizes for phase in plan.members[0].phases if phase.name == "update of the policy")
        cells += [
            "yes" if plan.fits else "no",
            f"{peak.total / GB:.0f} of {plan.members[0].capacity / GB:.0f} GB, {peak.name}",
            f"{(sizes['weights'] + sizes['optimizer']) / GB:.1f} GB",
            f"{sizes.get('activations', 0) / GB:.1f} GB",
            f"{plan.engine.tokens:,} tokens" if plan.engine else "",
            f"{plan.host / GB:,.0f} GB",
        ]
    elif table == "time":
        shares = [f"{time.phases.get(phase, 0.0) / time.total:.0%}" for phase in ("rollout", "scores", "update")]
        cells += [f"{time.total:.0f} s", *shares, f"{time.phases['sync']:.1f} s", f"{time.phases['copies']:.1f} s"]
        cells += [f"{time.tokens_per_s:,.0f}"]
    else:
        cells += [f"{disk.checkpoint / GB:,.0f} GB", f"{disk.save_s:.0f} s"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--commands", action="store_true", help="print the command of each plan instead")
    args = parser.parse_args()
    if args.commands:
        for name in args.cases:
            print(f"trainer plan {shlex.join(CASES[name])}")
        return
    plans = {name: plan_of(name) for name in args.cases}
    for table, head in HEADS.items():
        print(f"\n| {' | '.join(head)} |\n" + "|---" * len(head) + "|")
        for name, plan in plans.items():
            print(row_of(table, name, plan))


if __name__ == "__main__":
    main()
