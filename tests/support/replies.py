"""A source of rollouts whose completions a function makes."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.runs import configured
from trainer.config import Config, DataConfig, RewardConfig
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.event_loop import EventLoop
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.metrics.timing import Timer
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.rewards.scoring import RewardPool
from trainer.sources.evaluation import RolloutEvaluator
from trainer.sources.in_flight import InFlightSource
from trainer.sources.rollouts import Rollouts
from trainer.sources.routes import make_routes, make_scorers, read_prompts, read_source
from trainer.sources.sampling import SamplingSource


class FakeEngines:
    """Engines that get all requests of those that wait together, as one batch. A base class."""

    unit = "batch"
    repeats = False
    synced_bytes = 0

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.awake = contextlib.nullcontext

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        raise NotImplementedError

    def start(self, version: int, is_initial: bool) -> None:
        pass

    def sync_weights(self, version: int, running: str = "abort") -> None:
        pass

    def rest(self) -> None:
        pass

    def shutdown(self) -> None:
        self.loop.close()

    leave = shutdown


class Replies(FakeEngines):
    """Engines whose completions `reply` makes of the prompt, the number of the completion and the sampling."""

    def __init__(self, tokenizer: Any, reply: Callable[[str, int, Sampling], str]):
        super().__init__()
        self._tokenizer, self._reply = copy.deepcopy(tokenizer), reply
        self.seeds: list[int] = []
        self.samplings: list[Sampling] = []

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        self.samplings.append(requests[0].sampling)
        completions = []
        for place, request in enumerate(requests):
            self.seeds.append(request.seed)
            prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
            reply = self._reply(prompt, place % 2, request.sampling)
            tokens = self._tokenizer.encode(reply, add_special_tokens=False)
            completions.append(Completion(tokens, [-1.0] * len(tokens), "stop", 1))
        return completions


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

    def scorer_of(own: Config) -> RewardPool | None:
        return None if own.environment.name else RewardPool(own.reward)

    sources = [f"mix.{name}" for name in sorted(cfg.data.mix)]
    sources += [""] if cfg.data.val_files or not sources else []
    sources += [f"val_sets.{name}" for name in cfg.data.val_sets]
    routes = make_routes(cfg, make_scorers(cfg, sources, scorer_of), tokenizer)
    journal = journal or Journal(cfg.trainer.run_dir, Identity("", ""), lambda: None, is_on=False)
    rollouts = Rollouts(cfg, engines, stop_token_ids(model, tokenizer), routes, journal)
    kind = InFlightSource if cfg.rollout.in_flight_updates else SamplingSource
    return kind(cfg, rollouts, read_prompts(cfg, "train", tokenizer), timer or Timer(), needs_baselines)


def evaluator_beside(source: SamplingSource, model: str) -> RolloutEvaluator:
    """The evaluator of the same run."""
    cfg, tokenizer = source.cfg, load_tokenizer(model)
    sets = {name: read_source(cfg, f"val_sets.{name}", tokenizer).prompts for name in cfg.data.val_sets}
    return RolloutEvaluator(cfg, source.rollouts, read_prompts(cfg, "val", tokenizer).prompts, sets)


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


def journal_in(root: Path) -> Journal:
    """The journal of a run below `root`, from its start."""
    journal = Journal(str(root / "run"), Identity("", ""), lambda: None)
    journal.start(0, "start")
    return journal
