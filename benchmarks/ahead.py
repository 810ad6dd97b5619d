"""Seconds of a step with and without rollouts ahead: `python -m benchmarks.ahead [--workloads demo equal long]`.

Runs short jobs on two cores, a rank and an engine with one thread each, in turns: `rollout.ahead` 0, 1, 0, 1, … (and
with `rollout.in_flight_updates`, for the workload `long`). A
machine that gets slower so hits both. Prints the median seconds of a step for each setting, their smallest and largest,
the ratio to `rollout.ahead=0` within each round, and where the time of a step goes. The first steps of a job warm up
and its last has nothing ahead: they are not counted.

The workloads:

- `demo`: what `make demo` trains.
- `equal`: generation takes as long as the rest of the step.
- `long`: completions have very different lengths, so an engine waits for few long ones.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from transformers import GenerationConfig

from benchmarks.models import SMALL, make_model
from trainer.metrics.tracker import METRICS_FILE, read_metrics

_WARM_UP = 3
_AHEAD = {"ahead 0": ("rollout.ahead=0",), "ahead 1": ("rollout.ahead=1",)}
_IN_FLIGHT = {"in flight": ("rollout.in_flight_updates=true",)}
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """What a job trains, and how long."""

    overrides: tuple[str, ...]
    steps: int
    stops: int = 0
    """Tokens of 1,024 that end a completion of a model with random weights. 0: the built-in model is trained."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _AHEAD)
    """The settings that take turns, by their name in the table. The others are compared with the first."""


_RANDOM = (
    "trainer.policy.optimizer.lr=1e-4",
    "algorithm.kl_coef=0",
    "reward.name=benchmarks.vowels:score",
    "trainer.train_batch_size=16",
    "trainer.mini_batch_size=8",
)
WORKLOADS = {
    "demo": Workload((), 24),
    "equal": Workload((*_RANDOM, "rollout.max_response_tokens=64"), 20, stops=1),
    "long": Workload((*_RANDOM, "rollout.max_response_tokens=512"), 16, stops=16, settings={**_AHEAD, **_IN_FLIGHT}),
}


def make_random_model(stops: int, path: str) -> None:
    """Write a model with random weights, which ends a completion after about 1,024 / `stops` tokens."""
    make_model(SMALL, None, path)
    config = GenerationConfig.from_pretrained(path)
    config.eos_token_id = [config.eos_token_id, *range(100, 99 + stops)]
    config.save_pretrained(path)


def run(workload: Workload, settings: Sequence[str], extra: list[str], run_dir: str) -> list[Row]:
    """Run a job to its end; return the metrics of the steps that count."""
    command = [
        sys.executable, "-m", "trainer", "train", f"trainer.total_steps={workload.steps}", f"trainer.run_dir={run_dir}",
        "trainer.val_interval=-1", "trainer.ckpt_interval=-1", "logger.plot=false", "logger.samples=0",
        *workload.overrides, *settings, *extra,
    ]  # fmt: skip
    with open(f"{run_dir}.log", "w") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if status:
        with open(f"{run_dir}.log") as log:
            raise SystemExit(f"{log.read()[-3000:]}\n{' '.join(command)} ended with status {status}")
    rows = [row for row in read_metrics(os.path.join(run_dir, METRICS_FILE)) if row["step"] > 0]
    return rows[_WARM_UP:-1]


def measure(name: str, workload: Workload, rounds: int, extra: list[str], directory: str) -> None:
    """Run all settings in turns, and print a line for each."""
    model = os.path.join(directory, f"{name}-model")
    if workload.stops:
        make_random_model(workload.stops, model)
        extra = [f"model.path={model}", *extra]
    found: dict[str, list[list[Row]]] = {setting: [] for setting in workload.settings}
    for number in range(rounds):
        for position, (setting, overrides) in enumerate(workload.settings.items()):
            run_dir = os.path.join(directory, f"{name}-{position}-{number}")
            found[setting].append(run(workload, overrides, extra, run_dir))
    base = [median(row["time/step"] for row in rows) for rows in next(iter(found.values()))]
    for setting, jobs in found.items():
        steps = [row["time/step"] for rows in jobs for row in rows]
        own = [median(row["time/step"] for row in rows) for rows in jobs]
        ratios = sorted(one / zero for one, zero in zip(own, base, strict=True))
        print(
            f"| {name} | {setting} | {median(steps):.3f} s | {min(steps):.3f} to {max(steps):.3f} | "
            f"{median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} | {_phases(jobs)} |",
            flush=True,
        )


def _phases(jobs: list[list[Row]]) -> str:
    rows = [row for rows in jobs for row in rows]
    names = sorted({name for row in rows for name in row if name.startswith("time/") and name != "time/step"})
    seconds = {name.removeprefix("time/"): median(row.get(name, 0.0) for row in rows) for name in names}
    return ", ".join(f"{name} {value:.3f}" for name, value in seconds.items() if value >= 0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["demo", "equal"])
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each setting (default: 3)")
    parser.add_argument("extra", nargs="*", help="overrides for every job, after --")
    args = parser.parse_args()
    columns = ("workload", "setting", "step", "smallest and largest", "ratio", "of each round", "seconds of a step")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in args.workloads:
            measure(name, WORKLOADS[name], args.rounds, args.extra, directory)


if __name__ == "__main__":
    main()
