"""The warm start of the built-in model: the task `sft`, as a run of its own whose result is kept for later runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from typing import Any

from trainer.checkpoint import last_commit
from trainer.checkpoint.lock import NAME as LOCK_NAME
from trainer.cluster.worker_groups import Cluster
from trainer.config import Config, TrainerConfig
from trainer.config.axes import AXES
from trainer.config.fields import walk_keys
from trainer.config.schema import without_source
from trainer.errors import UserError
from trainer.learner.learner import Learner
from trainer.models.files import cache_directory
from trainer.process.signals import SIGNALS
from trainer.run.directory import RunDirectory
from trainer.run.stopping import StopRequest
from trainer.seeding import derive_seed
from trainer.sources.base import EpisodeSource
from trainer.sources.supervised import SupervisedSource
from trainer.tasks import sft
from trainer.tasks.base import make_trainer

LOG = logging.getLogger(__name__)

_CHECKED_ROWS = 128
"""Training prompts that say whether the warm start is long enough."""
_CHECKED_EVERY = 5
"""Steps of the warm start between two such checks."""

_SECTIONS = ("model.tiny.", "sft.", "data.")
"""The sections that say what model the warm start makes."""
_NAMED = (
    *(f"model.tiny.{name}" for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")),
    *(f"model.tiny.{name}" for name in ("head_dim", "max_position_embeddings", "tie_word_embeddings")),
    *("model.tiny.start_accuracy", "model.tiny.seed"),
    *("sft.steps", "sft.batch_size", "sft.max_length"),
    *(f"sft.optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "scheduler")),
    *(f"sft.optimizer.{name}" for name in ("warmup_steps", "min_lr_ratio", "schedule_steps")),
    *("data.synthetic", "data.synthetic_args", "data.train_files", "data.train_size"),
)
"""Keys whose value is part of the model's name. Of the others in `_SECTIONS`, a value is only if it is not the default,
so a new key leaves the names of models as they are."""
_WITHOUT_EFFECT = ("data.val_files", "data.curriculum", "data.mix", "data.val_sets")
"""Keys in `_SECTIONS` that have no part in the model."""


def prepare_model(cfg: Config, cluster: Cluster, stop: StopRequest) -> str:
    """Return the path of the initial weights: `model.path`, or the built-in model, built and warm-started once."""
    if cfg.model.path is not None:
        return cfg.model.path
    target = cached_model(cfg)
    if os.path.exists(os.path.join(target, "config.json")):
        return target
    # A run of its own, resumed if it was killed. Its name holds no process id: the restart must find it.
    run_dir = f"{target}.run"
    warm_start = _config(cfg, run_dir)
    # Another job may be making the same model: then this one waits, and takes it.
    with RunDirectory(warm_start).open(wait=True) as directory:
        if not os.path.exists(os.path.join(target, "config.json")):
            _train(warm_start, cluster, directory, stop, target)
        _delete_run(run_dir)  # while we hold the lock, or a waiting job would resume from it
    with contextlib.suppress(OSError):  # a job that was waiting recreates the directory, and removes it itself
        os.rmdir(run_dir)
    return target


def _train(cfg: Config, cluster: Cluster, directory: RunDirectory, stop: StopRequest, target: str) -> None:
    """Train until the model is good enough, and write it to `target`."""
    enough = cfg.model.tiny.start_accuracy

    def is_enough(learner: Learner, source: EpisodeSource, step: int) -> bool:
        # The step alone decides when that is measured, so a run that was killed ends after the same step.
        is_measured = enough is not None and step > 0 and step % _CHECKED_EVERY == 0
        return is_measured and learner.accuracy(_checked_rows(source)) >= enough

    task = dataclasses.replace(sft.build(cfg), is_enough=is_enough)
    LOG.info("warm start of the built-in model: at most %d supervised steps, once for this config", cfg.total_steps)
    trainer = make_trainer(task, cluster, directory, task.initial_weights(cluster, stop), stop)
    trainer.fit()
    SIGNALS.starting()
    rows, step = _checked_rows(trainer.source), trainer.state.step
    share = trainer.learner.accuracy(rows)
    LOG.info(f"warm start: after {step} steps the model answers {share:.1%} of {len(rows)} training prompts exactly")
    trainer.exports.export(target)
    trainer.learner.close()


def _checked_rows(source: EpisodeSource) -> Any:
    assert isinstance(source, SupervisedSource)
    return source.some_examples(_CHECKED_ROWS)


def _config(cfg: Config, run_dir: str) -> Config:
    """Return the config of the warm start. Of the run it has what makes the model, and how many ranks there are."""
    trainer = dataclasses.replace(
        TrainerConfig(),
        task="sft",
        seed=cfg.model.tiny.seed,
        run_name="warm-start",
        run_dir=run_dir,
        ckpt_path=os.path.join(run_dir, "checkpoints"),
        ckpt_interval=50,
        max_ckpts_to_keep=1,
        resume_mode="latest",
        val_interval=-1,
        num_workers=cfg.trainer.num_workers,
        **{axis.key: getattr(cfg.trainer, axis.key) for axis in AXES.values() if axis.key and not axis.same_rows},
        device=cfg.trainer.device,
        master_port=cfg.trainer.master_port,
    )
    logger = cfg.logger.without_services()
    return dataclasses.replace(cfg, trainer=trainer, logger=logger)


def check_cache(cfg: Config) -> None:
    """Check that the built-in model exists or can be built.

    Raises:
        UserError: `model.cache_dir` cannot be written.
    """
    model = cached_model(cfg)
    if os.path.exists(os.path.join(model, "config.json")):
        return
    cache = os.path.dirname(model)
    try:
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise UserError(
            f"model.cache_dir={cache}: the built-in model is made there, and it cannot be written "
            f"({error.strerror}); choose another, for example with the environment variable "
            "TRAINER_CACHE, or give model.path"
        ) from error


def cached_model(cfg: Config) -> str:
    """Return the directory of the built-in model that the config describes. Its name is a hash of what makes it."""
    usual = {key: value for key, value, _ in walk_keys(Config())}
    ignored = _WITHOUT_EFFECT if cfg.data.synthetic else (*_WITHOUT_EFFECT, "data.val_size")  # held out of files
    recipe = {
        key: value
        for key, value, _ in walk_keys(cfg)
        if key.startswith(_SECTIONS)
        and key not in ignored
        and not key.startswith("data.val_sets.")
        and without_source(key) == key  # what answers and rewards the rows of a source has no part in the model
        and (key in _NAMED or value != usual.get(key))
    }
    return os.path.join(cache_directory(cfg.model), f"tiny-{derive_seed(json.dumps(recipe, sort_keys=True)):016x}")


def _delete_run(run_dir: str) -> None:
    last_commit.remove(run_dir)  # first: a run that has committed checkpoints is refused without them
    for entry in list(os.scandir(run_dir)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif not entry.name.startswith(LOCK_NAME):
            os.remove(entry.path)
