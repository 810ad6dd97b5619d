"""What a kill changes and costs, beside TRL: `python -m benchmarks.resume_vs_trl [--kills N]`.

Both train the same small model on the same prompts with the same number and lengths of completions, group size,
optimizer steps and learning rate, one process that computes at a time, with one thread. Both save every few steps. Each
job runs once uninterrupted and then once for each kill. SIGKILL ends all its processes at a moment that a seed chooses:
after the same step, and the same share of a step later. Then each continues by its own means to its last step. TRL has
`full_determinism` and `resume_from_checkpoint`, ours `trainer.resume_mode=latest`.

Prints for each kill which share of the steps after the checkpoint has the logged values of the uninterrupted run, all
of them but times to the last bit, and how long it takes from the command until the step that was under way is trained
again, start-up apart. CPU seconds are those of all processes from the command to the end of the first step: they count
where other jobs use the machine. Two uninterrupted runs of TRL show whether it repeats itself at all.

TRL goes into a virtual environment of its own, which is made once (`--venv`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.models import SMALL, make_model, read_questions
from benchmarks.vs_trl import HERE, trl_python
from trainer.metrics.tracker import METRICS_FILE, read_metrics

PROMPTS, N, TOKENS, MINI_BATCHES = 8, 4, 32, 2
ROWS = 64
"""Prompts of the data: an epoch has eight steps."""
Values = dict[str, float]


@dataclass
class Started:
    """One start of a job, as it was seen from outside."""

    begin: float | None = None
    """When the first step of this start began."""
    cpu: float = 0.0
    """CPU seconds of all processes until the first step was logged."""
    ends: dict[int, float] = field(default_factory=dict)
    """When each step of this start was logged."""
    status: int | None = None
    """None: killed."""


class Side(ABC):
    """One of the two trainers, with a job in a directory."""

    name: str

    def __init__(self, args: argparse.Namespace, model: str, data: str):
        self.args = args
        self.model = model
        self.data = data

    @abstractmethod
    def command(self, out: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts or continues the job in `out`, and its environment."""

    @abstractmethod
    def rows(self, out: Path) -> dict[int, dict[str, Any]]:
        """Return what was logged, by step."""

    @abstractmethod
    def seconds(self, row: Mapping[str, Any]) -> float:
        """Return how long the step of a row took."""

    @abstractmethod
    def values(self, row: Mapping[str, Any]) -> Values:
        """Return the logged values that do not depend on the speed of the machine."""

    @abstractmethod
    def weights(self, out: Path) -> str:
        """Return a digest of the weights at the end."""

    @abstractmethod
    def checkpoint(self, out: Path) -> int:
        """Return the step of the newest checkpoint."""

    def run(self, out: Path, kill: tuple[int, float] | None = None) -> Started:
        """Start or continue the job, until its end or until the moment to kill it.

        Args:
            kill: a step, and the seconds after the line of that step.
        """
        out.mkdir(exist_ok=True)
        before, found, moment = self.rows(out), Started(), float("inf")
        command, environment = self.command(out)
        with open(f"{out}.log", "a") as log:
            job = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        while job.poll() is None:
            now = time.time()
            for step, row in self.rows(out).items():
                if step in found.ends or row == before.get(step):
                    continue
                found.ends[step] = now
                found.begin = found.begin or now - self.seconds(row)
                found.cpu = found.cpu or cpu_seconds(job)
                if kill and step == kill[0]:
                    moment = now + kill[1]
            if now >= moment:
                kill_tree(job)
                return found
            time.sleep(0.02)
        found.status = job.returncode
        return found


