"""Check the optimizers that a config names, before anything expensive starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import Config, OptimizerConfig
from trainer.errors import UserError
from trainer.files.documents import is_number
from trainer.import_utils import import_function

KEY = "trainer.policy.optimizer"


OPTIONS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "adamw": {},
    "muon": {
        "momentum": (lambda v: is_number(v) and 0 <= v < 1, "must be a number, at least 0 and below 1"),
        "nesterov": (lambda v: isinstance(v, bool), "must be true or false"),
        "ns_steps": (lambda v: type(v) is int and 1 <= v <= 100, "must be from 1 to 100"),
        "adamw_lr": (lambda v: is_number(v) and v >= 0, "must be a number, at least 0"),
    },
}
"""The built-in optimizers and their options, each with the test of a value, and what is wrong with one that fails."""


def check_optimizers(config: Config) -> None:
    """Raise a `UserError` for an optimizer that does not exist, and for options that it does not take."""
    for optimizer in (role.optimizer for role in config.roles if role.optimizer is not None):
        taken = OPTIONS.get(optimizer.name)
        if taken is None:
            _check_custom(optimizer)
            continue
        for name, value in optimizer.options.items():
            if name not in taken:
                has = f"the options are {', '.join(taken)}" if taken else "there is no option"
                raise UserError(f"{KEY}.options.{name}={value}: {optimizer.name} has no such option; {has}")
            is_valid, problem = taken[name]
            if not is_valid(value):
                raise UserError(f"{KEY}.options.{name}={value}: {problem}")


def _check_custom(config: OptimizerConfig) -> None:
    function = import_function(config.name, f"{KEY}.name", known=OPTIONS)
    usual = OptimizerConfig()
    for name in ("betas", "eps"):
        if getattr(config, name) != getattr(usual, name):
            raise UserError(f"{KEY}.{name}: {config.name} does not get it; set it in {KEY}.options")
    try:
        inspect.signature(function).bind([], lr=0.0, weight_decay=0.0, **config.options)
    except TypeError as error:
        takes = "it is called with the named parameters, lr=, weight_decay= and the options"
        raise UserError(f"{KEY}.name={config.name}: {error}; {takes}") from error
    except ValueError:  # some callables in C have no signature
        pass
