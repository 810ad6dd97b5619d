"""Hydra and OmegaConf: the YAML groups, the resolvers, and the way from a composed config to the dataclasses.

Both libraries are imported where they are used, because their import takes a noticeable part of a second.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

from trainer.config.algorithm import AlgorithmConfig, with_own_defaults
from trainer.config.config_file import ConfigFiles, load
from trainer.config.explanation import unresolved
from trainer.config.fields import value_of
from trainer.config.named_sections import read_section
from trainer.config.overrides import CONFIG, MULTIRUN, arranged, checked, find_groups
from trainer.config.rollout import RolloutConfig
from trainer.config.schema import MAPPINGS, Config, refuse_unknown_keys, validate
from trainer.config.tasks import find_task
from trainer.config.texts import construct_yaml, unquoted
from trainer.errors import UserError
from trainer.files.redaction import HIDDEN, hidden_keys, name_secrets, redact_command

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
_LONGEST_SUFFIX = 200  # bytes; file names end at 255, and some get a suffix


def conf_dir() -> str:
    """Return the absolute path of the YAML groups: inside the installed package, or next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for candidate in (os.path.join(package, "conf"), os.path.join(os.path.dirname(package), "conf")):
        if os.path.isdir(candidate):
            return candidate
    raise AssertionError("the package was installed without its conf/ directory")


def prepared(words: Sequence[str], files: ConfigFiles, command: str = "train") -> list[str]:
    """Return the words of a command line as Hydra takes them: flags first, then overrides that can be read.

    Args:
        files: gets the YAML files of the user that the words name.
        command: whose help lists the flags.

    Raises:
        UserError: a flag, an override or a file of the user is wrong.
    """
    words = load(arranged(words, command), conf_dir(), files)
    flags = [word for word in words if word.startswith("--")]
    overrides = [word for word in words if not word.startswith("--")]
    groups = find_groups(conf_dir(), *files.directories)
    overrides = checked(overrides, groups, sweeps=MULTIRUN in flags)
    return [*flags, *(overrides if files.chooses_data else _with_files_group(overrides, files))]


def _with_files_group(overrides: list[str], files: ConfigFiles) -> list[str]:
    """Return the overrides with `data=files` if they name training files, and nothing else chooses the data.

    The default of the group `data` is a generator, which takes no files.
    """
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in overrides)}
    names_files = any(key == "data.train_files" or f"{key}.".startswith("data.mix.") for key in values)
    if not names_files or {"data", "data.synthetic"} & values.keys():
        return overrides
    experiments = re.findall(r"[\w.-]+", values.get("experiment", ""))
    return overrides if files.experiments_choose_data(experiments, conf_dir()) else ["data=files", *overrides]


