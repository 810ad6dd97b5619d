"""The warm start of the built-in model: a run of the task `sft` in the cache, before the run that begins with it."""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import os
import tempfile

from trainer.checkpoint.exports import is_exported
from trainer.config import Config, TrainerConfig
from trainer.config.fields import walk_keys
from trainer.config.schema import without_source
from trainer.config.trainer import PROCESSES, SEED_OF_TINY
from trainer.errors import UserError
from trainer.learner.learner import Learner
from trainer.models.files import cache_directory
from trainer.seeding import derive_seed
from trainer.sources.base import EpisodeSource
from trainer.sources.supervised import SupervisedSource
from trainer.tasks.base import Task
from trainer.tasks.supervised import build_sft

LOG = logging.getLogger(__name__)

_CHECKED_ROWS = 128
"""Training prompts that say whether the warm start is long enough."""
_CHECKED_EVERY = 5
"""Steps of the warm start between two such checks."""

_SECTIONS = ("model.tiny.", "sft.", "data.")
"""The sections that say what model the warm start makes."""
_NAMED = (
    *(f"model.tiny.{name}" for name in ("hidden_size", "num_layers", "start_accuracy")),
    *("sft.steps", "sft.batch_size", "sft.max_length"),
    *(f"sft.optimizer.{name}" for name in ("lr", "scheduler", "warmup_steps", "schedule_steps")),
    *(f"trainer.policy.optimizer.{name}" for name in ("betas", "eps", "weight_decay", "max_grad_norm", "min_lr_ratio")),
    *("data.synthetic", "data.synthetic_args", "data.train_files", "data.train_size"),
)
"""Keys whose value is part of the model's name. Of the others in `_SECTIONS`, a value is only if it is not the default,
so a new key leaves the names of models as they are."""
_WITHOUT_EFFECT = ("data.val_files", "data.val_size", "data.curriculum", "data.mix", "data.val_sets")
"""Keys in `_SECTIONS` that have no part in the model."""


def build(cfg: Config) -> Task:
    """Return the task whose run makes the model. The run lies in the cache, so it is made once for a config."""
    own = _config(cfg)
    enough = cfg.model.tiny.start_accuracy

    def is_enough(learner: Learner, source: EpisodeSource, step: int) -> bool:
        # The step alone decides when that is measured, so a run that was killed ends after the same step.
        if enough is None or step == 0 or step % _CHECKED_EVERY:
            return False
        assert isinstance(source, SupervisedSource)
        rows = source.some_examples(_CHECKED_ROWS)
        share = learner.accuracy(rows)
        if share >= enough:
            LOG.info(f"after {step} steps the model answers {share:.1%} of {len(rows)} training prompts exactly")
        return share >= enough

    LOG.info("warm start of the built-in model: at most %d supervised steps, once for this config", own.total_steps)
    return dataclasses.replace(build_sft(own), is_enough=is_enough, is_made=lambda: made_model(cfg) is not None)


def _config(cfg: Config) -> Config:
    """Return the config of the warm start. Of the run it has what makes the model, how many ranks there are, and when
    to stop."""
    run_dir = _directory(cfg)
    trainer = dataclasses.replace(
        TrainerConfig(),
        task="sft",
        seed=SEED_OF_TINY,
        run_name="warm-start",
        run_dir=run_dir,
        ckpt_path=os.path.join(run_dir, "checkpoints"),
        export_path=os.path.join(run_dir, "exports"),
        ckpt_interval=50,
        max_ckpts_to_keep=1,
        resume_mode="latest",
        val_interval=-1,
        deadline=cfg.trainer.deadline,
        num_workers=cfg.trainer.num_workers,
        dp_replicate=cfg.trainer.dp_replicate,
        device=cfg.trainer.device,
        ray_address=cfg.trainer.ray_address or PROCESSES,  # no Ray for a minute
    )
    logger = dataclasses.replace(cfg.logger, services=[], prometheus=None, plot=False)  # nobody follows its metrics
    mix = {name: source for name, source in cfg.data.mix.items() if not source.replay}
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, mix=mix), trainer=trainer, logger=logger)


def made_model(cfg: Config) -> str | None:
    """Return the directory of the built-in model that the config describes; None: it is not made yet."""
    exports = glob.glob(os.path.join(glob.escape(_directory(cfg)), "exports", "global_step_*", "policy"))
    return next(filter(is_exported, exports), None)


def check_cache(cfg: Config) -> None:
    """Check that the built-in model exists or can be built.

    Raises:
        UserError: `model.cache_dir` cannot be written.
    """
    if made_model(cfg) is not None:
        return
    cache = os.path.dirname(_directory(cfg))
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


def _directory(cfg: Config) -> str:
    """Return the run directory of the warm start. Its name is a hash of what makes the model."""
    usual = {key: value for key, value, _ in walk_keys(Config())}
    replayed = [f"data.mix.{name}." for name, source in cfg.data.mix.items() if source.replay]
    recipe = {
        key: value
        for key, value, _ in walk_keys(cfg)
        if (key.startswith(_SECTIONS) or key in _NAMED)
        and not (key in _WITHOUT_EFFECT or key.startswith(("data.val_sets.", *replayed)) or key.endswith(".replay"))
        and without_source(key) == key  # what answers and rewards the rows of a source has no part in the model
        and (key in _NAMED or value != usual.get(key))
    }
    return os.path.join(cache_directory(cfg.model), f"tiny-{derive_seed(json.dumps(recipe, sort_keys=True)):016x}")
