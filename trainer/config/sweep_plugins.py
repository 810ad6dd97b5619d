"""The sweeper and the launcher of the extra `sweeps`: Optuna, which continues a killed sweep, and submitit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Sequence

from trainer.errors import UserError

_PLUGINS = {"hydra/sweeper=optuna": "hydra_optuna_sweeper", "hydra/launcher=submitit": "hydra_submitit_launcher"}
OPTUNA = "optuna>=4.9,<5"
"""What the sweeper works with. It asks for 2.x itself, and the package index knows nothing else."""
DIRECTION = "${optuna_direction:${trainer.task},${trainer.best_metric},${trainer.best_mode}}"
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


def register_plugins(words: Sequence[str]) -> None:
    """Prepare the plugins that the overrides choose.

    Raises:
        UserError: a plugin is not installed, or with a version of Optuna that does not work.
    """
    for group, plugin in _PLUGINS.items():
        chosen = next((word for word in words if word.startswith(group)), None)
        if chosen and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            package = plugin.replace("_", "-")
            raise UserError(f"{chosen}: needs the package {package}; install the extra `sweeps` (docs/install.md)")
        if chosen == "hydra/sweeper=optuna":
            _register_optuna(chosen)


def _register_optuna(chosen: str) -> None:
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

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
