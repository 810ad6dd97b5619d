"""What the journal costs a step: `python -m benchmarks.journal [--pairs N] [--places DIRECTORY ...]`.

Trains one run for each workload and place, in which one step of each pair, drawn by chance, writes the journal, and the
other does not. The workloads are the demo, and a model with random weights whose completions have up to 512 tokens.
In the workload `turns`, an environment answers 40 replies of each episode. There the other step writes finished
episodes alone, and the engine has no model, because the driver alone is measured.

Prints for a step the seconds that the driver waited for the journal (`time/journal`); the CPU seconds of the journal's
threads, also as a share of the driver's; and what steps with it took longer than those without: in CPU seconds of the
driver, in which those of the journal's threads are contained, also as a share of the driver's, and on the clock. In
`turns`, the calls that record turns are added to the journal's threads, and what these take in the other step is
subtracted. Medians, and their standard errors; a busy machine shows in the last three columns, hardly in the others.
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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

from tests.support.token_engine import StoppingEngine
from trainer.config import TASKS, Config
from trainer.config.engines import EngineSpec
from trainer.environments import Message, StepResult
from trainer.environments.turns import EpisodeTurns, reply_name
from trainer.episodes import Episode
from trainer.generation.engine import Completion
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.models.tiny import TinyShape, build_tiny
from trainer.sources import rollouts
from trainer.sources.rollouts import Group
from trainer.sources.sampling import SamplingSource
from trainer.tasks import Task, rl

CPU_FILE = "cpu.jsonl"
TURNS = 40
MODEL_OF_TURNS = TinyShape(
    hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_position_embeddings=8192
)
WARM_UP = 2
WORKLOADS = {
    "demo": [],
    "long": [
        "trainer.task=benchmarks.journal:RANDOM_WEIGHTS", "trainer.train_batch_size=8", "trainer.mini_batch_size=8",
        "rollout.n=4", "rollout.max_response_tokens=512", "trainer.policy.optimizer.lr=0",
    ],
    "turns": [
        "trainer.task=benchmarks.journal:TURNS_OR_EPISODES", "trainer.ray_address=processes", "trainer.device=cpu",
        "trainer.train_batch_size=4", "trainer.mini_batch_size=4", "rollout.n=2", "rollout.max_response_tokens=64",
        "rollout.engine=benchmarks.journal:ENGINE", "rollout.max_logprob_diff=null", "rollout.max_prompt_tokens=128",
        "environment.name=benchmarks.journal:Answers", f"environment.max_turns={TURNS}", "environment.max_tokens=4096",
        "trainer.policy.optimizer.lr=0",
    ],
}  # fmt: skip


class Answers:
    """Answers each reply with a line of text; done after `turns` replies."""

    turns = TURNS

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self.left = self.turns
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        text, reward = self.answer(len(reply["content"]))
        return StepResult([{"role": "user", "content": text}], reward, done=self.left == 0)

    def answer(self, characters: int) -> tuple[str, float]:
        """Return the text and the reward for a reply of so many characters."""
        return f"{self.left} left, {characters} characters.", 1.0

    def close(self) -> None:
        pass


class Tokens(StoppingEngine):
    """Makes a whole reply, of at most 64 tokens, in one step."""

    token_s = 0.0


ENGINE = EngineSpec(path=f"{__name__}:Tokens", unit="request")


def writes(step: int) -> bool:
    """Return whether a step writes the journal: one of each pair of steps does."""
    return (step % 2 == 0) == (random.Random(step // 2).random() < 0.5)


class Alternating(SamplingSource):
    """Writes the journal in one step of two, and notes the CPU time that has passed at the begin of each step."""

    def next(self, step: int) -> list[Episode]:
        names = ("journal",)
        clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident and t.name in names]
        passed = {
            "step": step,
            "driver": time.process_time(),
            "journal": IN_CALLS[0] + sum(map(time.clock_gettime, clocks)),
        }
        with open(os.path.join(self.cfg.trainer.run_dir, CPU_FILE), "a") as file:
            print(json.dumps(passed), file=file)
        self._switch(writes(step))
        return super().next(step)

    def _switch(self, is_on: bool) -> None:
        self.rollouts.journal.is_on = is_on


class AlternatingTurns(Alternating):
    """Writes all finished episodes, and the turns of running ones in one step of two."""

    def _switch(self, is_on: bool) -> None:
        Group.turns = _timed_turns if is_on else lambda record, index: Unrecorded()  # type: ignore[assignment]
        rollouts.reply_name = _timed(reply_name) if is_on else lambda turn, request: turn


_record_turns = Group.turns


def _timed_turns(record: Group, index: int) -> EpisodeTurns:
    """Return the turns of an episode, whose calls add to the CPU time of the journal's threads."""
    turns = _record_turns(record, index)
    for name in ("add_reply", "add_answer", "recorded_answer"):
        setattr(turns, name, _timed(getattr(turns, name)))
    return turns


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            IN_CALLS[0] += time.thread_time() - began

    return call


