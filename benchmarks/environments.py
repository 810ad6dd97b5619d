"""What `environment.schedule=stream` gains: `python -m benchmarks.environments [--rounds N] [--step-s S] [--calls C]`.

One engine (vLLM, a small model that ends replies at random) and environments of this machine. Schedules take turns,
with the same episodes in each: a machine that gets slower hits all of them.

- Episodes whose replies have lengths that vary more than tenfold, and environments that take `--step-s` a step, on no
  core: tokens of the policy per second, as a ratio of `stream` to `rounds`. Once all episodes have 8 turns, and once
  they have 1 to 10. `--calls` says whether the environments are `async`, block in threads, or block one after another.
- Episodes of a single turn, whose environment takes no time: seconds for all of them, as a ratio to completions without
  an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, EnvironmentConfig, RolloutConfig, TinyConfig
from trainer.data.datasets import Prompt
from trainer.environments import Message, StepResult
from trainer.environments.episode_runner import EpisodeRunner, RolloutRequest
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.request_stream import RequestStream
from trainer.learner.train_workers import TrainWorkers
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.routes import episode_runner

_MEAN_LENGTH = 40
_LONGEST = 400


class Waiting:
    """Answers after `row["seconds"]`; done after `row["turns"]` replies."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._left, self._seconds = row["turns"], row["seconds"]
        return [{"role": "user", "content": "?"}]

    async def step(self, reply: Message) -> StepResult:
        await asyncio.sleep(self._seconds)
        return self._answer()

    def _answer(self) -> StepResult:
        self._left -= 1
        return StepResult([{"role": "user", "content": "?"}], 1.0, done=self._left == 0)

    def close(self) -> None:
        pass


class Blocking(Waiting):
    """The same, with a step that is not `async`."""

    def step(self, reply: Message) -> StepResult:  # type: ignore[override]
        time.sleep(self._seconds)
        return self._answer()


class Threads(Blocking):
    """The same, in threads."""

    thread_safe = True


class _Generation:
    """See `trainer.environments.episode_runner.Generation`."""

    def __init__(self, engines: EnginePool):
        self._engines = engines

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        return self._engines.stream(requests)

    def open_stream(self) -> RequestStream:
        return self._engines.open_stream()

    def end_requests(self) -> None:
        pass

    @property
    def paused_s(self) -> float:
        return self._engines.pauses.seconds