class TRL(Side):
    name = "TRL"

    def command(self, out: Path) -> tuple[list[str], dict[str, str]]:
        a = self.args
        file = out / "settings.json"
        settings = {
            "model": self.model, "dtype": "float32", "data": self.data, "rows": ROWS, "prompts": PROMPTS, "n": N,
            "tokens": TOKENS, "mini_batches": MINI_BATCHES, "steps": a.steps, "lr": a.lr, "seed": a.seed, "threads": 1,
            "out": str(out), "save_every": a.save_every, "resume": any(out.glob("checkpoint-*")),
        }  # fmt: skip
        file.write_text(json.dumps(settings))
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "HF_HUB_OFFLINE": "1"}
        return [trl_python(a.venv), os.path.join(HERE, "trl_job.py"), str(file)], environment

    def rows(self, out: Path) -> dict[int, dict[str, Any]]:
        file = out / "steps.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        found = [json.loads(line) for line in lines]
        return {row["step"]: row for row in found}  # a step that is trained again replaces its line

    def seconds(self, row: Mapping[str, Any]) -> float:
        return row["seconds"]

    def values(self, row: Mapping[str, Any]) -> Values:
        return {name: value for name, value in row["logged"].items() if name not in ("step_time", "num_tokens")}

    def weights(self, out: Path) -> str:
        return (out / "weights.txt").read_text()

    def checkpoint(self, out: Path) -> int:
        return max(int(path.name.rpartition("-")[2]) for path in out.glob("checkpoint-*")) // MINI_BATCHES


class Ours(Side):
    name = "ours"

    def command(self, out: Path) -> tuple[list[str], dict[str, str]]:
        a = self.args
        words = [
            "data=gsm8k", "rollout=transformers", f"model.path={self.model}", f"data.train_files=[{self.data}]",
            "data.val_files=[]", f"data.train_size={ROWS}", "reward.name=benchmarks.vowels:score", "algorithm=grpo",
            "algorithm.kl_coef=0", f"trainer.seed={a.seed}", f"trainer.total_steps={a.steps}",
            f"trainer.train_batch_size={PROMPTS}", f"trainer.mini_batch_size={PROMPTS // MINI_BATCHES}",
            f"rollout.n={N}", f"rollout.max_response_tokens={TOKENS}", f"trainer.policy.optimizer.lr={a.lr}",
            f"trainer.run_dir={out}", "trainer.val_interval=-1", f"trainer.ckpt_interval={a.save_every}",
            f"trainer.hf_save_interval={a.steps}", "trainer.resume_mode=latest", "logger.plot=false",
            "logger.samples=0", *a.overrides,
        ]  # fmt: skip
        return [sys.executable, "-m", "trainer", "train", *words], {"OMP_NUM_THREADS": "1"}

    def rows(self, out: Path) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in read_metrics(str(out / METRICS_FILE)) if row["step"] > 0}

    def seconds(self, row: Mapping[str, Any]) -> float:
        return row["time/step"]

    def values(self, row: Mapping[str, Any]) -> Values:
        return {name: value for name, value in row.items() if not name.startswith(("time/", "perf/", "journal/"))}

    def weights(self, out: Path) -> str:
        digest = hashlib.sha256()
        for file in sorted((out / "exports").rglob("*.safetensors")):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def checkpoint(self, out: Path) -> int:
        return max(int(path.name.rpartition("_")[2]) for path in (out / "checkpoints").glob("global_step_*"))


def tree(job: subprocess.Popen) -> list[psutil.Process]:
    """Return a process and all that it has started."""
    top = psutil.Process(job.pid)
    return [top, *top.children(recursive=True)]


