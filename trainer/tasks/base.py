"""What a task is: the value that a `TaskSpec` builds from a config, and the trainer that is made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from trainer.checkpoint.components import fingerprint_weights
from trainer.cluster.worker_groups import Cluster
from trainer.config import Config
from trainer.config.fields import config_error
from trainer.import_utils import import_function
from trainer.journal.history import identity
from trainer.journal.journal import Journal
from trainer.learner.learner import Learner
from trainer.metrics.prometheus import MetricsServer
from trainer.metrics.timing import Timer
from trainer.models.checks import check_axes, check_tokenizer, check_vocabularies
from trainer.models.files import resolve_model_path
from trainer.models.tokenizer import load_tokenizer
from trainer.process.startup import stage
from trainer.rewards.cache import RewardCache
from trainer.run.directory import RunDirectory
from trainer.run.resume import deciding_settings
from trainer.run.state import StopRequest
from trainer.sources.base import EpisodeSource, Evaluator
from trainer.sources.in_flight import InFlightSource
from trainer.sources.sampling import SamplingSource
from trainer.trainer import Trainer

_BUILT_IN = {name: f"trainer.tasks.supervised:build_{name}" for name in ("sft", "dpo", "rm")}
_BUILT_IN |= {"rl": "trainer.tasks.rl:build"}
"""Imported when they are needed: each takes a moment."""


@dataclass
class Ingredients:
    """What the source of a task is made of, while the processes of the run start."""

    cfg: Config
    path: str
    """The initial weights, a local directory."""
    learner: Learner
    cluster: Cluster
    timer: Timer
    fence: Callable[[], None]
    """Raises an error if another job has taken the run."""
    journal: Journal
    """Keeps episodes that are generated, for a source that asks it."""
    waits: list[Callable[[], Any]] = field(default_factory=list)
    """What a source has begun in the background, and must be complete before training. Called in order."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Ends what a source has begun, if the training does not come as far as to begin."""

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.cfg, self.path)

    @cached_property
    def reward_cache(self) -> RewardCache:
        return RewardCache(self.cfg.trainer.run_dir, self.fence)

    def with_config(self, cfg: Config) -> Ingredients:
        """Return the same with the config of one source of the data."""
        given = dataclasses.replace(self, cfg=cfg)
        given.reward_cache = self.reward_cache
        return given


@dataclass(frozen=True)
class Task:
    """A run's training: from which weights, on what, and how far. Nothing is started or read before it is called."""

    cfg: Config
    source: Callable[[Ingredients], tuple[EpisodeSource, Evaluator | None]]
    """Returns where the episodes come from, and what evaluates the policy (None: there is no validation data)."""
    start_weights: Callable[[], str | None] | None = None
    """Returns the directory or the Hugging Face id of the policy's initial weights; None if `warm_start` must make them
    first. None: those of `model.path`, or the built-in model with random weights."""
    warm_start: Callable[[], Task] | None = None
    """Returns the task that makes the initial weights, in a run before this one."""
    is_made: Callable[[], bool] | None = None
    """Whether what this task makes is there, perhaps made by another job: a start waits for that job. None: each start
    makes its own."""
    check_inputs: Callable[..., None] = lambda *, asks_servers: None
    """Refuses bad input before anything expensive starts, with a `UserError`; a `TrialError` says that rewards or an
    environment fail now. With `asks_servers` it may try what servers give, which costs time and perhaps money."""
    exports_last: bool = False
    """The run exports its last step, whatever the config says."""
    is_enough: Callable[[Learner, EpisodeSource, int], bool] = lambda learner, source, step: False
    """Whether the run ends after this step, before its last one. A resumed run asks again."""

    def initial_weights(self) -> str:
        """Return the directory or the Hugging Face id of the policy's initial weights. Random ones are made here."""
        if self.start_weights is not None:
            path = self.start_weights()
            assert path is not None, "the warm start has made none"
            return path
        if self.cfg.model.path is not None:
            return self.cfg.model.path
        from trainer.models.tiny import TinyShape, build_tiny  # imports the model classes

        path = os.path.join(self.cfg.trainer.run_dir, "start")
        build_tiny(TinyShape.of(self.cfg.model.tiny), path)
        return path


