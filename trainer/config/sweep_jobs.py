"""The jobs of a sweep (`-m`), which Hydra runs one after another in this process. One that fails does not end the
others. The extra `sweeps` has Optuna's sweeper, which continues a killed sweep."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.hydra import conf_dir, hydra_words, to_config
from trainer.config.outcome import JobEnded, Outcome, outcome_of
from trainer.config.schema import Config
from trainer.config.tasks import ACCURACY
from trainer.errors import UserError
from trainer.process.log_setup import LOG_FILE, show
from trainer.process.signals import EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

Job = Callable[[Config], float | None]
"""Returns the best value of `trainer.best_metric`, for sweepers that look for the best job."""

OPTUNA = "optuna>=4.9,<5"
"""What the sweeper works with. It asks for 2.x itself, and the package index knows nothing else."""
DIRECTION = "${optuna_direction:${trainer.task},${trainer.best_metric}}"
"""In which Optuna looks, if the command line does not say it."""
_OPTUNA = {
    "defaults": [{"sampler": "keyed_tpe"}, "_self_"],
    "_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    "direction": DIRECTION,
    # In the directory of the sweep, so that the same command continues a killed sweep.
    "storage": "sqlite:///${hydra.sweep.dir}/optuna.db",
    "study_name": "sweep",
    "n_trials": 20,
    "n_jobs": 1,  # trials that are chosen together do not learn from one another
    "max_failure_rate": 1.0,
    "search_space": None,
    "params": None,
    "custom_search_space": None,
}
_KEYED_TPE = {"_target_": "trainer.sweeps.sampler.KeyedTPESampler", "seed": "${trainer.seed}", "n_startup_trials": 10}


class JobResult(NamedTuple):
    """How a job of a sweep ended."""

    name: str
    status: int


def run_sweep(job: Job, flags: argparse.Namespace) -> None:
    """Run one job for each combination of values, as Hydra's `--multirun` does.

    Raises:
        JobEnded: with status 75 if a job has stopped early, 2 if all that have failed were refused, else 1.
    """
    import hydra

    words, ends = hydra_words(flags), list[JobResult]()
    register_plugins(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself
    sys.argv[1:] = ["--multirun", *words]

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> float | None:
        LOG_FILE.close()  # the last job's
        value, outcome = _run(job, dict_config)
        if outcome.status == EXIT_STATUS:
            raise JobEnded(outcome)
        outcome.show()
        ends.append(JobResult(_name_of(dict_config), outcome.status))
        return value

    try:
        app()
    except ValueError:
        _check_ends(ends)  # Optuna cannot name the best trial if all have failed
        raise
    _check_ends(ends)


def _run(job: Job, dict_config: DictConfig) -> tuple[float | None, Outcome]:
    """Run a job of a sweep. Returns its best value, None if it has none, and how it ended."""
    from hydra.core.hydra_config import HydraConfig

    try:
        show(_name_of(dict_config))
        config = to_config(dict_config)
        SIGNALS.check()
        value = job(config)
        if str(HydraConfig.get().sweeper._target_).endswith(".OptunaSweeper"):
            metric, _ = config.compared_by
            if value is None:
                raise UserError(f"trainer.best_metric={metric}: no step has measured it")
            if value == 0 and metric == ACCURACY:
                show(
                    "WARNING: val/accuracy is 0 in this job, which tells Optuna nothing if other jobs have 0 too; "
                    "a new sweep with trainer.best_metric=val/reward/mean compares such jobs"
                )
        return value, Outcome(0)
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return None, outcome_of(error)


def _name_of(dict_config: Any) -> str:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(dict_config.trainer.run_dir)
    except OmegaConfBaseException:
        return f"job {HydraConfig.get().job.num}"


def _check_ends(ends: list[JobResult]) -> None:
    """Check that no job has failed.

    Raises:
        JobEnded: see `run_sweep`.
    """
    LOG_FILE.close()  # the last job's, which does not hold what is said of the sweep
    failed = [end for end in ends if end.status]
    if failed:
        text = f"{len(failed)} of {len(ends)} jobs failed: {'; '.join(end.name for end in failed)}"
        raise JobEnded(Outcome(min(end.status for end in failed), text))


def register_plugins(words: Sequence[str]) -> None:
    """Prepare the sweeper that the overrides choose.

    Raises:
        UserError: it is not installed, or with a version of Optuna that does not work; or a launcher is chosen.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    if launcher := next((word for word in words if word.startswith("hydra/launcher=")), None):
        raise UserError(f"{launcher}: jobs of a sweep run one after another; start a sweep for each machine instead")
    chosen = next((word for word in words if word.startswith("hydra/sweeper=optuna")), None)
    if chosen is None:
        return
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        raise UserError(f"{chosen}: needs the package hydra-optuna-sweeper; install the extra `sweeps`")
    version = importlib.metadata.version("optuna")
    major, minor = map(int, version.split(".")[:2])
    if not (4, 9) <= (major, minor) < (5, 0):  # the sweeper asks for 2.x, which pip installs, and SQLAlchemy 2 breaks
        raise UserError(
            f"{chosen}: needs {OPTUNA}, and {version} is installed; give `pip install '{OPTUNA}'`, although "
            "hydra-optuna-sweeper asks for an older one (docs/sweeps.md)"
        )
    warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
    Plugins.instance()  # the plugin registers its own defaults, which ours replace
    store = ConfigStore.instance().store
    store(group="hydra/sweeper", name="optuna", node=_OPTUNA)
    store(group="hydra/sweeper/sampler", name="keyed_tpe", node=_KEYED_TPE)
