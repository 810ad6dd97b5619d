"""What a kill costs, with and without the journal: `python -m benchmarks.recovery [--kills N]`.

Kills jobs whose rollouts take one, three and nine times the update, at random moments. Then it gives the same command
again, once with `rollout.journal=true` and once, from a copy of the killed run, with `false`, and measures the seconds
of the steps that are trained again, up to the step that was under way. Start-up costs the same in both, and is not in
the ratio. The rollouts wait in an environment (`Waits`), so that they take as long as they should on any machine.

Prints, too, which share of its steps an uninterrupted run waits for the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import psutil

from trainer.environments import Message, StepResult
from trainer.metrics.tracker import METRICS_FILE, read_metrics

COMMITTED = 2  # the only checkpoint before the kill


class Waits:
    """Answers after some seconds.

    Args:
        seconds: of an episode.
    """

    def __init__(self, seconds: float = 0.0):
        self._seconds = seconds

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, reply: Message) -> StepResult:
        await asyncio.sleep(self._seconds)
        return StepResult([], len(reply["content"]) / 100, True)

    def close(self) -> None:
        """Nothing is open."""


def run(run_dir: str, steps: int, seconds: float, *more: str, kill_when: Callable[[], bool] = lambda: False) -> None:
    """Run a job to its last step, or until `kill_when()`."""
    command = [
        sys.executable, "-m", "trainer.main", "rollout=transformers", "trainer.ray_address=processes",
        "environment.name=benchmarks.recovery:Waits", f"+environment.kwargs.seconds={seconds}",
        "environment.timeout_s=600", "environment.max_turns=1", "trainer.train_batch_size=16",
        "trainer.mini_batch_size=16", "rollout.n=4", "trainer.update_epochs=4",
        "rollout.max_response_tokens=16", "trainer.policy.optimizer.scheduler=constant", f"trainer.total_steps={steps}",
        f"trainer.run_dir={run_dir}", "trainer.resume_mode=latest", "trainer.val_interval=-1",
        f"trainer.ckpt_interval={COMMITTED}", "logger.plot=false", *more,
    ]  # fmt: skip
    log = f"{run_dir}.log"
    with open(log, "a") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while job.poll() is None:
        if kill_when():
            processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()
            return
        time.sleep(0.02)
    if job.returncode:
        with open(log) as output:
            raise SystemExit(f"{output.read()[-3000:]}\n{' '.join(command)} ended with status {job.returncode}")


def rows_of(run_dir: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(os.path.join(run_dir, METRICS_FILE)) if row["step"] > 0]


def moment_in(run_dir: str, step: int, delay_s: float) -> Callable[[], bool]:
    """Return whether some seconds have passed since `step` was logged."""
    reached: list[float] = []

    def is_reached() -> bool:
        rows = [] if reached else rows_of(run_dir)
        if rows and rows[-1]["step"] >= step:
            reached.append(time.monotonic())
        return bool(reached) and time.monotonic() - reached[0] >= delay_s

    return is_reached


def trained_again(run_dir: str, lost: int, seconds: float, journal: bool) -> tuple[float, float]:
    """Return the seconds of the steps behind the checkpoint up to `lost`, and those since the command was given."""
    begin = time.monotonic()
    run(run_dir, lost, seconds, f"rollout.journal={str(journal).lower()}")
    took = time.monotonic() - begin
    return sum(row["time/step"] for row in rows_of(run_dir) if row["step"] > COMMITTED), took


def measure(root: str, update_s: float, generate_s: float, times: int, kills: int, moments: random.Random) -> None:
    seconds = max(0.0, times * update_s - generate_s)
    ratios, again = [], {True: 0.0, False: 0.0}
    for number in range(kills):
        run_dir = os.path.join(root, f"{times}-{number}")
        last, fraction = moments.randint(COMMITTED + 1, COMMITTED + 3), moments.random()
        # Its second checkpoint would be at step 4: the interval is the whole run, but for the first.
        run(run_dir, COMMITTED, seconds)
        moment = moment_in(run_dir, last, fraction * (1 + times) * update_s)
        run(run_dir, COMMITTED + 20, seconds, "trainer.ckpt_interval=1000", kill_when=moment)
        lost = rows_of(run_dir)[-1]["step"] + 1
        shutil.copytree(run_dir, f"{run_dir}-copy", symlinks=True)
        took = {}
        for journal in (True, False):
            again[journal], took[journal] = trained_again(run_dir, lost, seconds, journal)
            if journal:
                shutil.rmtree(run_dir)
                os.rename(f"{run_dir}-copy", run_dir)
        ratios.append(again[False] / again[True])
        print(
            f"| {times} | {lost - COMMITTED} | {fraction:.2f} | {again[False]:.1f} s | {again[True]:.1f} s | "
            f"{ratios[-1]:.2f} | {took[False]:.1f} s | {took[True]:.1f} s |",
            flush=True,
        )
    print(f"rollouts {times} times the update: {median(ratios):.2f} times less trained-again time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="kills for each workload (default: 3)")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 3, 9], help="rollouts, in updates (default: 1 3 9)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as root:
        whole = os.path.join(root, "whole")
        run(whole, 8, 0.0)
        rows = rows_of(whole)[2:]
        generate_s = median(row.get("time/rollout", 0.0) + row.get("time/environment", 0.0) for row in rows)
        update_s = median(row["time/step"] for row in rows) - generate_s
        waited = sum(row.get("time/journal", 0.0) for row in rows) / sum(row["time/step"] for row in rows)
        print(f"without waiting: a step generates for {generate_s:.2f} s and learns for {update_s:.2f} s")
        print(f"waiting for the journal: {waited:.2%} of these steps\n")
        print("| rollouts / update | steps lost | moment | without | with | ratio | with start-up: without | with |")
        print("|---|---|---|---|---|---|---|---|")
        for times in args.times:
            measure(root, update_s, generate_s, times, args.kills, moments)


if __name__ == "__main__":
    main()
