"""What the journal costs a step: `python -m benchmarks.journal [--pairs N] [--places DIRECTORY ...]`.

Trains one run for each workload and place, in which one step of each pair, drawn by chance, writes the journal, and the
other does not. The workloads are the demo, and a model with random weights whose completions have up to 512 tokens.

Prints for a step the seconds that the driver waited for the journal (`time/journal`), the CPU seconds of the journal's
threads, and what steps with it took longer than those without: in CPU seconds of the driver, in which those of the
journal's threads are contained, and on the clock. Medians,
and their standard errors; a busy machine shows in the last column, but hardly in the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

from trainer.config import TASKS, Config
from trainer.episodes import Episode
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.sources.sampling import SamplingSource
from trainer.tasks import Task, rl

CPU_FILE = "cpu.jsonl"
WARM_UP = 2
WORKLOADS = {
    "demo": [],
    "long": [
        "trainer.task=benchmarks.journal:RANDOM_WEIGHTS", "trainer.train_batch_size=8", "trainer.mini_batch_size=8",
        "rollout.n=4", "rollout.max_response_tokens=512", "trainer.policy.optimizer.lr=0",
    ],
}  # fmt: skip


def writes(step: int) -> bool:
    """Return whether a step writes the journal: one of each pair of steps does."""
    return (step % 2 == 0) == (random.Random(step // 2).random() < 0.5)


class Alternating(SamplingSource):
    """Writes the journal in one step of two, and notes the CPU time that has passed at the begin of each step."""

    def next(self, step: int) -> list[Episode]:
        names = ("journal",)
        clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident and t.name in names]
        passed = {"step": step, "driver": time.process_time(), "journal": sum(map(time.clock_gettime, clocks))}
        with open(os.path.join(self.cfg.trainer.run_dir, CPU_FILE), "a") as file:
            print(json.dumps(passed), file=file)
        self.rollouts.journal.is_on = writes(step)
        return super().next(step)


def build(cfg: Config, has_random_weights: bool) -> Task:
    task = rl.build(cfg, partial(rl.sample_episodes, make_source=Alternating))
    return replace(task, start_weights=None, warm_start=None) if has_random_weights else task


TASK = replace(TASKS["rl"], build=partial(build, has_random_weights=False))
RANDOM_WEIGHTS = replace(TASKS["rl"], build=partial(build, has_random_weights=True))


def train(run_dir: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """Train, and return for each step behind the warm-up: seconds, waited, CPU of the journal, CPU of the driver."""
    command = [
        sys.executable, "-m", "trainer", "train", "trainer.task=benchmarks.journal:TASK", f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={steps + 1}", "trainer.val_interval=-1", "trainer.ckpt_interval=1000",
        "logger.plot=false", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\n{' '.join(command)} ended with an error")
    rows: dict[int, dict[str, Any]] = {row["step"]: row for row in read_metrics(os.path.join(run_dir, METRICS_FILE))}
    with open(os.path.join(run_dir, CPU_FILE)) as file:
        passed = {line["step"]: line for line in map(json.loads, file)}
    return [
        {
            "step": step,
            "seconds": rows[step]["time/step"],
            "waited": rows[step].get("time/journal", 0.0),
            **{name: passed[step + 1][name] - passed[step][name] for name in ("driver", "journal")},
        }
        for step in range(WARM_UP, steps + 1)
    ]


def report(name: str, place: str, steps: list[dict[str, float]]) -> None:
    """Print a line about a run."""
    whole = median(step["seconds"] for step in steps)
    by_number = {int(step["step"]): step for step in steps}
    pairs = [(by_number[n], by_number[n + 1]) for n in sorted(by_number) if n % 2 == 0 and n + 1 in by_number]
    ordered = [(first, second) if writes(int(first["step"])) else (second, first) for first, second in pairs]

    def shown(values: list[float]) -> str:
        low, _, high = quantiles(values, n=4)
        # Of a normal distribution the quartiles are 1.349 deviations apart, and a median's error is 1.253 deviations
        # by the root of the number: so single slow steps do not count.
        error = 1.253 * (high - low) / 1.349 / math.sqrt(len(values))
        return f"{median(values) / whole:7.2%} ± {error / whole:.2%}"

    columns = [shown([written[key] for written, _ in ordered]) for key in ("waited", "journal")] + [
        shown([written[key] - plain[key] for written, plain in ordered]) for key in ("driver", "seconds")
    ]
    print(f"| {name} | {place} | {len(ordered)} | {whole:.2f} s | {' | '.join(columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps in each run (default: 15)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    places = "directories for the runs (default: the one for temporary files, and /dev/shm)"
    parser.add_argument("--places", nargs="+", default=[tempfile.gettempdir(), "/dev/shm"], help=places)
    parser.add_argument("overrides", nargs="*", help="further settings, such as rollout=transformers")
    args = parser.parse_args()
    print("| workload | place | pairs | a step | waited | CPU of its threads | CPU of the driver | time of a step |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.workloads:
        for place in args.places:
            with tempfile.TemporaryDirectory(dir=place) as root:
                steps = WARM_UP + 2 * args.pairs - 1
                overrides = [*args.overrides, *WORKLOADS[name]]
                report(name, place, train(os.path.join(root, name), steps, overrides))


if __name__ == "__main__":
    main()
