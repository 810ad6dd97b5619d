"""The tasks `dpo` and `rm`: the policy, or a reward model, learns from pairs of a better and a worse answer."""

from __future__ import annotations

from functools import partial

from trainer.config import Config
from trainer.config.fields import value_of
from trainer.data.datasets import check_files
from trainer.data.examples import Pair, load_pairs, read_pair
from trainer.errors import UserError
from trainer.models.checks import check_trained_models
from trainer.models.tokenizer import stop_token_ids
from trainer.process.startup import stage
from trainer.sources.evaluation import LossEvaluator
from trainer.sources.routes import train_sources
from trainer.sources.supervised import PairSource, episodes_of
from trainer.tasks.base import Ingredients, Task


def build_dpo(cfg: Config) -> Task:
    """Return the task that the config describes: preferences."""
    return _task(cfg, cuts=True)


def build_rm(cfg: Config) -> Task:
    """Return the task that the config describes: a reward model, which reads whole answers."""
    return _task(cfg, cuts=False)


def _task(cfg: Config, cuts: bool) -> Task:
    return Task(
        cfg,
        source=partial(_source, cuts=cuts),
        check_inputs=partial(_check_inputs, cfg),
        exports_last=True,
    )


def _source(given: Ingredients, cuts: bool) -> tuple[PairSource, LossEvaluator | None]:
    cfg, stops = given.cfg, stop_token_ids(given.path, given.tokenizer)
    limit = cfg.task.longest, value_of(cfg, cfg.task.longest)

    def read(own: Config, split: str) -> list[Pair]:
        return load_pairs(own.data, split, given.tokenizer, stops, limit, cuts)

    datasets = [read(cfg.of_source(source), "train") for source in train_sources(cfg)]
    weights = {name: source.weight for name, source in sorted(cfg.data.mix.items())}
    source = PairSource(cfg.trainer.train_batch_size, datasets, cfg.trainer.seed, weights)
    held_out = read(cfg, "val") if cfg.trainer.val_interval > 0 else []
    episodes = [episode for i, pair in enumerate(held_out) for episode in episodes_of(pair, f"val:{i}")]
    return source, LossEvaluator(episodes, given.learner.held_out) if episodes else None


def _check_inputs(cfg: Config, *, asks_servers: bool) -> None:
    """Refuse data that are no pairs, and a model that cannot be trained."""
    if cfg.data.synthetic:
        raise UserError(
            f"data.synthetic={cfg.data.synthetic}: makes no pairs of answers; name files of them with data.train_files"
        )
    with stage("checking the data files"):
        for name in cfg.data.mix:
            check_files(cfg.of_source(f"mix.{name}").data, validation=False, check=read_pair)
        check_files(cfg.data, validation=cfg.trainer.val_interval > 0, check=read_pair)
    if cfg.model.path is not None:
        with stage(f"fetching the model {cfg.model.path}"):
            check_trained_models(cfg)
