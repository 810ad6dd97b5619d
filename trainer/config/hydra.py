"""Hydra and OmegaConf: the YAML groups, the resolvers, and the way from words to the dataclasses.

Both libraries are imported where they are used, because their import takes a noticeable part of a second.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from trainer.config.config_file import LINES, find_groups, read_yaml, store_file
from trainer.config.explanation import config_refusal, located
from trainer.config.fields import value_of
from trainer.config.named_sections import read_section
from trainer.config.overrides import checked, parsed
from trainer.config.rollout import RolloutConfig
from trainer.config.rules import validate
from trainer.config.schema import MAPPINGS, Config, refuse_unknown_keys
from trainer.config.tasks import find_task
from trainer.config.texts import unquoted
from trainer.errors import UserError
from trainer.files.redaction import HIDDEN, hidden_keys, name_secrets, redact_command

_LONGEST_SUFFIX = 200  # bytes; file names end at 255, and some get a suffix
_GIVEN: list[str] = []
"""The overrides of the config that was composed last in this process."""


def conf_dir() -> str:
    """Return the absolute path of the YAML groups: inside the installed package, or next to it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for candidate in (os.path.join(package, "conf"), os.path.join(os.path.dirname(package), "conf")):
        if os.path.isdir(candidate):
            return candidate
    raise AssertionError("the package was installed without its conf/ directory")


def compose(overrides: Sequence[str] = (), config_file: str | None = None) -> Config:
    """Return the validated config that `trainer train --config CONFIG_FILE OVERRIDES` would run with.

    Raises:
        UserError: a word, a file or the config is refused.
    """
    flags = parsed([])
    flags.overrides, flags.config = list(overrides), config_file
    return compose_flags(flags)


def compose_flags(flags: Namespace) -> Config:
    """Return the validated config of a command line (see `parsed`).

    Raises:
        UserError: a word, a file or the config is refused.
    """
    words = hydra_words(flags)
    _GIVEN[:] = [word for word in words if not word.startswith("hydra.")]
    composed = _composed(words, _groups(flags), with_hydra=False)
    try:
        return to_config(composed)
    except UserError as error:
        raise UserError(located(str(error), words)) from error


def hydra_words(flags: Namespace) -> list[str]:
    """Return the overrides for Hydra: those of the user, checked, and what stands for `--config` and `--config-dir`.

    Raises:
        UserError: a word or a file is refused.
    """
    from omegaconf.errors import OmegaConfBaseException

    register()
    LINES.clear()
    groups = _groups(flags)
    words = checked(flags.overrides, groups, flags.multirun)
    if directories := _directories(flags):
        urls = json.dumps([f"file://{directory}" for directory in directories], ensure_ascii=False)
        words.append(f"hydra.searchpath={urls}")
    if flags.config:
        try:
            words.append(store_file(flags.config))
        except OmegaConfBaseException as error:
            raise config_refusal(error) from error
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    if {"data", "data.synthetic"} & keys:
        return words
    names_files = any(key == "data.train_files" or f"{key}.".startswith("data.mix.") for key in keys)
    if not names_files and not flags.config:
        return words
    # The default of the group `data` is a generator, which takes no files.
    single = [word for word in words if not flags.multirun or "," not in word]
    composed = _composed(single, groups, with_hydra=True)
    names_files = names_files or bool(composed.data.train_files or composed.data.mix)
    by_default = composed.hydra.runtime.choices.data == "reverse_text"
    return ["data=files", *words] if names_files and by_default else words


def _directories(flags: Namespace) -> list[str]:
    """Return the directories of the user with groups, absolute."""
    own = [flags.config_dir] if flags.config_dir else []
    own += [os.path.dirname(os.path.abspath(flags.config))] if flags.config else []
    for directory in own:
        if not os.path.isdir(directory):
            raise UserError(f"{directory}: no such directory; name the one of your YAML files")
    return [path for path in dict.fromkeys(map(os.path.abspath, own)) if path != conf_dir()]


def _groups(flags: Namespace) -> dict[str, list[str]]:
    return find_groups(conf_dir(), *_directories(flags))


def _composed(words: list[str], groups: dict[str, list[str]], with_hydra: bool) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
            return hydra_compose("config", overrides=words, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise config_refusal(error, words, groups) from error


@functools.cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf, once."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    def direction(task: str, metric: str, mode: str) -> str:
        return f"{find_task(task).compared_by(metric, mode)[1]}imize"

    ConfigStore.instance().store(name="schema", node=Config)
    _read_yaml_of_groups()
    OmegaConf.register_new_resolver("sweep_suffix", _sweep_suffix, replace=True)
    OmegaConf.register_new_resolver("optuna_direction", direction, replace=True)
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("quarter", lambda a: a // 4, replace=True)
    OmegaConf.register_new_resolver("if_builtin", _if_builtin, replace=True)
    OmegaConf.register_new_resolver("if_eq", _if_eq, replace=True)


def _read_yaml_of_groups() -> None:
    """Let Hydra read the YAML files of groups with `read_yaml`."""
    from hydra._internal.core_plugins import file_config_source
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import OmegaConf

    class FileConfigSource(file_config_source.FileConfigSource):  # by another name, Hydra would refuse it
        def load_config(self, config_path: str) -> ConfigResult:
            file = os.path.join(self.path, self._normalize_file_name(config_path))
            own = os.path.abspath(self.path) != conf_dir()
            if own and os.path.exists(file):
                read_yaml(file, records=False)  # a file that is no YAML is refused by its line
            result = super().load_config(config_path)
            package = result.header["package"]
            if package in (None, "_group_"):
                package = os.path.dirname(config_path).replace("/", ".")
            package = package.replace("_global_", "").strip(".")
            result.config = OmegaConf.create(read_yaml(file, package, records=own))
            return result

    SourcesRegistry.instance().types["file"] = FileConfigSource


def to_config(dict_config: Any) -> Config:
    """Resolve interpolations of a composed Hydra config and return it as plain dataclasses, validated.

    Raises:
        UserError: a value cannot be resolved, or the config is refused (see `validate`).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(dict_config)
    except OmegaConfBaseException as error:
        raise config_refusal(error, words_given()) from error
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


def words_given() -> list[str]:
    """Return the overrides of the config that was composed last in this process."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else list(_GIVEN)


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
