"""Episodes between a scripted policy and environments in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.support.generation import SAMPLED
from trainer.config import Config, EnvironmentConfig
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import EnvironmentRunner, RolloutRequest
from trainer.environments.stream_runner import StreamRunner
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request
from trainer.generation.request_stream import RequestStream


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

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        completions = [self.complete(request) for request in requests]
        for place in reversed(range(len(requests))):
            yield {place: completions[place]}

    paused_s = 0.0
    has_ended = False

    def end_requests(self) -> None:
        self.has_ended = True

    def open_stream(self) -> RequestStream:
        return RequestStream(self, threading.RLock(), contextlib.ExitStack(), is_open=True)

    def submit(self, stream: RequestStream, requests: Mapping[int, Request]) -> None:
        with stream.ready:
            stream.complete |= {key: self.complete(request) for key, request in requests.items()}
            stream.ready.notify()

    def next_chunk(self, stream: RequestStream) -> dict[int, Completion]:
        with stream.ready:
            stream.ready.wait_for(lambda: stream.complete or stream.is_woken)
            chunk, stream.complete, stream.is_woken = stream.complete, {}, False
            return chunk

    def drop(self, stream: RequestStream) -> None:
        pass


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
    cfg = runner_config(max_prompt_tokens, **config)
    return (StreamRunner if cfg.environment.schedule == "stream" else EnvironmentRunner)(cfg, tokenizer)


def run(runner: Any, policy: Policy, requests: list[RolloutRequest]) -> list[Episode]:
    episodes = {
        place: one for part in runner.run(requests, policy, contextlib.nullcontext) for place, one in part.items()
    }
    return [episodes[place] for place in range(len(requests))]
