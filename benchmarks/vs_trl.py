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

from benchmarks.memory import peak_resident_bytes, reset_peak
from benchmarks.models import SHAPES, add_data, make_model, read_questions
from trainer.metrics.names import PHASES
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.models.tokenizer import load_tokenizer

TRL = ("trl==1.16.0", "torch==2.13.0")
THREADS = 2
PROMPTS, N, TOKENS, MINI_BATCHES, ROWS = 8, 8, 64, 2, 512
PAIRS, DPO_ROWS = 8, 64
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
    return call_trl(python, settings, out)


def call_trl(python: str, settings: dict[str, Any], out: str) -> Result:
    file = os.path.join(out, "settings.json")
    with open(file, "w", encoding="utf-8") as handle:
        json.dump(settings, handle)
    threads = str(settings["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": HERE, "HF_HUB_OFFLINE": "1"}
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


def write_pairs(model: str, questions: list[dict[str, str]], tokens: int, file: str) -> None:
    """Write pairs: prompts of GSM8K, and other rows' solutions, cut to `tokens` tokens, as answers."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer("\n".join(row["answer"] for row in questions))["input_ids"]
    answers = [tokenizer.decode(ids[i : i + tokens]) for i in range(0, 2 * DPO_ROWS * tokens, tokens)]
    with open(file, "w", encoding="utf-8") as handle:
        for i, row in enumerate(questions[:DPO_ROWS]):
            said = [[{"role": "assistant", "content": text}] for text in answers[2 * i : 2 * i + 2]]
            prompt = [{"role": "user", "content": row["question"]}]
            handle.write(json.dumps({"prompt": prompt, "chosen": said[0], "rejected": said[1]}) + "\n")


def run_our_pairs(model: str, file: str, args: argparse.Namespace, out: str) -> Result:
    command = [
        sys.executable, "-m", "trainer", "dpo", f"model.path={model}", f"data.train_files=[{file}]",
        f"trainer.total_steps={args.steps}", f"trainer.train_batch_size={PAIRS}", f"trainer.mini_batch_size={PAIRS}",
        "trainer.ray_address=this_process", f"trainer.run_dir={out}", "trainer.val_interval=-1",
        "trainer.ckpt_interval=-1", "logger.plot=false", f"trainer.policy.optimizer.lr={args.lr}", *args.overrides,
    ]  # fmt: skip
    metrics, ends, peak = os.path.join(out, METRICS_FILE), [], 0
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as job:
        while job.poll() is None and len(ends) < args.steps:
            if _count_lines(metrics) > len(ends):
                ends.append(_cpu_time(job.pid))
                if len(ends) == 1:
                    reset_peak(str(job.pid))
                peak = peak_resident_bytes(str(job.pid))
            time.sleep(0.02)
    rows = read_metrics(metrics)
    return {
        "seconds": [row["time/step"] for row in rows[1:]],
        "cpu_seconds": (ends[-1] - ends[0]) / (len(ends) - 1),
        "before": mean(row["time/logprob"] for row in rows[1:]),
        "losses": [row["policy/loss"] for row in rows],
        "peak": peak,
    }


def compare_pairs(model: str, questions: list[dict[str, str]], args: argparse.Namespace, directory: str) -> None:
    """Print the seconds, the CPU seconds and the peak memory of a step of DPO, in jobs that alternate."""
    python = trl_python(args.venv)
    print("| answers | | step | CPU | resident peak | loss of the last step |\n" + "|---" * 6 + "|", flush=True)
    for tokens in args.answers:
        file = os.path.join(directory, f"pairs-{tokens}.jsonl")
        write_pairs(model, questions, tokens, file)
        for number in range(args.rounds):
            for side in ("TRL", "ours"):
                out = os.path.join(directory, f"{tokens}-{side}-{number}")
                os.makedirs(out)
                if side == "TRL":
                    settings = {"model": model, "data": file, "pairs": PAIRS, "steps": args.steps, "lr": args.lr}
                    found = call_trl(python, settings | {"threads": 1, "out": out}, out)
                else:
                    found = run_our_pairs(model, file, args, out)
                print(
                    f"| {tokens} | {side} | {median(found['seconds']):.2f} s | {found['cpu_seconds']:.2f} s | "
                    f"{found['peak'] / 2**20:.0f} MiB | {found['losses'][-1]:.4f} | {found['before']:.2f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["17M"], help="100M takes half an hour more"
    )
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--dpo", action="store_true", help="DPO on pairs in place of GRPO")
    parser.add_argument("--answers", type=int, nargs="+", default=[64, 256], help="tokens of an answer of DPO")
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
    if args.dpo:
        with tempfile.TemporaryDirectory() as directory:
            make_model(SHAPES[args.models[0]], args.data, os.path.join(directory, "model"))
            compare_pairs(os.path.join(directory, "model"), questions, args, directory)
        return
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
