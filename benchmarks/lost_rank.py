"""What a lost rank costs, with and without copies: `python -m benchmarks.lost_rank [--pairs N] [--lost STEPS ...]`.

Trains a model of 100M parameters from a checkpoint on, on two ranks, which are plain processes with one thread each. In
the update of a step rank 1 kills itself. Measured is the time from the kill until the line of this step is in
`metrics.jsonl`: with `trainer.copy_steps=false`, where the ranks continue from the checkpoint, and with
`trainer.copy_steps=true`, where they continue from the copy in shared memory. Of both the time of a step without copies
is taken off: the one after the kill in the first job. Jobs of both kinds take turns. The ratios are those of the CPU
seconds of all processes of the job, and of the seconds, which say little while the machine has other work.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

from trainer.algorithms.losses import Loss, clip
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.models.tiny import TinyShape, build_tiny

KILL = "BENCHMARK_KILL"
COMMITTED = 2  # the step of the checkpoint
SHAPE = TinyShape(hidden_size=768, intermediate_size=2048, num_layers=14, num_heads=12, num_kv_heads=12, head_dim=64)
_calls = itertools.count(1)


def dying_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Loss:
    """`clip`, in a rank 1 that kills itself once, at the call that the environment names. A step is one call."""
    path, _, nth = os.environ.get(KILL, "").rpartition(",")
    if path and dist.is_initialized() and dist.get_rank() == 1 and next(_calls) == int(nth):
        with contextlib.suppress(FileExistsError), open(path, "x"):
            os.kill(os.getpid(), signal.SIGKILL)
    return clip(logprobs, old_logprobs, advantages, mask, **options)


@dataclass(frozen=True)
class Moment:
    """When something was seen."""

    seconds: float
    cpu: float
    """CPU seconds of all processes of the job until then."""

    def __sub__(self, other: Moment) -> Moment:
        return Moment(self.seconds - other.seconds, self.cpu - other.cpu)


def run(model: str, run_dir: str, steps: int, *more: str, kill: int | None = None) -> tuple[Moment, Moment] | None:
    """Run a job; return what it cost from the kill to the line of the killed step, and the next step.

    Args:
        kill: the call of the loss at which rank 1 kills itself, in the last step but one. None: it does not.
    """
    command = [
        sys.executable, "-m", "trainer", "train", "rollout=transformers", "trainer.ray_address=processes",
        "trainer.device=cpu", f"model.path={model}", "trainer.num_workers=2", "trainer.train_batch_size=2",
        "trainer.mini_batch_size=2", "rollout.n=2", "rollout.max_response_tokens=8", f"trainer.total_steps={steps}",
        "algorithm.policy_loss=benchmarks.lost_rank:dying_clip", f"trainer.run_dir={run_dir}",
        "trainer.ckpt_interval=-1", "trainer.val_interval=-1", "trainer.policy.optimizer.scheduler=constant",
        "trainer.resume_mode=latest", "logger.plot=false", *more,
    ]  # fmt: skip
    mark, metrics = f"{run_dir}.kill", os.path.join(run_dir, METRICS_FILE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", KILL: f"{mark},{kill}" if kill else ""}
    with open(f"{run_dir}.log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    cpu: dict[int, float] = {}
    seen: dict[int, Moment] = {}  # the kill as 0, and the lines behind it
    while job.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    cpu[process.pid] = sum(process.cpu_times()[:2])
        now = Moment(time.monotonic(), sum(cpu.values()))
        if os.path.exists(mark):
            seen.setdefault(0, now)
            for row in read_metrics(metrics):
                if row["step"] >= steps - 1:
                    seen.setdefault(row["step"], now)
        time.sleep(0.05)
    with open(f"{run_dir}.log") as log:
        text = log.read()
    if job.returncode or text.count("the ranks start again") != (kill is not None):
        raise SystemExit(f"{text[-3000:]}\nthe job ended with status {job.returncode}")
    if kill is None:
        return None
    return seen[steps - 1] - seen[0], seen[steps] - seen[steps - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="jobs of each kind (default: 2)")
    lost = "finished steps between the checkpoint and the step of the kill (default: 1 5)"
    parser.add_argument("--lost", type=int, nargs="*", default=[1, 5], help=lost)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model, base, run_dir = (os.path.join(root, name) for name in ("model", "base", "run"))
        build_tiny(SHAPE, model)
        run(model, base, COMMITTED)
        print(
            "| steps lost | from the checkpoint | from the copy | ratio of CPU seconds | of seconds | the next step |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        for count in args.lost:
            ratios: list[tuple[float, float]] = []
            for _ in range(args.pairs):
                costs = []
                for copies in ("false", "true"):
                    shutil.copytree(base, run_dir)
                    steps = COMMITTED + count + 2
                    costs.append(run(model, run_dir, steps, f"trainer.copy_steps={copies}", kill=count + 1))
                    shutil.rmtree(run_dir)
                    os.remove(f"{run_dir}.kill")
                (before, step), (after, copied_step) = costs
                before, after = before - step, after - step
                ratios.append((after.cpu / before.cpu, after.seconds / before.seconds))
                shown = [f"{one.cpu:.1f} CPU s, {one.seconds:.1f} s" for one in (before, after)]
                steps_cpu = f"{step.cpu:.1f} and {copied_step.cpu:.1f} CPU s"
                of_both = " | ".join(f"{ratio:.2f}" for ratio in ratios[-1])
                print(f"| {count} | {shown[0]} | {shown[1]} | {of_both} | {steps_cpu} |", flush=True)
            of_cpu, of_clock = (median(one) for one in zip(*ratios, strict=True))
            print(f"{count} steps lost: medians {of_cpu:.2f} of CPU seconds, {of_clock:.2f} of seconds", flush=True)


if __name__ == "__main__":
    main()
