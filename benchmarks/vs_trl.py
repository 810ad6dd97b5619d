"""Samples per second and learning beside TRL, on two cores: `python -m benchmarks.vs_trl [--models 17M 100M]`.

Both train the same model (random weights) on the same prompts (GSM8K) with the same number and lengths of completions,
group size, optimizer steps, loss and learning rate, with two threads in all: TRL's `GRPOTrainer` in one process with
its own `generate`, ours on two ranks and two engines of one thread each, which take turns. The jobs alternate. Prints
the seconds of a step (the first is not counted), samples per second and the ratio, the CPU seconds of a step (all
processes together), and for both the mean reward of the first step and of the last third.

TRL goes into a virtual environment of its own, which is made once (`--venv`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.models import SHAPES, add_data, make_model, read_questions
from trainer.metrics.names import PHASES
from trainer.metrics.tracker import METRICS_FILE, read_metrics

TRL = ("trl==1.16.0", "torch==2.13.0")
THREADS = 2
PROMPTS, N, TOKENS, MINI_BATCHES, ROWS = 8, 8, 64, 2, 512
HERE = os.path.dirname(os.path.abspath(__file__))
Result = dict[str, Any]
"""`seconds` of each step after the first, `cpu_seconds` of one, `rewards` of each, `mean_length` of completions."""


def trl_python(venv: str) -> str:
    """Return the Python of an environment with TRL, which is made if it is missing."""
    python, done = os.path.join(venv, "bin", "python"), os.path.join(venv, "installed")
    if not os.path.exists(done):
        print(f"installing TRL into {venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL], check=True)
        open(done, "w").close()
    return python


def run_trl(python: str, model: str, dtype: str, args: argparse.Namespace, out: str) -> Result:
    settings = {
        "model": model, "dtype": dtype, "data": args.data, "rows": ROWS, "prompts": PROMPTS, "n": N, "tokens": TOKENS,
        "mini_batches": MINI_BATCHES, "steps": args.steps, "lr": args.lr, "seed": args.seed, "threads": THREADS,
        "out": out,
    }  # fmt: skip
    file = os.path.join(out, "settings.json")
    with open(file, "w", encoding="utf-8") as handle:
        json.dump(settings, handle)
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": HERE, "HF_HUB_OFFLINE": "1"}
    command = [python, os.path.join(HERE, "trl_job.py"), file]
    job = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(job.stdout.splitlines()[-1])


def run_ours(model: str, dtype: str, args: argparse.Namespace, out: str) -> Result:
    command = [
        sys.executable, "-m", "trainer", "train", "data=gsm8k", f"model.path={model}",
        f"data.train_files=[{args.data}]",
        "data.val_files=[]", f"data.train_size={ROWS}", "reward.name=benchmarks.vowels:score", "algorithm=grpo",
        "algorithm.kl_coef=0", f"trainer.seed={args.seed}", f"trainer.total_steps={args.steps}",
        f"trainer.train_batch_size={PROMPTS}", f"trainer.mini_batch_size={PROMPTS // MINI_BATCHES}",
        f"trainer.num_workers={THREADS}", f"rollout.num_engines={THREADS}", f"rollout.n={N}",
        f"rollout.max_response_tokens={TOKENS}", f"rollout.dtype={dtype}",
        f"trainer.policy.fsdp.param_dtype={dtype}", f"trainer.policy.optimizer.lr={args.lr}",
        f"trainer.run_dir={out}", "trainer.val_interval=-1", "trainer.ckpt_interval=-1", "logger.plot=false",
        "logger.samples=0", *args.overrides,
    ]  # fmt: skip
    metrics = os.path.join(out, METRICS_FILE)
    cpu_ends: list[float] = []  # CPU time of the whole job at the end of each step
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as job:
        while job.poll() is None:
            if len(cpu_ends) < args.steps and _count_lines(metrics) > len(cpu_ends):
                cpu_ends.append(_cpu_time(job.pid))
            time.sleep(0.02)
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {job.returncode}")
    rows = read_metrics(metrics)
    phases = {phase: median(row.get(f"time/{phase}", 0.0) for row in rows[1:]) for phase in PHASES}
    return {
        "seconds": [row["time/step"] for row in rows[1:]],
        "cpu_seconds": (cpu_ends[-1] - cpu_ends[0]) / (len(cpu_ends) - 1),
        "rewards": [row["reward/mean"] for row in rows],
        "mean_length": mean(row["response_length/mean"] for row in rows),
        "phases": ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005),
    }


def _count_lines(file: str) -> int:
    if not os.path.exists(file):
        return 0
    with open(file, "rb") as handle:
        return handle.read().count(b"\n")


def _cpu_time(pid: int) -> float:
    """Return the CPU seconds of a process and all that it has started."""
    total = 0.0
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def summary(results: list[Result]) -> dict[str, float]:
    last = [reward for result in results for reward in result["rewards"][-max(1, len(result["rewards"]) // 3) :]]
    return {
        "step": median(seconds for result in results for seconds in result["seconds"]),
        "cpu": mean(result["cpu_seconds"] for result in results),
        "first": mean(result["rewards"][0] for result in results),
        "last": mean(last),
        "length": mean(result["mean_length"] for result in results),
    }


def compare(name: str, dtype: str, python: str, args: argparse.Namespace, directory: str) -> None:
    model = os.path.join(directory, name)
    results: dict[str, list[Result]] = {"TRL": [], "ours": []}
    for number in range(args.rounds):
        for side, done in results.items():
            out = os.path.join(directory, f"{name}-{dtype}-{side}-{number}")
            os.makedirs(out)
            if side == "TRL":
                done.append(run_trl(python, model, dtype, args, out))
            else:
                done.append(run_ours(model, dtype, args, out))
    trl, ours = summary(results["TRL"]), summary(results["ours"])
    for side, one in (("TRL", trl), ("ours", ours)):
        print(
            f"| {name} | {dtype} | {side} | {one['step']:.2f} s | {PROMPTS * N / one['step']:.2f} | "
            f"{trl['step'] / one['step']:.2f} | {one['cpu']:.2f} s | {one['first']:.3f} | {one['last']:.3f} | "
            f"{one['length']:.1f} |",
            flush=True,
        )
    print(f"    phases of our step, in seconds: {results['ours'][-1]['phases']}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["17M"], help="100M takes half an hour more"
    )
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=3, help="steps of a job, the first not counted (default: 3)")
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each side (default: 1)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    add_data(parser)
    parser.add_argument("--venv", default=os.path.join(tempfile.gettempdir(), "trl-1.16"), help="TRL's environment")
    parser.add_argument("overrides", nargs="*", help="settings of our job, such as rollout=transformers")
    args = parser.parse_args()
    questions = read_questions(args.data)
    if len(questions) < ROWS:
        parser.error(f"--data: {args.data} has {len(questions)} questions, {ROWS} are needed")
    python = trl_python(args.venv)
    print("| model | dtype | | step | samples/s | ratio | CPU | first reward | last rewards | tokens |")
    print("|---" * 10 + "|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "train.jsonl")
        with open(file, "w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in questions)
        args.data = file
        for name in args.models:
            make_model(SHAPES[name], args.data, os.path.join(directory, name))
            for dtype in args.dtypes:
                compare(name, dtype, python, args, directory)


if __name__ == "__main__":
    main()
