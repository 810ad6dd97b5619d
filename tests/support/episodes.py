"""Episodes between a scripted policy and environments in processes of their own, for tests."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.generation import SAMPLED
from trainer.config import Config, EnvironmentConfig
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import (
    EnvironmentPool,
    EnvironmentRunner,
    EpisodeRunner,
    RolloutRequest,
    Session,
)
from trainer.environments.turns import EpisodeTurns
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request
from trainer.generation.event_loop import EventLoop, all_of


class Policy:
    """Says what its script holds for the turn, to every prompt; a reply that ends in `…` is cut.

    Where the script is one function, it makes the reply of the seed.
    """

    def __init__(self, tokenizer: Any, *script: str | Callable[[int], str]):
        self.tokenizer = tokenizer
        self.script = script
        self._asked: dict[int, list[str]] = defaultdict(list)
        self._seeds: dict[int, list[int]] = defaultdict(list)
        self.most_tokens: list[int] = []

    @property
    def asked(self) -> list[list[str]]:
        """The prompts of each turn."""
        return [sorted(self._asked[turn]) for turn in sorted(self._asked)]

    @property
    def seeds(self) -> list[list[int]]:
        return [self._seeds[turn] for turn in sorted(self._seeds)]

    def complete(self, request: Request) -> Completion:
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        turn = prompt.count("<|assistant|>") - 1
        self._asked[turn].append(prompt)
        self._seeds[turn].append(request.seed)
        self.most_tokens.append(request.sampling.max_tokens)
        said = self.script[turn] if isinstance(self.script[0], str) else self.script[0]
        text = said if isinstance(said, str) else said(request.seed)
        cut = text.endswith("…")
        tokens = self.tokenizer.encode(text.rstrip("…") + ("" if cut else "<|end|>"), add_special_tokens=False)
        return Completion(tokens, [-1.0] * len(tokens), "length" if cut else "stop", 7)

    def end_requests(self) -> None:
        """Called when no episode asks for more."""


class Asks:
    """How one of `left` episodes asks (see `trainer.environments.episode_runner.Asks`)."""

    def __init__(self, policy: Any, left: set[Asks]):
        self._policy, self._left = policy, left
        self.turns = EpisodeTurns()
        left.add(self)

    async def __call__(self, request: Request, turn: str) -> Completion:
        await asyncio.sleep(0)
        return self._policy.complete(request)

    def finish(self) -> None:
        if self in self._left:
            self._left.discard(self)
            if not self._left:
                self._policy.end_requests()


def requests_of(*rows: dict[str, Any], n: int = 1) -> list[RolloutRequest]:
    return [
        RolloutRequest(Prompt(i, (), "", "", row), f"0:{i}", 5, number, SAMPLED)
        for i, row in enumerate(rows)
        for number in range(n)
    ]


def runner_config(max_prompt_tokens: int = 100, **config: Any) -> Config:
    cfg = Config()
    cfg.trainer.seed = 3
    cfg.rollout.max_prompt_tokens = max_prompt_tokens
    name = config.pop("name", "tests.support.environments:Echo")
    cfg.environment = EnvironmentConfig(name=name, **{"timeout_s": 20.0, "max_turns": 3, "num_processes": 2, **config})
    return cfg


def runner_of(tokenizer: Any, max_prompt_tokens: int = 100, **config: Any) -> EnvironmentRunner:
    return EnvironmentRunner(runner_config(max_prompt_tokens, **config), tokenizer)


event_loop = functools.cache(EventLoop)
"""Returns the event loop of all episodes: a server for agents stays on one."""


def run(runner: EpisodeRunner, policy: Any, requests: list[RolloutRequest]) -> list[Episode]:
    """Run episodes that begin together."""

    async def run_all() -> list[Episode]:
        left: set[Asks] = set()
        asks = [Asks(policy, left) for _ in requests]
        async with runner.together() as block:
            return await all_of([runner.run(one, own, block) for one, own in zip(requests, asks, strict=True)])

    return event_loop().run(run_all())


def step_all(pool: EnvironmentPool, sessions: Sequence[Session]) -> None:
    """Let environments answer their replies; those of sessions that have ended are closed."""

    async def step() -> None:
        async with pool.calls() as calls:
            await asyncio.gather(*(one.close(calls) if one.ended else one.answer(calls) for one in sessions))

    asyncio.run(step())