@functools.cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf, once."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    def direction(task: str, metric: str, mode: str) -> str:
        return f"{find_task(task).compared_by(metric, mode)[1]}imize"

    ConfigStore.instance().store(name="schema", node=Config)
    _read_texts_as_typed()
    OmegaConf.register_new_resolver("sweep_suffix", _sweep_suffix, replace=True)
    OmegaConf.register_new_resolver("if_sweep", lambda name: name if _sweep_suffix() else None, replace=True)
    OmegaConf.register_new_resolver("optuna_direction", direction, replace=True)
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("quarter", lambda a: a // 4, replace=True)
    OmegaConf.register_new_resolver("if_builtin", _if_builtin, replace=True)
    OmegaConf.register_new_resolver("if_eq", _if_eq, replace=True)


def _read_texts_as_typed() -> None:
    """Let Hydra read YAML files with `construct_yaml`: those of the groups, and those that a file of the user names."""
    from hydra._internal.core_plugins import file_config_source
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import OmegaConf

    class FileConfigSource(file_config_source.FileConfigSource):  # by another name, Hydra would refuse it
        def load_config(self, config_path: str) -> ConfigResult:
            result = super().load_config(config_path)
            package = result.header["package"]
            if package in (None, "_group_"):
                package = os.path.dirname(config_path).replace("/", ".")
            with open(os.path.join(self.path, self._normalize_file_name(config_path)), encoding="utf-8") as file:
                values = construct_yaml(file.read(), package.replace("_global_", "").strip("."))
            result.config = OmegaConf.create(values or {})
            return result

    SourcesRegistry.instance().types["file"] = FileConfigSource


def register_plugins(arguments: list[str]) -> None:
    """Prepare the sweeper and the launcher of the extra `sweeps`, if the command line chooses them.

    Raises:
        UserError: the plugin is not installed, or with a version of Optuna that does not work.
    """
    for group, plugin in _PLUGINS.items():
        chosen = next((argument for argument in arguments if argument.startswith(group)), None)
        if chosen and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            package = plugin.replace("_", "-")
            raise UserError(f"{chosen}: needs the package {package}; install the extra `sweeps` (docs/install.md)")
        if chosen == "hydra/sweeper=optuna":
            _check_optuna(chosen)
            from hydra.core.config_store import ConfigStore
            from hydra.core.plugins import Plugins

            warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
            Plugins.instance()  # the plugin registers its own defaults, which ours replace
            store = ConfigStore.instance().store
            store(group="hydra/sweeper", name="optuna", node=_OPTUNA)
            store(group="hydra/sweeper/sampler", name="keyed_tpe", node=_KEYED_TPE)


def _check_optuna(chosen: str) -> None:
    """Check the version of Optuna. The sweeper asks for 2.x, which pip installs, and which SQLAlchemy 2 breaks."""
    version = importlib.metadata.version("optuna")
    major, minor = map(int, version.split(".")[:2])
    if not (4, 9) <= (major, minor) < (5, 0):
        raise UserError(
            f"{chosen}: needs {OPTUNA}, and {version} is installed; give `pip install '{OPTUNA}'`, although "
            "hydra-optuna-sweeper asks for an older one (docs/sweeps.md)"
        )


def to_config(dict_config: Any) -> Config:
    """Resolve interpolations of a composed Hydra config and return it as plain dataclasses, validated.

    Options of built-in functions that are null get the defaults of these functions.

    Raises:
        UserError: a value cannot be resolved, or the config is refused (see `validate`).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(dict_config)
    except OmegaConfBaseException as error:
        raise UserError(unresolved(error)) from error
    assert isinstance(config, Config)
    nested = dataclasses.asdict(config)
    if hidden := hidden_keys(nested):
        raise UserError(
            f"{hidden[0]}: {HIDDEN} stands for a secret that was left out where this config was printed or saved; give "
            "it by an environment variable: ${oc.env:NAME}"
        )
    name_secrets(OmegaConf.to_container(dict_config, resolve=False))
    _read_sections(config)
    refuse_unknown_keys(config)
    config.algorithm = AlgorithmConfig(**with_own_defaults(vars(config.algorithm)))
    if config.rollout.num_engines == RolloutConfig.num_engines:
        config.rollout.num_engines = max(1, len(config.rollout.urls))
    validate(config)
    return config


def _read_sections(config: Config) -> None:
    """Make sections of the mappings that the user has named, such as `data.mix.math`."""
    for key, cls in MAPPINGS.items():
        section, _, name = key.rpartition(".")
        given: dict[str, Any] = value_of(config, key)
        made = {str(one): read_section(cls, given[one], f"{key}.{one}", cls.of_run(config)) for one in given}
        setattr(value_of(config, section), name, made)


def compose(overrides: Sequence[str] = (), config_file: str | None = None) -> Config:
    """Return the validated config that `trainer train --config CONFIG_FILE OVERRIDES` would run with."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    words = prepared([*overrides, *([f"{CONFIG}={config_file}"] if config_file else [])], ConfigFiles())
    with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        return to_config(hydra_compose("config", overrides=words))


def words_given() -> list[str]:
    """Return the overrides of the job that Hydra runs in this process; empty if there is none."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def _if_builtin(value: Any, otherwise: Any, *, _root_: Any) -> Any:
    """Return `value` if the built-in model is trained, `otherwise` if `model.path` names another model."""
    return value if _root_.model.path is None else otherwise


def _if_eq(key: str, choice: Any, value: Any, otherwise: Any = None, *, _root_: Any) -> Any:
    """Return `value` if the key `key` has the value `choice`, else `otherwise`.

    Presets use it to set options for one function alone.
    """
    from omegaconf import OmegaConf

    chosen = OmegaConf.select(_root_, key)
    if chosen is None:
        raise ValueError(f"${{if_eq:{key},{choice},…}}: {key} has no value")
    return value if chosen == choice else otherwise


def _sweep_suffix() -> str:
    """Return `/key=value,…` of the keys that a multirun job sweeps, so that each job has its own directory; else "".

    Overrides that the command line gives to all jobs alike are left out (see `trainer.sweeps.callback`), so that
    resuming the sweep finds the directories of the sweep that was killed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    job = HydraConfig.get().job
    if OmegaConf.is_missing(job, "num"):  # the sweep itself
        return ""
    fixed = set(job.config.override_dirname.exclude_keys)
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    swept = [unquoted(o) for o in overrides if o.partition("=")[0].lstrip("+~") not in fixed]
    name = ",".join(redact_command(swept)).replace("/", "_")
    if len(name.encode()) > _LONGEST_SUFFIX:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = f"{name.encode()[: _LONGEST_SUFFIX - 17].decode(errors='ignore')}-{digest}"
    return f"/{name}" if name else ""