def tokenizer_of(cfg: Config, path: str) -> Any:
    """Return the tokenizer in the model directory `path`, with the chat template of the config."""
    model = cfg.model
    tokenizer = load_tokenizer(path, model.chat_template, model.trust_remote_code, model.chat_template_kwargs)
    check_tokenizer(cfg, path, tokenizer)
    return tokenizer


def build_task(cfg: Config) -> Task:
    """Return the task that the config describes.

    Raises:
        UserError: the function of a task of the user cannot be imported, or refuses the config.
    """
    build = cfg.task.build
    build = _BUILT_IN.get(build, build) if isinstance(build, str) else build
    return (import_function(build, "trainer.task") if isinstance(build, str) else build)(cfg)


def make_trainer(
    task: Task,
    cluster: Cluster,
    directory: RunDirectory,
    model_path: str,
    stop: StopRequest,
    server: MetricsServer | None = None,
) -> Trainer:
    """Start the processes of a task, and return its trainer.

    Args:
        cluster: started.
        directory: of the run, open.
        model_path: the initial weights.
        server: gets the metrics of each step.
    """
    cfg, timer, path = task.cfg, Timer(), resolve_model_path(model_path)
    check_axes(cfg, path)
    check_vocabularies(cfg, path)
    # The processes start, and import for many seconds, while this one reads the data.
    learner = Learner(cfg, cluster, timer)
    if cluster.device == "cpu" or not cfg.rollout.colocate:  # else engines take their share of the GPUs first
        learner.begin_build(path)
    journal = learner.teachers.records = open_journal(cfg, path, directory, timer)
    given = Ingredients(cfg, path, learner, cluster, timer, directory.check, journal)
    with given.undo:
        with stage("reading the data"):
            source, evaluator = task.source(given)
            check_ahead(cfg, source)
            parts = cfg, directory, source, learner, path, given.tokenizer, timer, stop, journal
            trainer = Trainer(*parts, evaluator, partial(task.is_enough, learner, source), server)
            trainer.load_data()
        if given.waits:
            with stage("starting ranks and engines"):
                for wait in given.waits:
                    wait()
        given.undo.pop_all()  # from now on, the source ends it
    return trainer


def check_ahead(cfg: Config, source: EpisodeSource) -> None:
    """Refuse `rollout.ahead` and `rollout.in_flight_updates` with a source that does not do what they say."""
    r, named = cfg.rollout, f"the source of trainer.task={cfg.trainer.task} does not sample"
    if r.ahead > 0 and cfg.reads("rollout.ahead") and not isinstance(source, SamplingSource):
        raise config_error(cfg, "rollout.ahead", f"{named} ahead; choose 0")
    if r.in_flight_updates and cfg.reads("rollout.in_flight_updates") and not isinstance(source, InFlightSource):
        raise config_error(cfg, "rollout.in_flight_updates", f"{named} in flight; choose false")


def open_journal(cfg: Config, path: str, directory: RunDirectory, timer: Timer) -> Journal:
    """Return the journal of a run.

    Args:
        path: the initial weights.
        directory: of the run, open.
        timer: of the step.
    """
    store = directory.checkpoints.store
    rollouts, updates = deciding_settings(cfg)
    journal = Journal(
        cfg.trainer.run_dir,
        identity(rollouts, updates, fingerprint_weights(cfg, path, begins=False)),
        directory.check_locks if store.keeps_record else directory.check,
        store.storage if store.keeps_record else None,
        is_on=cfg.rollout.journal,
        tells_lack=cfg.task.generates,
        timer=timer,
    )
    directory.on_commit = partial(journal.remove_until, directory.oldest_start)
    directory.on_full_disk = journal.free_space
    return journal