def cpu_seconds(job: subprocess.Popen) -> float:
    """Return the CPU seconds of a job, with those of processes that have ended and were waited for."""
    total = 0.0
    for process in tree(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def kill_tree(job: subprocess.Popen) -> None:
    processes = tree(job)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()
    psutil.wait_procs(processes)


@dataclass
class Measured:
    """What one kill did to one side."""

    checkpoint: int
    lost: int
    """The step that was under way."""
    equal: float
    """Share of the steps after the checkpoint with the values of the uninterrupted run."""
    startup: float
    cpu: float
    """CPU seconds of the restart until the end of its first step."""
    again: float
    """Seconds from the first step of the restart until the lost step was logged."""
    same_weights: bool


def measure(side: Side, root: Path, whole: Path, number: int, step: int, fraction: float) -> Measured:
    """Kill a job after a step and a fraction of a step, continue it to its end, and compare it with `whole`."""
    reference = side.rows(whole)
    out = root / f"{side.name}-{number}"
    one_step = median(side.seconds(row) for row in reference.values())
    killed = side.run(out, (step, fraction * one_step))
    if killed.status is not None:
        raise SystemExit(f"{out}.log: the job ended with status {killed.status} before it was killed")
    checkpoint, lost = side.checkpoint(out), max(side.rows(out)) + 1
    begin = time.time()
    restarted = side.run(out)
    if restarted.status or restarted.begin is None or lost not in restarted.ends:
        raise SystemExit(f"{out}.log: the job that was restarted ended with status {restarted.status}")
    rows = side.rows(out)
    rest = [number for number in reference if number > checkpoint]
    equal = mean(side.values(rows[number]) == side.values(reference[number]) for number in rest)
    return Measured(
        checkpoint=checkpoint,
        lost=lost,
        equal=equal,
        startup=restarted.begin - begin,
        cpu=restarted.cpu,
        again=restarted.ends[lost] - restarted.begin,
        same_weights=side.weights(out) == side.weights(whole),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6, help="kills of each side (default: 6)")
    parser.add_argument("--steps", type=int, default=28, help="steps of a job; eight are an epoch (default: 28)")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints (default: 5)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the jobs and of the moments (default: 1)")
    parser.add_argument("--venv", default=os.path.join(tempfile.gettempdir(), "trl-1.16"), help="TRL's environment")
    parser.add_argument("overrides", nargs="*", help="settings of our job")
    args = parser.parse_args()
    trl_python(args.venv)
    chosen = random.Random(args.seed)
    after = sorted(chosen.sample(range(args.save_every + 1, args.steps - 1), args.kills))
    moments = [(step, round(chosen.random(), 2)) for step in after]
    columns = (
        "killed after", "", "checkpoint", "start-up", "CPU to the first step", "lost step again", "steps again",
        "equal steps", "same weights",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model, data = str(root / "model"), root / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in read_questions(None)))
        make_model(SMALL, None, model)
        sides = [TRL(args, model, str(data)), Ours(args, model, str(data))]
        for side in sides:
            for name in ("whole", "again"):
                if status := side.run(root / f"{side.name}-{name}").status:
                    raise SystemExit((root / f"{side.name}-{name}.log").read_text()[-3000:] + f"\nstatus {status}")
        totals: dict[str, list[Measured]] = {side.name: [] for side in sides}
        for number, (step, fraction) in enumerate(moments):
            for side in sides:
                one = measure(side, root, root / f"{side.name}-whole", number, step, fraction)
                totals[side.name].append(one)
                print(
                    f"| {step} + {fraction:.2f} | {side.name} | {one.checkpoint} | {one.startup:.1f} s | "
                    f"{one.cpu:.1f} s | {one.again:.1f} s | {one.lost - one.checkpoint} | {one.equal:.0%} | "
                    f"{'yes' if one.same_weights else 'no'} |",
                    flush=True,
                )
        print()
        for side in sides:
            print_summary(side, root, totals[side.name])


def print_summary(side: Side, root: Path, kills: list[Measured]) -> None:
    whole, again = (side.rows(root / f"{side.name}-{name}") for name in ("whole", "again"))
    repeated = mean(side.values(whole[step]) == side.values(again[step]) for step in whole)
    differing = sorted(
        {name for step in whole for name, value in side.values(whole[step]).items() if again[step].get(name) != value}
        if side.name == "ours"
        else ()
    )
    print(
        f"{side.name}: {mean(one.equal for one in kills):.0%} of the steps after a checkpoint are equal; start-up "
        f"{median(one.startup for one in kills):.1f} s, then {median(one.again for one in kills):.1f} s until the lost "
        f"step is trained again, together {median(one.startup + one.again for one in kills):.1f} s (medians of "
        f"{len(kills)} kills), {median(one.cpu for one in kills):.1f} CPU seconds to the end of the first step; "
        f"an uninterrupted step takes "
        f"{median(side.seconds(row) for row in whole.values()):.2f} s, and {repeated:.0%} of the steps of two "
        f"uninterrupted runs are equal{' but for ' + ', '.join(differing) if differing else ''}"
    )


if __name__ == "__main__":
    main()
