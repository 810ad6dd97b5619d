"""Hydra and OmegaConf: the YAML groups, the resolvers, and the way from a composed config to the dataclasses.

Both libraries are imported where they are used, because their import takes a noticeable part of a second.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from trainer.config.algorithm import AlgorithmConfig, with_own_defaults
from trainer.config.schema import Config, refuse_unknown_keys, validate
from trainer.errors import UserError


def conf_dir() -> str:
    """Absolute path of the YAML groups: inside the installed package, or beside it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for candidate in (os.path.join(package, "conf"), os.path.join(os.path.dirname(package), "conf")):
        if os.path.isdir(candidate):
            return candidate
    raise AssertionError("the package was installed without its conf/ directory")


def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf; harmless when repeated."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("sweep_suffix", _sweep_suffix, replace=True)
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("quarter", lambda a: a // 4, replace=True)
    OmegaConf.register_new_resolver("embedded", _embedded, replace=True)
    OmegaConf.register_new_resolver("when", _when, replace=True)


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
        raise UserError(str(error).splitlines()[0]) from error
    assert isinstance(config, Config)
    refuse_unknown_keys(config)
    config.model.cache_dir = os.path.expanduser(config.model.cache_dir)
    config.algorithm = AlgorithmConfig(**with_own_defaults(vars(config.algorithm)))
    validate(config)
    return config


def compose(overrides: list[str] | None = None) -> Config:
    """The validated config that `python -m trainer.main OVERRIDES` would run with."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        return to_config(hydra_compose("config", overrides=overrides or []))


def _embedded(value: Any, otherwise: Any, *, _root_: Any) -> Any:
    """`value` while the embedded model is trained; `otherwise` when `model.path` names another model."""
    return value if _root_.model.path is None else otherwise


def _when(key: str, choice: Any, value: Any, otherwise: Any = None, *, _root_: Any) -> Any:
    """`value` while `choice` is the value of `key`; else `otherwise`. So presets set options for one function alone."""
    from omegaconf import OmegaConf

    chosen = OmegaConf.select(_root_, key)
    if chosen is None:
        raise ValueError(f"${{when:{key},{choice},…}}: {key} has no value")
    return value if chosen == choice else otherwise


def _sweep_suffix() -> str:
    """`/key=value,…` of the keys that a multirun job sweeps, so that each job has its own directory; else empty.

    Overrides that the command line gives to all jobs alike are left out, so that resuming the sweep finds the
    directories of the sweep that was killed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    # Hydra escapes colons and the like; the command line has them plain.
    swept = [o for o in HydraConfig.get().overrides.task if o not in sys.argv and o.replace("\\", "") not in sys.argv]
    return "/" + ",".join(swept).replace("/", "_") if swept else ""
