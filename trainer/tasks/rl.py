"""The task `rl`: the policy learns from completions that it samples, by rewards or environments."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

from trainer.config import Config
from trainer.data.datasets import as_messages, check_files, read_examples
from trainer.environments.base import find_environment
from trainer.errors import UserError, as_list, sentences_of
from trainer.generation.engine_pool import EnginePool
from trainer.import_utils import import_function
from trainer.models.files import resolve_model_path
from trainer.models.tokenizer import stop_token_ids
from trainer.process.startup import stage
from trainer.rewards.cache import RewardCache
from trainer.rewards.functions import REMOTE
from trainer.rewards.preflight import try_rewards
from trainer.rewards.terms import RewardInput, reward_functions
from trainer.sources.evaluation import RolloutEvaluator
from trainer.sources.rollout_runner import RolloutRunner
from trainer.sources.sampling import SamplingSource, prompt_ledger, read_prompts
from trainer.tasks.base import Ingredients, SavedData, Task, read_ahead, tokenizer_of
from trainer.tasks.warm_start import cached_model, check_cache, prepare_model

_TRIED_ROWS = 3
"""Rows of the data that the rewards are tried with."""


def build(cfg: Config) -> Task:
    """Return the task that the config describes."""
    kept = None if cfg.model.path else cached_model(cfg)
    return Task(
        cfg,
        source=_source,
        start_weights=partial(prepare_model, cfg),
        check_inputs=partial(_check_inputs, cfg),
        data=partial(_prompts, cfg),
        kept_weights=kept if kept and os.path.exists(kept) else None,
    )


def _source(given: Ingredients) -> tuple[SamplingSource, RolloutEvaluator | None]:
    cfg = given.cfg
    pool = EnginePool(cfg, given.cluster, given.learner.ranks, given.path)
    read_ahead(given)
    given.waits.append(pool.wait_ready)
    tokenizer = given.tokenizer
    cache = RewardCache(cfg.trainer.run_dir, given.fence)
    runner = RolloutRunner(cfg, pool, tokenizer, stop_token_ids(given.path, tokenizer), cache)
    needs_baselines = "baselines" in cfg.algorithm.reads
    source = SamplingSource(cfg, runner, read_prompts(cfg, "train", tokenizer), given.timer, needs_baselines)
    val_prompts = read_prompts(cfg, "val", tokenizer).prompts if cfg.trainer.val_interval > 0 else []
    return source, RolloutEvaluator(cfg, runner, val_prompts) if val_prompts else None


def _prompts(cfg: Config, tokenizer: Any, path: str) -> SavedData:
    return prompt_ledger(cfg, read_prompts(cfg, "train", tokenizer).prompts)


def _check_inputs(cfg: Config, asks_servers: bool) -> None:
    """Refuse a reward, a curriculum, data or a model that cannot be used as the config says."""
    refused = []
    for check in (_check_functions, _check_data, _check_model):
        try:
            check(cfg)
        except UserError as error:
            refused += sentences_of(error)
    if refused:
        raise UserError(as_list("the run cannot start:", refused))
    if cfg.environment.name is None and (asks_servers or REMOTE not in cfg.reward.names()):
        with stage("trying the rewards"):
            _try_rewards(cfg)


def _check_functions(cfg: Config) -> None:
    if cfg.environment.name is None:
        reward_functions(cfg.reward)
    else:
        find_environment(cfg.environment.name)
    if cfg.data.curriculum is not None:
        import_function(cfg.data.curriculum, "data.curriculum")


def _check_data(cfg: Config) -> None:
    with stage("checking the data files"):
        check_files(cfg.data, validation=cfg.trainer.val_interval > 0, as_rows=cfg.environment.name is not None)


def _check_model(cfg: Config) -> None:
    if cfg.model.path is None:
        check_cache(cfg)
        return
    with stage(f"fetching the model {cfg.model.path}"):
        tokenizer_of(cfg, resolve_model_path(cfg.model.path))


def _try_rewards(cfg: Config) -> None:
    """Compute the rewards of some reference answers (see `try_rewards`)."""
    size = _TRIED_ROWS if cfg.data.train_size < 0 else min(_TRIED_ROWS, cfg.data.train_size)
    examples = read_examples(dataclasses.replace(cfg.data, train_size=size), "train")
    attempts = [
        RewardInput(
            completion=example["answer"],
            answer=example["answer"],
            prompt=chat[-1]["content"],
            messages=[*chat, {"role": "assistant", "content": example["answer"]}],
            row=example.get("row", example),
        )
        for example in examples
        for chat in [as_messages(example["prompt"], cfg.data.system_prompt)]
    ]
    try_rewards(cfg.reward, attempts, cfg.rollout.n)
