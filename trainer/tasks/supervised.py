"""The tasks `sft`, `dpo` and `rm`: the policy, or a reward model, learns from examples, kept completions or pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainer.config import Config
from trainer.config.fields import value_of
from trainer.data.datasets import check_files
from trainer.data.examples import Pair, load_pairs, load_train, load_val, read_pair
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.models.checks import check_trained_models
from trainer.models.files import load_config
from trainer.models.tokenizer import stop_token_ids
from trainer.process.startup import stage
from trainer.sources.base import EpisodeSource
from trainer.sources.evaluation import LossEvaluator
from trainer.sources.routes import train_sources
from trainer.sources.supervised import PairSource, SupervisedSource, episodes_of
from trainer.tasks.base import Ingredients, Task

_Source = tuple[EpisodeSource, LossEvaluator | None]


def build_sft(cfg: Config) -> Task:
    """Return the task that the config describes: tokens of examples, or of kept completions."""
    check = partial(_check_inputs, cfg, examples=cfg.sft.source == "examples")
    return Task(cfg, source=_examples, check_inputs=check, exports_last=True)


def build_dpo(cfg: Config) -> Task:
    """Return the task that the config describes: preferences."""
    check = partial(_check_inputs, cfg, check=read_pair)
    return Task(cfg, source=partial(_pairs, cuts=True), check_inputs=check, exports_last=True)


def build_rm(cfg: Config) -> Task:
    """Return the task that the config describes: a reward model, which reads whole answers."""
    check = partial(_check_inputs, cfg, check=read_pair)
    return Task(cfg, source=partial(_pairs, cuts=False), check_inputs=check, exports_last=True)


def _examples(given: Ingredients) -> _Source:
    cfg, tokenizer, stops = given.cfg, given.tokenizer, stop_token_ids(given.path, given.tokenizer)
    vocabulary = load_config(cfg.model, given.path).get_text_config().vocab_size
    owns = [cfg.of_source(source).data for source in train_sources(cfg)]
    datasets = [load_train(own, cfg.sft, tokenizer, stops, vocabulary) for own in owns]
    held_out = load_val(cfg.data, cfg.sft, tokenizer, stops) if cfg.trainer.val_interval > 0 else []
    episodes = [Episode(f"val:{i}", f"val:{i}", [example]) for i, example in enumerate(held_out)]
    return SupervisedSource(cfg.sft, datasets, cfg.trainer.seed, _weights(cfg)), _evaluator(given, episodes)


def _pairs(given: Ingredients, cuts: bool) -> _Source:
    cfg, stops = given.cfg, stop_token_ids(given.path, given.tokenizer)
    limit = cfg.task.longest, value_of(cfg, cfg.task.longest)

    def read(own: Config, split: str) -> list[Pair]:
        return load_pairs(own.data, split, given.tokenizer, stops, limit, cuts)

    datasets = [read(cfg.of_source(source), "train") for source in train_sources(cfg)]
    held_out = read(cfg, "val") if cfg.trainer.val_interval > 0 else []
    episodes = [episode for i, pair in enumerate(held_out) for episode in episodes_of(pair, f"val:{i}")]
    source = PairSource(cfg.trainer.train_batch_size, datasets, cfg.trainer.seed, _weights(cfg))
    return source, _evaluator(given, episodes)


def _weights(cfg: Config) -> dict[str, float]:
    return {name: source.weight for name, source in sorted(cfg.data.mix.items())}


def _evaluator(given: Ingredients, episodes: list[Episode]) -> LossEvaluator | None:
    return LossEvaluator(episodes, given.learner.held_out) if episodes else None


def _check_inputs(cfg: Config, *, asks_servers: bool, **rows: Any) -> None:
    """Refuse data that cannot be read as the config says, or a model that no run trains. `rows`: see `check_files`."""
    if cfg.data.synthetic and "check" in rows:
        raise UserError(
            f"data.synthetic={cfg.data.synthetic}: makes no pairs of answers; name files of them with data.train_files"
        )
    with stage("checking the data files"):
        for name in cfg.data.mix:
            check_files(cfg.of_source(f"mix.{name}").data, validation=False, **rows)
        check_files(cfg.data, validation=cfg.trainer.val_interval > 0, **rows)
    if cfg.model.path is not None:
        with stage(f"fetching the model {cfg.model.path}"):
            check_trained_models(cfg)
