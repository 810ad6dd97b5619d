"""Tokens a second of episodes: `python -m benchmarks.environments [--rounds N] [--step-s S] [--calls C]`.

One engine (vLLM, a small model that ends replies at random) and environments of this machine.

- Episodes whose replies have lengths that vary more than tenfold, and environments that take `--step-s` a step, on no
  core. Once all episodes have 8 turns, and once they have 1 to 10. `--calls` says whether the environments are `async`,
  block in threads, or block one after another.
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
from trainer.config import Config, EnvironmentConfig, RolloutConfig
from trainer.data.datasets import Prompt
from trainer.environments import Message, StepResult
from trainer.environments.episode_runner import EpisodeRunner, RolloutRequest
from trainer.environments.turns import EpisodeTurns
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.event_loop import all_of
from trainer.learner.train_workers import TrainWorkers
from trainer.models.tiny import TinyShape, build_tiny
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


class InTurn(Waiting):
    """The same, with a step that is not `async`."""

    def step(self, reply: Message) -> StepResult:  # type: ignore[override]
        time.sleep(self._seconds)
        return self._answer()


class Threads(InTurn):
    """The same, several at a time."""

    thread_safe = True


CLASSES = {"async": Waiting, "threads": Threads, "in_turn": InTurn}


class _Asks:
    """See `trainer.environments.episode_runner.Asks`."""

    def __init__(self, engines: EnginePool):
        self._engines, self.turns = engines, EpisodeTurns()

    async def __call__(self, request: Request, turn: str) -> Completion:
        return await self._engines.complete(request)

    def finish(self) -> None:
        pass


def make_model(path: str) -> None:
    """Write a model that ends a reply with the same probability after each token."""
    build_tiny(TinyShape(tie_word_embeddings=False, max_position_embeddings=8192), path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embedding.normal_(0.0, 0.02).add_(1.0)  # so the last hidden state is nearly the same everywhere
        head.normal_(0.0, 0.02)
        head[model.config.eos_token_id] = math.log(len(head) / _MEAN_LENGTH) / head.shape[1]
    model.save_pretrained(path)


def config(most: int, calls: str | None) -> Config:
    """Return the settings of a run. `calls`: see `main`; None: there is no environment."""
    cfg = Config(rollout=RolloutConfig(max_prompt_tokens=6000, max_response_tokens=_LONGEST, max_num_seqs=most))
    cfg.rollout.engine_args = {"kv_cache_memory_bytes": 2**29}
    cfg.trainer.ray_address = "processes"
    if calls is not None:
        name = f"benchmarks.environments:{CLASSES[calls].__name__}"
        cfg.environment = EnvironmentConfig(name=name, max_turns=10)
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

    async def run_all() -> list[Episode]:
        async with runner.together() as block:
            return await all_of([runner.run(request, _Asks(engines), block) for request in requests])

    begin = time.perf_counter()
    episodes = engines.loop.run(run_all())
    return time.perf_counter() - begin, sum(episode.length for episode in episodes)


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
    turns = {
        "8 turns": [8] * arguments.episodes,
        "1 to 10 turns": [1 + (7 * i) % 10 for i in range(arguments.episodes)],
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in turns}
    seconds: dict[str, list[float]] = {"an environment": [], "none": []}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        make_model(directory)
        tokenizer = load_tokenizer(directory)
        cfg = config(arguments.most, arguments.calls)
        engines = stack.enter_context(engines_of(cfg, directory))
        runner = stack.enter_context(episode_runner(cfg, tokenizer))
        plain = stack.enter_context(episode_runner(config(arguments.most, None), tokenizer))
        for number in range(arguments.rounds + 1):
            for kind, found in speeds.items():
                took, tokens = run(runner, engines, requests_of(tokenizer, turns[kind], arguments.step_s, number))
                found.append(tokens / took)
            for name, one in (("an environment", runner), ("none", plain)):
                took, _ = run(one, engines, requests_of(tokenizer, [1] * arguments.episodes, 0.0, number))
                seconds[name].append(took)
    for kind, found in speeds.items():  # the first measurements warm up
        own = found[1:]
        print(f"{kind}: {median(own):.0f} tokens/s ({min(own):.0f} to {max(own):.0f})")
    ratios = [one / zero for one, zero in zip(seconds["an environment"][1:], seconds["none"][1:], strict=True)]
    print(f"a single turn: {median(seconds['an environment'][1:]):.3f} s, ratio to none {median(ratios):.2f}")


if __name__ == "__main__":
    main()