IN_CALLS = [0.0]
"""CPU seconds of the calls that record turns, on the thread of the episodes."""


class Unrecorded(EpisodeTurns):
    """Turns that are not written to the journal, and are not looked up there."""

    async def find(self, name: str) -> Completion | None:
        return None

    def add_reply(self, name: str, completion: Completion, is_company: bool = False) -> None:
        self.sampled += 1

    def add_answer(self, number: int, answer: StepResult, state: str | None) -> None:
        pass


def build(cfg: Config, has_random_weights: bool, source: type[Alternating] = Alternating) -> Task:
    task = rl.build(cfg, partial(rl.sample_episodes, make_source=source))
    return replace(task, start_weights=None, warm_start=None) if has_random_weights else task


TASK = replace(TASKS["rl"], build=partial(build, has_random_weights=False))
RANDOM_WEIGHTS = replace(TASKS["rl"], build=partial(build, has_random_weights=True))
TURNS_OR_EPISODES = replace(TASKS["rl"], build=partial(build, has_random_weights=True, source=AlternatingTurns))


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
    whole, driver = (median(step[key] for step in steps) for key in ("seconds", "driver"))
    by_number = {int(step["step"]): step for step in steps}
    pairs = [(by_number[n], by_number[n + 1]) for n in sorted(by_number) if n % 2 == 0 and n + 1 in by_number]
    ordered = [(first, second) if writes(int(first["step"])) else (second, first) for first, second in pairs]

    def shown(values: list[float], whole: float = whole) -> str:
        low, _, high = quantiles(values, n=4)
        # Of a normal distribution the quartiles are 1.349 deviations apart, and a median's error is 1.253 deviations
        # by the root of the number: so single slow steps do not count.
        error = 1.253 * (high - low) / 1.349 / math.sqrt(len(values))
        return f"{median(values) / whole:7.2%} ± {error / whole:.2%}"

    columns = [shown([written["waited"] for written, _ in ordered])]
    own = [written["journal"] - (plain["journal"] if name == "turns" else 0.0) for written, plain in ordered]
    columns += [shown(own), shown(own, driver)]
    more = {key: [written[key] - plain[key] for written, plain in ordered] for key in ("driver", "seconds")}
    columns += [shown(more["driver"]), shown(more["driver"], driver), shown(more["seconds"])]
    print(f"| {name} | {place} | {len(ordered)} | {whole:.2f} s | {' | '.join(columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps in each run (default: 15)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    places = "directories for the runs (default: the one for temporary files, and /dev/shm)"
    parser.add_argument("--places", nargs="+", default=[tempfile.gettempdir(), "/dev/shm"], help=places)
    parser.add_argument("overrides", nargs="*", help="further settings, such as rollout=transformers")
    args = parser.parse_args()
    print(
        "| workload | place | pairs | a step | waited | its CPU | of the driver's | driver's CPU | of its own | time |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.workloads:
        for place in args.places:
            with tempfile.TemporaryDirectory(dir=place) as root:
                steps = WARM_UP + 2 * args.pairs - 1
                build_tiny(MODEL_OF_TURNS, os.path.join(root, "model"))
                model = [f"model.path={root}/model"] if name == "turns" else []
                overrides = [*args.overrides, *WORKLOADS[name], *model]
                report(name, place, train(os.path.join(root, name), steps, overrides))


if __name__ == "__main__":
    main()
