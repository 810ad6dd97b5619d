"""What a kill costs, with and without the journal: `python -m benchmarks.recovery [--kills N] [--trajectories]`.

Trains jobs whose rollouts take one, three and nine times the update, each from one checkpoint for as many steps as lie
between two checkpoints. At random moments, one in each of N equal parts of that time, it stops all processes of the job
for a moment and copies the run directory: that is what a kill leaves. Then it continues each copy up to the step that
was under way. The seconds of the steps that are trained again are compared with those that the same steps took the
first time, without records to train from. Start-up is printed apart. Some copies (`--controls`) are also continued with
`rollout.journal=false`, which should take as long as the first time; on a busy machine use one for each kill.

A reward waits (`waits`), so that rollouts take as long as they should on any machine: two groups at a time, so groups
finish one after another, as in an engine that is full.

With the journal, n steps behind the checkpoint cost n updates, and the rollouts that the step under way lacked. So the
ratio is at most 1 + (rollouts / update), and it is smaller the fewer steps a kill costs.

With `--trajectories`, it measures another thing: for how many seconds an engine had sampled what it must sample again
after the kill, over all episodes. The engine has no model, and takes the same time for each token. The kill comes in
the third step after the checkpoint. Episodes have a single turn, 8 turns with an environment, or 8 calls of an agent.
A trainer that keeps no rollouts, as TRL, loses all that was sampled since the checkpoint. That column is computed from
our run before the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from benchmarks.journal import Answers as LineAnswers
from tests.support.agents import chat
from tests.support.token_engine import StoppingEngine
from trainer.config.engines import EngineSpec
from trainer.environments import Endpoint
from trainer.generation.engine import Completion, Request
from trainer.metrics.tracker import METRICS_FILE, read_metrics

COMMITTED = 2  # the step of the checkpoint before the kill
GROUPS, LANES = 16, 2  # a step's groups; those that are rewarded at the same time
SECONDS, MARK = "BENCHMARK_REWARD_SECONDS", "BENCHMARK_REWARD_MARK"
AIMS = {1: 1.8, 3: 3.0, 9: 6.0}


TURNS = 8
ENGINE_LOG = "BENCHMARK_ENGINE_LOG"


class Timed(StoppingEngine):
    """Takes 10 ms a token. Leaves a line in a file when a reply begins, and when it has ended."""

    token_s = 0.01

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        if not hasattr(self, "_seeds"):
            self._seeds: dict[int, int] = {}
        new = {number: request.seed for number, request in requests.items()}
        self._seeds |= new
        self._note("begin", new.values())
        done = super().step(requests)
        self._note("end", (self._seeds.pop(number) for number in done))
        return done

    def _note(self, event: str, seeds: Iterable[int]) -> None:
        with open(os.environ[ENGINE_LOG], "a") as file:
            file.writelines(f"{event} {seed} {time.time()}\n" for seed in seeds)


ENGINE = EngineSpec(path=f"{__name__}:Timed", unit="request")


class Answers(LineAnswers):
    """Answers each reply with its length; done after 8 replies."""

    turns = TURNS

    def answer(self, characters: int) -> tuple[str, float]:
        return str(characters), float(characters % 2)


class Agent:
    """Asks 8 times."""

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> float:
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(TURNS):
            messages.append(chat(endpoint, messages)["choices"][0]["message"])
            messages.append({"role": "user", "content": str(len(messages[-1]["content"]))})
        return float(len(messages[-2]["content"]) % 2)


_TURNS = ["rollout.max_response_tokens=32", "environment.max_tokens=512"]
TRAJECTORIES = {
    "a single turn": ["rollout.max_response_tokens=256", "reward.name=benchmarks.recovery:length"],
    "8 turns": [*_TURNS, "environment.name=benchmarks.recovery:Answers", f"environment.max_turns={TURNS}"],
    "agents, 8 calls": [*_TURNS, "environment.name=benchmarks.recovery:Agent", f"environment.max_turns={TURNS}"],
}


def length(completion: str) -> float:
    return float(len(completion) % 2)


async def waits(completions: list[str]) -> list[float]:
    """A reward that takes as long as the environment says, and leaves a mark of its last call."""
    with open(os.environ[MARK], "w"):
        pass
    await asyncio.sleep(float(os.environ[SECONDS]))
    return [len(completion) / 100 for completion in completions]


@dataclass
class Image:
    """A copy of a run directory, as a kill would have left it."""

    path: str
    step: int
    """The one that was under way."""
    paused_s: float
    """Seconds for which the job stood still for the copy."""


def run(run_dir: str, steps: int, seconds: float, *more: str, watch: Callable[[Any], None] | None = None) -> float:
    """Run a job to its last step; return the seconds.

    Args:
        watch: called again and again with the process of the job.
    """
    command = [
        sys.executable, "-m", "trainer", "train", "rollout=transformers", "trainer.ray_address=processes",
        "reward.name=benchmarks.recovery:waits", f"reward.concurrency={LANES}", "reward.timeout_s=600",
        f"trainer.train_batch_size={GROUPS}", f"trainer.mini_batch_size={GROUPS}", "rollout.n=4",
        "trainer.update_epochs=12", "rollout.max_response_tokens=16", "trainer.policy.optimizer.scheduler=constant",
        f"trainer.total_steps={steps}", f"trainer.run_dir={run_dir}", "trainer.resume_mode=latest",
        "trainer.val_interval=-1", "trainer.ckpt_interval=1000", "logger.plot=false", *more,
    ]  # fmt: skip
    log, started = f"{run_dir}.log", time.monotonic()
    with open(log, "a") as output:
        env = {**os.environ, "OMP_NUM_THREADS": "1", SECONDS: str(seconds), MARK: f"{run_dir}.mark"}
        job = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    while job.poll() is None:
        if watch is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                watch(psutil.Process(job.pid))
        time.sleep(0.05)
    if job.returncode:
        with open(log) as output:
            raise SystemExit(f"{output.read()[-3000:]}\n{' '.join(command)} ended with status {job.returncode}")
    return time.monotonic() - started


def times_of(run_dir: str) -> dict[int, float]:
    """Return the seconds of the steps behind the checkpoint."""
    rows = read_metrics(os.path.join(run_dir, METRICS_FILE))
    return {row["step"]: row["time/step"] for row in rows if row["step"] > COMMITTED}


def train_and_copy(
    run_dir: str, interval: int, seconds: float, moments: list[float]
) -> tuple[dict[int, float], list[Image]]:
    """Train behind the checkpoint; return the seconds of each step, and the copies.

    Args:
        moments: of the copies, in seconds behind the begin of the first step, in order.
    """
    images: list[Image] = []
    resumed: list[float] = []
    began: list[float] = []

    def watch(job: Any) -> None:
        if not began:
            with open(f"{run_dir}.log") as log:
                is_resumed = "resumed from" in log.read()
            if is_resumed and not resumed:  # rewards were tried before that
                resumed.append(time.time())
            elif is_resumed and os.path.getmtime(f"{run_dir}.mark") > resumed[0]:
                began.append(time.monotonic())
            return
        paused = sum(image.paused_s for image in images)
        if len(images) < len(moments) and time.monotonic() - began[0] - paused >= moments[len(images)]:
            stopped, path = time.monotonic(), f"{run_dir}-{len(images)}"
            processes = [job, *job.children(recursive=True)]
            for process in processes:
                process.suspend()
            try:
                shutil.copytree(run_dir, path, symlinks=True)
                step = max([COMMITTED, *times_of(run_dir)]) + 1
            finally:
                for process in processes:
                    process.resume()
            images.append(Image(path, step, time.monotonic() - stopped))

    run(run_dir, COMMITTED + interval, seconds, watch=watch)
    took = times_of(run_dir)
    for image in images:
        took[image.step] -= image.paused_s
    return took, [image for image in images if image.step in took]


def measure(base: str, times: int, update_s: float, generate_s: float, args: argparse.Namespace) -> None:
    """Print the costs of kills of one workload.

    Args:
        base: run directory with the checkpoint.
    """
    draw = random.Random(f"{args.seed}:{times}")
    seconds = max(0.0, times * update_s - generate_s) / (GROUPS // LANES)
    whole_s = args.interval * (1 + times) * update_s
    moments = [whole_s * (part + draw.random()) / args.kills for part in range(args.kills)]
    run_dir = f"{base}-{times}"
    shutil.copytree(base, run_dir, symlinks=True)
    first, images = train_and_copy(run_dir, args.interval, seconds, moments)
    if not images:
        raise SystemExit("the job ended before the first kill; try again with a larger --interval")
    controls = sorted(range(len(images)), key=lambda number: abs(number - len(images) // 2))[: args.controls]
    before, again, ratios, paired = 0.0, 0.0, [], []
    for number, image in enumerate(images):
        first_s = sum(first[step] for step in first if step <= image.step)
        on_s, start_s = continued(run_dir, image, seconds, journal=True)
        before, again, ratios = before + first_s, again + on_s, [*ratios, first_s / on_s]
        off = " | |"
        if number in controls:
            off_s, _ = continued(run_dir, image, seconds, journal=False)
            paired.append(off_s / on_s)
            off = f"{off_s:.1f} s | {paired[-1]:.2f} |"
        lost = image.step - COMMITTED
        print(
            f"| {times} | {lost} | {first_s:.1f} s | {on_s:.1f} s | {ratios[-1]:.2f} | {off} {start_s:.1f} s |",
            flush=True,
        )
    aim = f" (aim {AIMS[times]:g})" if times in AIMS else ""
    shown = f"; continued without it {median(paired):.2f} times" if paired else ""
    print(
        f"rollouts {times} times the update: all kills together {before / again:.2f} times less{aim}; each "
        f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}{shown}",
        flush=True,
    )


def continued(run_dir: str, image: Image, seconds: float, journal: bool) -> tuple[float, float]:
    """Continue a copy up to the step that was under way; return the seconds of the steps, and those of the start."""
    shutil.rmtree(run_dir)
    shutil.copytree(image.path, run_dir, symlinks=True)
    total = run(run_dir, image.step, seconds, f"rollout.journal={str(journal).lower()}")
    took = sum(times_of(run_dir).values())
    return took, total - took


def trajectory_command(run_dir: str, words: list[str]) -> list[str]:
    """Return the command of a job of `TRAJECTORIES`."""
    return [
        sys.executable, "-m", "trainer", "train", "rollout=transformers", "rollout.engine=benchmarks.recovery:ENGINE",
        "rollout.max_logprob_diff=null", "trainer.ray_address=processes", "trainer.train_batch_size=8",
        "trainer.mini_batch_size=8", "rollout.n=4", "trainer.total_steps=3", f"trainer.run_dir={run_dir}",
        "trainer.resume_mode=latest", "trainer.val_interval=-1", "trainer.ckpt_interval=1000", "logger.plot=false",
        "algorithm=grpo", *words,
    ]  # fmt: skip


def lose_trajectories(root: str, words: list[str], part: float) -> tuple[float, float]:
    """Kill a job in its third step, and continue it.

    Args:
        part: of the replies of the step, how many have begun when the kill comes.

    Returns:
        The seconds for which the engine had sampled before the kill, and those of replies that it sampled again.
    """
    run_dir, log = os.path.join(root, "run"), os.path.join(root, "engine")
    env = {**os.environ, "OMP_NUM_THREADS": "1", ENGINE_LOG: log}
    command = trajectory_command(run_dir, words)
    most = 8 * 4 * (TURNS if any("environment.name" in word for word in words) else 1)

    def start() -> Any:
        return subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)

    def begun() -> int:
        with contextlib.suppress(FileNotFoundError), open(log) as file:
            return sum(line.startswith("begin") for line in file)
        return 0

    with open(os.path.join(root, "log"), "a") as output:
        job = start()
        while begun() < (2 + part) * most:
            if job.poll() is not None:
                raise SystemExit(f"{root}/log: the job ended before the kill")
            time.sleep(0.05)
        time.sleep(0.5)  # within replies
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in processes:
            process.suspend()  # so that none works while others are killed
        killed = time.time()
        for process in processes:
            process.kill()
        job.wait()
        before = sampled_s(log, until=killed)
        os.rename(log, f"{log}-before")
        if start().wait():
            raise SystemExit(f"{root}/log: the job that was continued failed")
        again = sampled_s(log, until=math.inf)
    return sum(before.values()), sum(seconds for seed, seconds in before.items() if seed in again)


def sampled_s(log: str, until: float) -> dict[str, float]:
    """Return for how long each reply was sampled, by its seed, also one that has not ended."""
    begun, took = {}, {}
    with open(log) as file:
        for event, seed, moment in map(str.split, file):
            if event == "begin":
                begun[seed] = float(moment)
            else:
                took[seed] = float(moment) - begun[seed]
    return {seed: took.get(seed, min(until, time.time()) - moment) for seed, moment in begun.items()}


def measure_trajectories(kills: int, seed: int) -> None:
    """Print the trajectory-seconds that a kill costs, for each kind of episode."""
    draw = random.Random(seed)
    print("| episodes | sampled since the checkpoint | lost: journal | no journal | keeps no rollouts (computed) |")
    print("|---|---|---|---|---|", flush=True)
    for name, words in TRAJECTORIES.items():
        rows = []
        for _ in range(kills):
            part, lost = draw.uniform(0.2, 0.8), []
            for journal in ("true", "false"):
                with tempfile.TemporaryDirectory() as root:
                    lost.append(lose_trajectories(root, [*words, f"rollout.journal={journal}"], part))
            rows.append((lost[0][0], lost[0][1], lost[1][1], lost[1][0]))
        print(f"| {name} | {' | '.join(f'{median(column):.1f} s' for column in zip(*rows, strict=True))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="kills for each workload (default: 4)")
    controls = "kills of each workload that are continued without the journal, too (default: 1)"
    parser.add_argument("--controls", type=int, default=1, help=controls)
    parser.add_argument("--interval", type=int, default=20, help="steps between two checkpoints (default: 20)")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 3, 9], help="rollouts, in updates (default: 1 3 9)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    trajectories = "measure the trajectory-seconds that a kill costs instead"
    parser.add_argument("--trajectories", action="store_true", help=trajectories)
    args = parser.parse_args()
    if args.trajectories:
        measure_trajectories(args.kills, args.seed)
        return
    with tempfile.TemporaryDirectory() as root:
        base, whole = os.path.join(root, "base"), os.path.join(root, "whole")
        run(base, COMMITTED, 0.0)
        shutil.copytree(base, whole, symlinks=True)
        run(whole, 10, 0.0)
        rows = [row for row in read_metrics(os.path.join(whole, METRICS_FILE)) if row["step"] > COMMITTED + 1]
        generate_s = median(row.get("time/rollout", 0.0) + row.get("time/reward", 0.0) for row in rows)
        update_s = median(row["time/step"] for row in rows) - generate_s
        print(f"without waiting: a step generates for {generate_s:.2f} s and learns for {update_s:.2f} s\n")
        print("| rollouts / update | steps lost | first time | again | ratio | without journal | ratio | start-up |")
        print("|---|---|---|---|---|---|---|---|")
        for times in args.times:
            measure(base, times, update_s, generate_s, args)


if __name__ == "__main__":
    main()
