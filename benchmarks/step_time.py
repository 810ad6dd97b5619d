"""Where a step's time goes: `python -m benchmarks.step_time [--steps N]`.

Runs the built-in default as a user would, for GRPO and PPO on one and two ranks, without validation and
checkpoints. Prints, from each run's own metrics, the median step and each phase's share of it, the step
relative to GRPO on one rank, and the seconds from the command to the end of the first step.

Then, for models of 17M and 100M parameters, the log-prob pass and the update of one rank on GSM8K lengths: the FLOPs
that they need, as a share of what products of large matrices reach on the same core (`--models`; none: leave this out).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from benchmarks.models import SHAPES, add_data, make_model
from benchmarks.ranks import cpu_seconds, gsm8k_lengths, make_batch, matmul_flops, one_policy
from tests.support.whole_batches import compute_batch, update_batch
from trainer.metrics.names import PHASES
from trainer.metrics.tracker import METRICS_FILE, read_metrics


def run(algorithm: str, ranks: int, steps: int, run_dir: str) -> float:
    """Run a job; returns the seconds from its start to the line of its first step."""
    command = [
        sys.executable, "-m", "trainer", "train", f"algorithm={algorithm}", f"trainer.num_workers={ranks}",
        f"trainer.total_steps={steps}", f"trainer.run_dir={run_dir}", "trainer.val_interval=-1",
        "trainer.ckpt_interval=-1", "logger.plot=false",
    ]  # fmt: skip
    metrics = os.path.join(run_dir, METRICS_FILE)
    begin = time.monotonic()
    first = float("nan")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as job:
        while job.poll() is None:
            if first != first and os.path.exists(metrics) and os.path.getsize(metrics):
                first = time.monotonic() - begin
            time.sleep(0.05)
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {job.returncode}")
    return first


def print_shares(name: str, dtype: str, rows: int, path: str, directory: str) -> None:
    """Print the share of the matmul limit that the log-prob pass and the update of one rank reach."""
    shape = SHAPES[name]
    lengths = gsm8k_lengths(rows)
    batch = make_batch(lengths, shape.vocabulary)
    scored = {key: batch[key] for key in ("input_ids", "mask", "lengths", "group_ids")}
    limit = matmul_flops(dtype)
    with one_policy(path, directory, dtype) as rank:
        head = shape.vocabulary * shape.hidden
        blocks = rank.roles["policy"].num_parameters()[0] - head
        attention = 2 * shape.layers * 64 * shape.heads * float((lengths.astype(float) ** 2).sum())
        flops = 2 * blocks * lengths.sum() + 2 * head * batch["mask"].sum() + attention
        for phase, factor, run in (
            ("log-probs", 1, lambda: compute_batch(rank, "policy", "logprobs", scored)),
            ("update", 3, lambda: update_batch(rank, "policy", batch, 1)),
        ):
            seconds = cpu_seconds(run, repeat=1)
            print(
                f"| {name} | {dtype} | {phase} | {lengths.sum():,} | {seconds:.2f} s | {limit / 1e9:,.0f} GFLOP/s | "
                f"{factor * flops / seconds / limit:.0%} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps a job, the first not counted (default: 6)")
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", type=int, default=16, help="sequences of a rank in the second part (default: 16)")
    add_data(parser)
    parser.add_argument("--no-jobs", action="store_true", help="only the second part")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step warms up and is not counted")
    if not args.no_jobs:
        print_jobs(args.steps)
    if args.models:
        print("\n| model | dtype | phase | tokens | CPU | matmul | share |\n" + "|---" * 7 + "|", flush=True)
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, name)
            make_model(SHAPES[name], args.data, path)
            for dtype in ("float32", "bfloat16"):
                print_shares(name, dtype, args.rows, path, directory)


def print_jobs(steps: int) -> None:
    """Print where the steps of the built-in default spend their time."""
    with tempfile.TemporaryDirectory() as run_dir:  # so that no job below has to warm-start the built-in model
        run("grpo", 1, 1, run_dir)
    phases = [phase for phase in PHASES if phase not in ("checkpoint_blocked", "environment")]
    print(f"| job | first step after | step | to grpo, 1 rank | {' | '.join(phases)} | other |")
    print("|---" * (len(phases) + 5) + "|", flush=True)
    base = None
    for algorithm in ("grpo", "ppo"):
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as run_dir:
                first = run(algorithm, ranks, steps, run_dir)
                rows = read_metrics(os.path.join(run_dir, METRICS_FILE))[1:]
            step = median(row["time/step"] for row in rows)
            base = base or step
            shares = [median(row.get(f"time/{phase}", 0.0) / row["time/step"] for row in rows) for phase in phases]
            cells = " | ".join(f"{share:.0%}" for share in [*shares, 1 - sum(shares)])
            job = f"{algorithm}, {ranks} rank{'s' if ranks > 1 else ''}"
            print(f"| {job} | {first:.0f} s | {step:.2f} s | {step / base:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
