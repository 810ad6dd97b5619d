"""A source of rollouts whose completions a function makes."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.runs import configured
from trainer.config import Config, DataConfig, RewardConfig
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.pauses import Pauses
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.metrics.timing import Timer
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.rewards.cache import RewardCache
from trainer.rewards.scoring import RewardPool
from trainer.sources.evaluation import RolloutEvaluator
from trainer.sources.in_flight import InFlightSource
from trainer.sources.rollout_runner import RolloutRunner
from trainer.sources.routes import make_routes, make_scorers
from trainer.sources.sampling import SamplingSource, read_prompts, read_source


class Replies:
    """Engines whose completions `reply` makes of the prompt, the number of the completion and the sampling."""

    def __init__(self, tokenizer: Any, reply: Callable[[str, int, Sampling], str]):
        self._tokenizer, self._reply = tokenizer, reply
        self.awake, self.pauses = contextlib.nullcontext, Pauses()
        self.repeats, self.needs_company = True, False
        self.seeds: list[int] = []
        self._lock = threading.Lock()  # one thread at a time may use the tokenizer
        self.samplings: list[Sampling] = []

    def stream(self, requests: Sequence[Request], idle_s: float = math.inf) -> Iterator[dict[int, Completion]]:
        self.samplings.append(requests[0].sampling)
        for place, request in enumerate(requests):
            self.seeds.append(request.seed)
            with self._lock:
                prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
            reply = self._reply(prompt, place % 2, request.sampling)
            with self._lock:
                tokens = self._tokenizer.encode(reply, add_special_tokens=False)
            yield {place: Completion(tokens, [-1.0] * len(tokens), "stop", 1)}

    def start(self, version: int, is_initial: bool, may_defer: bool = False) -> None:
        pass

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def sampling_source(
    cfg: Config,
    engines: Any,
    model: str,
    needs_baselines: bool = False,
    journal: Journal | None = None,
    timer: Timer | None = None,
) -> SamplingSource:
    """The source that `cfg` describes, with these engines."""
    tokenizer = load_tokenizer(model)
    cache = RewardCache(cfg.trainer.run_dir, lambda: None)

    def scorer_of(own: Config) -> RewardPool | None:
        return None if own.environment.name else RewardPool(own.reward, cache)

    sources = [f"mix.{name}" for name in sorted(cfg.data.mix)]
    sources += [""] if cfg.data.val_files or not sources else []
    sources += [f"val_sets.{name}" for name in cfg.data.val_sets]
    routes = make_routes(cfg, make_scorers(cfg, sources, scorer_of), tokenizer)
    journal = journal or Journal(cfg.trainer.run_dir, Identity("", ""), lambda: None, is_on=False)
    runner = RolloutRunner(cfg, engines, tokenizer, stop_token_ids(model, tokenizer), routes, journal)
    kind = InFlightSource if cfg.rollout.in_flight_updates else SamplingSource
    return kind(cfg, runner, read_prompts(cfg, "train", tokenizer), timer or Timer(), needs_baselines)


def evaluator_beside(source: SamplingSource, model: str) -> RolloutEvaluator:
    """The evaluator of the same run."""
    cfg, tokenizer = source.cfg, load_tokenizer(model)
    sets = {name: read_source(cfg, f"val_sets.{name}", tokenizer).prompts for name in cfg.data.val_sets}
    return RolloutEvaluator(cfg, source.runner, read_prompts(cfg, "val", tokenizer).prompts, sets)


@contextlib.contextmanager
def source_of(
    root: Path,
    model: str,
    reply: Callable[[str, int, Sampling], str],
    validation: int = 0,
    needs_baselines: bool = False,
    journal: Journal | None = None,
    reward: str = "length",
    edit: Callable[[Config], None] = lambda cfg: None,
) -> Iterator[SamplingSource]:
    """A source of the prompts `p0` to `p11`, whose reward is the length of a completion.

    Args:
        validation: number of validation prompts, from `p0` on.
        journal: of the run; None: it is off.
        edit: changes the config before the source is made.
    """
    root.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"p{i}", "answer": "x"}) for i in range(12)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    (root / "validation.jsonl").write_text("\n".join(lines[:validation]))
    cfg = configured(root / "run", val_interval=1 if validation else -1)
    cfg.rollout.n, cfg.rollout.max_response_tokens = 2, 8
    cfg.data = DataConfig(train_files=[str(root / "prompts.jsonl")], val_files=[str(root / "validation.jsonl")])
    cfg.reward = RewardConfig(name=f"tests.support.named_rewards:{reward}", num_processes=1)
    cfg.logger.samples = 0
    edit(cfg)
    with sampling_source(cfg, Replies(load_tokenizer(model), reply), model, needs_baselines, journal) as source:
        yield source
