"""The task `sft`: the policy learns the tokens of examples, or of kept completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainer.config import Config
from trainer.data.datasets import check_files
from trainer.data.examples import load_train, load_val
from trainer.episodes import Episode
from trainer.models.checks import check_trained_models
from trainer.models.files import load_config
from trainer.models.tokenizer import stop_token_ids
from trainer.process.startup import stage
from trainer.sources.evaluation import LossEvaluator
from trainer.sources.routes import train_sources
from trainer.sources.supervised import SupervisedSource
from trainer.tasks.base import Ingredients, Task


def build(cfg: Config) -> Task:
    """Return the task that the config describes."""
    return Task(
        cfg,
        source=_source,
        check_inputs=partial(_check_inputs, cfg),
        exports_last=True,
    )


def _source(given: Ingredients) -> tuple[SupervisedSource, LossEvaluator | None]:
    cfg = given.cfg
    source = _examples(cfg, given.tokenizer, given.path)
    stops = stop_token_ids(given.path, given.tokenizer)
    val_examples = load_val(cfg.data, cfg.sft, given.tokenizer, stops) if cfg.trainer.val_interval > 0 else []
    episodes = [Episode(f"val:{i}", f"val:{i}", [example]) for i, example in enumerate(val_examples)]
    return source, LossEvaluator(episodes, given.learner.held_out) if episodes else None


def _examples(cfg: Config, tokenizer: Any, path: str) -> SupervisedSource:
    vocab_size = load_config(cfg.model, path).get_text_config().vocab_size
    stops = stop_token_ids(path, tokenizer)
    weights = {name: source.weight for name, source in sorted(cfg.data.mix.items())}
    datasets = [
        load_train(cfg.of_source(source).data, cfg.sft, tokenizer, stops, vocab_size) for source in train_sources(cfg)
    ]
    return SupervisedSource(cfg.sft, datasets, cfg.trainer.seed, weights)


def _check_inputs(cfg: Config, *, asks_servers: bool) -> None:
    """Refuse data that cannot be read as the config says, and a model that cannot be trained."""
    with stage("checking the data files"):
        for name in cfg.data.mix:
            check_files(cfg.of_source(f"mix.{name}").data, cfg.sft.source == "examples", validation=False)
        check_files(cfg.data, cfg.sft.source == "examples", validation=cfg.trainer.val_interval > 0)
    if cfg.model.path is not None:
        with stage(f"fetching the model {cfg.model.path}"):
            check_trained_models(cfg)