def make_model(path: str) -> None:
    """Write a model that ends a reply with the same probability after each token."""
    build_tiny(TinyConfig(tie_word_embeddings=False, max_position_embeddings=8192), path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embedding.normal_(0.0, 0.02).add_(1.0)  # so the last hidden state is nearly the same everywhere
        head.normal_(0.0, 0.02)
        head[model.config.eos_token_id] = math.log(len(head) / _MEAN_LENGTH) / head.shape[1]
    model.save_pretrained(path)


def config(schedule: str | None, most: int, calls: str) -> Config:
    """Return the settings of a run. `schedule`: None: it has no environment. `calls`: see `main`."""
    cfg = Config(rollout=RolloutConfig(max_prompt_tokens=6000, max_response_tokens=_LONGEST, max_num_seqs=most))
    cfg.rollout.kv_cache_mb = 512
    cfg.trainer.ray_address = "processes"
    if schedule is not None:
        name = {"async": "Waiting", "threads": "Threads", "in_turn": "Blocking"}[calls]
        cfg.environment = EnvironmentConfig(name=f"benchmarks.environments:{name}", schedule=schedule, max_turns=10)
    return cfg


@contextlib.contextmanager
def engines_of(cfg: Config, path: str) -> Iterator[EnginePool]:
    """Start an engine with the model at `path`."""
    with ProcessCluster(cfg, "cpu") as cluster:
        ranks = TrainWorkers(cfg, cluster)
        engines = EnginePool(cfg, cluster, ranks, path)
        ranks.begin(path)()
        engines.start(version=1, is_initial=True)
        yield engines


def run(runner: EpisodeRunner, engines: EnginePool, requests: Sequence[RolloutRequest]) -> tuple[float, int]:
    """Run episodes; return the seconds and the number of tokens that the policy has sampled."""
    begin, tokens = time.perf_counter(), 0
    for part in runner.run(requests, _Generation(engines), lambda _: contextlib.nullcontext()):
        tokens += sum(episode.length for episode in part.values())
    return time.perf_counter() - begin, tokens


def requests_of(tokenizer: Any, turns: Sequence[int], seconds: float, step: int) -> list[RolloutRequest]:
    """Return one request for each number of turns."""
    sampling = Sampling(1.0, 1.0, -1, _LONGEST, (tokenizer.eos_token_id,))
    ids = tuple(tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True,
                                              return_dict=False))  # fmt: skip
    rows: list[dict[str, Any]] = [{"turns": count, "seconds": seconds} for count in turns]
    return [RolloutRequest(Prompt(i, ids, "", "?", row), f"0:{i}", step, 0, sampling) for i, row in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each schedule (default: 5)")
    parser.add_argument("--episodes", type=int, default=64, help="episodes of a measurement (default: 64)")
    parser.add_argument("--most", type=int, default=64, help="sequences that the engine runs together (default: 64)")
    parser.add_argument("--step-s", type=float, default=0.05, help="seconds of a step (default: 0.05)")
    parser.add_argument("--calls", choices=["async", "threads", "in_turn"], default="async", help="(default: async)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    schedules: dict[str, str | None] = {"rounds": "rounds", "stream": "stream", "no environment": None}
    turns = {
        "8 turns": [8] * arguments.episodes,
        "1 to 10 turns": [1 + (7 * i) % 10 for i in range(arguments.episodes)],
    }
    speeds: dict[str, dict[str, list[float]]] = {kind: {"rounds": [], "stream": []} for kind in turns}
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        make_model(directory)
        tokenizer = load_tokenizer(directory)
        made = {}
        for name, schedule in schedules.items():
            cfg = config(schedule, arguments.most, arguments.calls)
            # Without an environment, the engine is that of `rounds`: it has the same settings.
            engines = made["rounds"][1] if schedule is None else stack.enter_context(engines_of(cfg, directory))
            made[name] = stack.enter_context(episode_runner(cfg, tokenizer)), engines
        for number in range(arguments.rounds + 1):
            for kind, of_schedules in speeds.items():
                for name, found in of_schedules.items():
                    took, tokens = run(*made[name], requests_of(tokenizer, turns[kind], arguments.step_s, number))
                    found.append(tokens / took)
            for name in schedules:
                took, tokens = run(*made[name], requests_of(tokenizer, [1] * arguments.episodes, 0.0, number))
                seconds[name].append(took)
    _print_results(speeds, seconds, arguments.step_s)


def _print_results(speeds: dict[str, dict[str, list[float]]], seconds: dict[str, list[float]], step_s: float) -> None:
    """Print a line for each schedule. The first measurements warm up."""
    for kind, of_schedules in speeds.items():
        print(f"tokens per second, {kind}, {1000 * step_s:.0f} ms a step of the environment")
        for name, values in of_schedules.items():
            own = values[1:]
            ratios = [one / zero for one, zero in zip(own, of_schedules["rounds"][1:], strict=True)]
            print(f"  {name:15} {median(own):7.0f}  ({min(own):.0f} to {max(own):.0f})  ratio {median(ratios):.2f}")
    print("seconds, a single turn, an environment that takes no time")
    for name, values in seconds.items():
        own = values[1:]
        ratios = [one / zero for one, zero in zip(own, seconds["no environment"][1:], strict=True)]
        print(f"  {name:15} {median(own):7.3f}  ({min(own):.3f} to {max(own):.3f})  ratio {median(ratios):.2f}")


if __name__ == "__main__":
    main()
