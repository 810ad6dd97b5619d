"""A source of rollouts whose completions a function makes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.runs import configured
from trainer.config import DataConfig, RewardConfig
from trainer.generation.engine import Completion, Request, Sampling
from trainer.metrics.timing import Timer
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.rollouts import RolloutSource


class Replies:
    """Engines whose completions `reply` makes of the prompt, the number of the completion and the sampling."""

    def __init__(self, tokenizer: Any, reply: Callable[[str, int, Sampling], str]):
        self._tokenizer, self._reply = tokenizer, reply
        self.awake = contextlib.nullcontext
        self.seeds: list[int] = []
        self.samplings: list[Sampling] = []

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[dict[int, Completion]]:
        self.samplings.append(sampling)
        for place, request in enumerate(requests):
            self.seeds.append(request.seed)
            prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
            tokens = self._tokenizer.encode(self._reply(prompt, place % 2, sampling), add_special_tokens=False)
            yield {place: Completion(tokens, [-1.0] * len(tokens), "stop", 1)}

    def shutdown(self) -> None:
        pass


@contextlib.contextmanager
def source_of(
    root: Path, model: str, reply: Callable[[str, int, Sampling], str], held_out: int = 0
) -> Iterator[RolloutSource]:
    """A source of the prompts `p0` to `p11`, whose reward is the length of a completion.

    Args:
        held_out: number of held-out prompts, from `p0` on.
    """
    root.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"p{i}", "answer": "x"}) for i in range(12)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    (root / "held_out.jsonl").write_text("\n".join(lines[:held_out]))
    cfg = configured(root / "run", val_interval=1 if held_out else -1)
    cfg.rollout.n, cfg.rollout.max_response_tokens = 2, 8
    cfg.data = DataConfig(train_files=[str(root / "prompts.jsonl")], val_files=[str(root / "held_out.jsonl")])
    cfg.reward = RewardConfig(name="tests.support.named_rewards:length", num_processes=1)
    cfg.logger.samples_interval = 0
    tokenizer = load_tokenizer(model)
    engines: Any = Replies(tokenizer, reply)
    with RolloutSource(cfg, engines, model, tokenizer, Timer(), lambda: None) as source:
        yield source
