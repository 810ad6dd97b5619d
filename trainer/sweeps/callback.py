"""The callback that Hydra calls around a sweep (`hydra.callbacks` in `conf/config.yaml`)."""

from __future__ import annotations

import glob
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from trainer.config.command_line import DIRECTION
from trainer.config.tasks import find_task
from trainer.errors import UserError
from trainer.files.redaction import redact_command, redact_text
from trainer.metrics.names import METRICS
from trainer.metrics.tracker import METRICS_FILE
from trainer.process.log_setup import show

if TYPE_CHECKING:
    from omegaconf import DictConfig

LOG = logging.getLogger(__name__)


class SweepCallback(Callback):
    """Prepares a sweep, and compares its jobs at the end. Does nothing for a single job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Pass the swept keys to the jobs, and continue an Optuna study. Exits on an invalid sweep."""
        try:
            self._prepare(config)
        except UserError as error:  # Hydra would turn an exception into a warning
            show(f"error: {redact_text(str(error))}", error=True)
            sys.exit(2)

    def _prepare(self, config: DictConfig) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import ValueType
        from omegaconf import OmegaConf, open_dict, read_write

        overrides = OverridesParser.create().parse_overrides(
            OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        )
        swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
        fixed = [override.key_or_group for override in overrides if not override.is_sweep_override()]
        if twice := sorted(swept & set(fixed)):
            raise UserError(
                f"{twice[0]}: has one value and also several, so jobs would share a directory; keep one of the two"
            )
        for override in overrides:
            if override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
                key, values = override.key_or_group, set(override.sweep_string_iterator())
                if len(set(redact_command([f"{key}={value}" for value in values]))) < len(values):
                    raise UserError(
                        f"{key}: the jobs of this sweep would differ only in a secret, and no directory can be named "
                        "after it; sweep the name of an environment variable instead, or start the jobs one by one"
                    )
        if any(o.key_or_group == "trainer.run_dir" and "${sweep_suffix:}" not in str(o.value()) for o in overrides):
            raise UserError(
                "trainer.run_dir: all jobs of a sweep would share it; name the sweep with trainer.run_name=NAME, or "
                "add the values of each job: 'trainer.run_dir=DIRECTORY${sweep_suffix:}'"
            )
        if config.hydra.output_subdir is not None:
            raise UserError("hydra.output_subdir: Hydra would write secrets there; each job has a config.yaml without")
        try:
            os.makedirs(config.hydra.sweep.dir, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"hydra.sweep.dir={config.hydra.sweep.dir}: cannot be made ({error.strerror}); choose another one"
            ) from error
        with read_write(config), open_dict(config):
            # Jobs are composed again from these overrides.
            names = ",".join(dict.fromkeys(fixed))
            config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{names}]")
            config.hydra.overrides.hydra.append("hydra.output_subdir=null")
            if str(config.hydra.sweeper.get("_target_")).endswith(".OptunaSweeper"):
                _check_direction(config)
                resumes = "latest" in [o.value() for o in overrides if o.key_or_group == "trainer.resume_mode"]
                _continue_study(config.hydra.sweeper, config.hydra.sweep.dir, resumes)
        file = os.path.join(config.hydra.sweep.dir, "multirun.yaml")  # Hydra will write the config there, with secrets
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print a table of the jobs, and draw their curves."""
        from trainer.reports.compare import compare_runs

        directory = config.hydra.sweep.dir
        runs = [os.path.dirname(path) for path in glob.glob(os.path.join(glob.escape(directory), "*", METRICS_FILE))]
        if len(runs) > 1:
            try:
                compare_runs(sorted(runs), os.path.join(directory, "sweep.png"))
            except (UserError, OSError) as error:
                LOG.warning("the jobs were not compared (%s); `trainer compare RUN…` compares them", error)


def _check_direction(config: DictConfig) -> None:
    """Refuse a search for jobs that the comparison of runs calls the worst."""
    from omegaconf import OmegaConf

    t, direction = config.trainer, config.hydra.sweeper.direction
    settings = {name: t[name] for name in ("task", "best_metric")}
    default = OmegaConf.create({"trainer": settings, "value": DIRECTION})
    if direction != default.value:
        raise UserError(
            f"hydra.sweeper.direction={direction}: trainer.best_metric={t.best_metric} requires "
            f"{default.value}; remove hydra.sweeper.direction"
        )
    metrics = METRICS | find_task(t.task).metrics
    if direction == "maximize" and t.best_metric in metrics and metrics[t.best_metric].better == "min":
        raise UserError(
            f"trainer.best_metric={t.best_metric}: the sweep would search for the highest value; write -{t.best_metric}"
        )


def _continue_study(sweeper: DictConfig, directory: str, resumes: bool) -> None:
    """Count finished trials, and queue the trials that a kill has interrupted again, with the same values.

    Args:
        resumes: whether the jobs have `trainer.resume_mode=latest`.
    """
    import optuna
    from optuna.trial import TrialState

    if sweeper.study_name is None or not isinstance(sweeper.storage, str):
        return
    storage = optuna.storages.get_storage(sweeper.storage)
    try:
        trials = storage.get_all_trials(storage.get_study_id_from_name(sweeper.study_name))
    except KeyError:
        return
    if trials and not resumes:
        raise UserError(
            f"hydra.sweep.dir={directory}: already contains a sweep; continue it with trainer.resume_mode=latest, or "
            "choose another trainer.run_name"
        )
    for trial in trials:
        if trial.state == TrialState.RUNNING:
            storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    finished = sum(trial.state.is_finished() for trial in trials)
    if finished >= sweeper.n_trials and all(trial.state != TrialState.COMPLETE for trial in trials):
        raise UserError(
            f"hydra.sweep.dir={directory}: all {finished} trials have failed; choose another trainer.run_name, or a "
            "larger hydra.sweeper.n_trials"
        )
    if finished:
        LOG.info("%d of %d trials are finished", finished, sweeper.n_trials)
    sweeper.n_trials = max(0, sweeper.n_trials - finished)
