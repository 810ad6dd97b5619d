"""The task `rl`: the policy learns from completions that it samples, by rewards or environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainer.config import REWARD_MODEL, Config
from trainer.config.fields import config_error
from trainer.data.datasets import PromptSet, check_files
from trainer.data.ledger import find_curriculum
from trainer.errors import UserError, as_list, sentences_of
from trainer.generation.engine_pool import EnginePool
from trainer.generation.fleet import fleet_token
from trainer.metrics.timing import Timer
from trainer.models.checks import check_longest_sequence, check_trained_models
from trainer.models.files import resolve_model_path
from trainer.models.tokenizer import stop_token_ids
from trainer.process.startup import stage
from trainer.rewards.scorer import RankScorer, Scorer
from trainer.rewards.scoring import make_scorer
from trainer.sources.base import EpisodeSource, Evaluator
from trainer.sources.evaluation import RolloutEvaluator
from trainer.sources.in_flight import InFlightSource
from trainer.sources.rollouts import Rollouts
from trainer.sources.routes import (
    VAL_SETS,
    check_source,
    find_refusals,
    make_routes,
    make_scorers,
    read_prompts,
    read_source,
    sampled_sources,
    train_sources,
)
from trainer.sources.sampling import SamplingSource
from trainer.sources.trials import try_sources
from trainer.tasks import warm_start
from trainer.tasks.base import Ingredients, Task, tokenizer_of


def build(cfg: Config, source: Callable[[Ingredients], tuple[EpisodeSource, Evaluator | None]] | None = None) -> Task:
    """Return the task that the config describes.

    Args:
        source: of another task of this kind: a call of `sample_episodes` with a scorer or a source of its own.
    """
    return Task(
        cfg,
        source=source or sample_episodes,
        start_weights=lambda: cfg.model.path or warm_start.made_model(cfg),
        warm_start=partial(warm_start.build, cfg),
        check_inputs=partial(_check_inputs, cfg),
    )


def config_scorer(given: Ingredients) -> Scorer | None:
    """Return the reward functions, or the reward model, that the config names.

    None: an environment gives the rewards, or all are 0.
    """
    if given.cfg.environment.name is not None or not given.cfg.task.reward_functions:
        return None
    if given.cfg.reward.is_model and given.cfg.reward.model.path is not None:
        return RankScorer(REWARD_MODEL, given.learner.last_scores)
    return make_scorer(given.cfg, given.reward_cache)


def sample_episodes(
    given: Ingredients,
    make_source: Callable[[Config, Rollouts, PromptSet, Timer, bool], EpisodeSource] | None = None,
    make_scorer: Callable[[Ingredients], Scorer | None] = config_scorer,
) -> tuple[EpisodeSource, Evaluator | None]:
    """Start the engines; return a source that samples with them, and the evaluator of the validation prompts.

    Args:
        make_source: makes what draws, samples or publishes in another way. None: a `SamplingSource`, or with
            `rollout.in_flight_updates` an `InFlightSource`.
        make_scorer: returns what gives the rewards, to training and to validation; called for each source of a mix with
            another reward. A task that names another one sets `TaskSpec.reward_functions` to false.

    Raises:
        UserError: nothing gives rewards, and the config compares them; or ranks are to give them while they train.
    """
    cfg = given.cfg
    scorers = make_scorers(
        cfg, _sampled_sources(cfg), lambda own: make_scorer(given if own is cfg else given.with_config(own))
    )
    for source, scorer in scorers.items():
        if scorer is None and source in train_sources(cfg) and cfg.of_source(source).environment.name is None:
            _check_without_rewards(cfg)
        if cfg.rollout.works_ahead and scorer is not None and scorer.uses_ranks:
            key, off = ("ahead", "0") if cfg.rollout.ahead > 0 else ("in_flight_updates", "false")
            raise config_error(cfg, f"rollout.{key}", f"the ranks cannot give rewards while they train; choose {off}")
    pool = EnginePool(cfg, given.cluster, given.learner.ranks, given.path, keeps_weights=cfg.rollout.works_ahead)
    given.undo.callback(pool.leave)
    given.waits.append(pool.wait_ready)
    tokenizer, routes = given.tokenizer, make_routes(cfg, scorers, given.tokenizer)  # the engines start meanwhile
    rollouts = Rollouts(cfg, pool, stop_token_ids(given.path, tokenizer), routes, given.journal)
    make_source = make_source or (InFlightSource if cfg.rollout.in_flight_updates else SamplingSource)
    prompts, needs_baselines = read_prompts(cfg, "train", tokenizer), "baselines" in cfg.algorithm.reads
    source = make_source(cfg, rollouts, prompts, given.timer, needs_baselines)
    val_prompts = read_prompts(cfg, "val", tokenizer).prompts if _has_validation_prompts(cfg) else []
    sets = {name: read_source(cfg, f"{VAL_SETS}{name}", tokenizer).prompts for name in _val_sets(cfg)}
    return source, RolloutEvaluator(cfg, rollouts, val_prompts, sets) if val_prompts or sets else None


def _sampled_sources(cfg: Config) -> list[str]:
    """Return the sources of all prompts, those of validation included."""
    own = [""] if cfg.data.mix and _has_validation_prompts(cfg) else []
    return [*sampled_sources(cfg), *own, *(f"{VAL_SETS}{name}" for name in _val_sets(cfg))]


def _has_validation_prompts(cfg: Config) -> bool:
    """Whether the run evaluates the prompts of `data.val_files`, or of the generator."""
    return cfg.trainer.val_interval > 0 and bool(cfg.data.synthetic or cfg.data.val_files)


def _val_sets(cfg: Config) -> list[str]:
    """Return the names of the validation sets that the run evaluates."""
    return [name for name, one in cfg.data.val_sets.items() if one.interval_in(cfg) > 0]


def _check_without_rewards(cfg: Config) -> None:
    """Refuse settings that leave out prompts by their rewards, for a run whose rewards are all 0."""
    a = cfg.algorithm
    # With `overlong_buffer`, the penalties differ.
    filters = {
        "dynamic_sampling": a.dynamic_sampling,
        "options.filter_zero_variance": a.run_option("filter_zero_variance") and not a.overlong_buffer,
    }
    for name in filter(filters.get, filters):
        problem = (
            f"keeps the prompts whose completions have different rewards, and trainer.task={cfg.trainer.task} gives no "
            "rewards, so it would keep none; set it to false, or give the task a scorer"
        )
        raise config_error(cfg, f"algorithm.{name}", problem)


def _check_inputs(cfg: Config, *, asks_servers: bool) -> None:
    """Refuse a reward, a curriculum, data or a model that cannot be used as the config says, or a lack of a token."""
    if cfg.rollout.fleet:
        fleet_token()
    sources = _sampled_sources(cfg)
    refused = [*find_refusals(cfg, sources, _check_functions), *find_refusals(cfg, sources, _check_data)]
    try:
        _check_model(cfg)
        if cfg.model.path is not None:
            path = resolve_model_path(cfg.model.path)
            refused += find_refusals(cfg, sources, lambda own: check_longest_sequence(own, path))
    except UserError as error:
        refused += sentences_of(error)
    if refused:
        raise UserError(as_list("the run cannot start:", list(dict.fromkeys(refused))))
    try_sources(cfg, sources, asks_servers)


def _check_functions(cfg: Config) -> None:
    check_source(cfg)
    if cfg.data.curriculum is not None:
        find_curriculum(cfg.data.curriculum, cfg.data.name_of("curriculum"))


def _check_data(cfg: Config) -> None:
    is_source = cfg.data.name_of("train_files") != "data.train_files"
    validation, as_rows = not is_source and _has_validation_prompts(cfg), cfg.environment.name is not None
    with stage("checking the data files"):
        check_files(cfg.data, validation=validation, as_rows=as_rows)


def _check_model(cfg: Config) -> None:
    if cfg.model.path is None:
        warm_start.check_cache(cfg)
        check_trained_models(cfg)
        if cfg.reward_model.path is not None:
            problem = "the built-in model has a tokenizer of its own; name the model that the reward model was made of"
            raise config_error(cfg, "model.path", problem)
        return
    with stage(f"fetching the model {cfg.model.path}"):
        check_trained_models(cfg)
        tokenizer_of(cfg, resolve_model_path(cfg.model.path))
