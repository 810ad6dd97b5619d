"""Where a step's time goes: `python -m benchmarks.step_time [--steps N]`.

Runs the embedded default as a user would, for GRPO and PPO on one and two ranks, without validation and
checkpoints. Prints, from each run's own metrics, the median step and each phase's share of it, the step
relative to GRPO on one rank, and the seconds from the command to the end of the first step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from trainer.metrics.names import PHASES
from trainer.metrics.tracker import METRICS_FILE, read_metrics


def run(algorithm: str, ranks: int, steps: int, run_dir: str) -> float:
    """Run a job; returns the seconds from its start to the line of its first step."""
    command = [
        sys.executable, "-m", "trainer.main", f"algorithm={algorithm}", f"trainer.num_workers={ranks}",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps a job, the first not counted (default: 10)")
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error("--steps must be at least 2: the first step warms up and is not counted")
    with tempfile.TemporaryDirectory() as run_dir:  # so that no job below has to warm-start the embedded model
        run("grpo", 1, 1, run_dir)
    phases = [phase for phase in PHASES if phase != "checkpoint_blocked"]
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
            shares = [median(row[f"time/{phase}"] / row["time/step"] for row in rows) for phase in phases]
            cells = " | ".join(f"{share:.0%}" for share in [*shares, 1 - sum(shares)])
            job = f"{algorithm}, {ranks} rank{'s' if ranks > 1 else ''}"
            print(f"| {job} | {first:.0f} s | {step:.2f} s | {step / base:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
