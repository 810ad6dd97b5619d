"""Check the optimizers that a config names, before anything expensive starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import Config, OptimizerConfig
from trainer.errors import UserError
from trainer.import_utils import import_function

KEY = "trainer.policy.optimizer"


def _number(lowest: float, below: float = math.inf) -> Callable[[Any], str | None]:
    words = f"must be a number, at least {lowest:g}" + (f" and below {below:g}" if below < math.inf else "")

    def problem(value: Any) -> str | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and lowest <= value < below else words

    return problem


OPTIONS: Mapping[str, Mapping[str, Callable[[Any], str | None]]] = {
    "adamw": {},
    "muon": {
        "momentum": _number(0, 1),
        "nesterov": lambda value: None if isinstance(value, bool) else "must be true or false",
        "ns_steps": lambda value: None if type(value) is int and 1 <= value <= 100 else "must be from 1 to 100",
        "adamw_lr": _number(0),
    },
}
"""The built-in optimizers and their options, each with a function that returns what is wrong with a value."""


def check_optimizers(config: Config) -> None:
    """Refuse an optimizer that does not exist, and options that it does not take.

    Raises:
        UserError: names the key.
    """
    for role in config.roles:
        if role.optimizer is not None:
            _check(role.optimizer)


def _check(config: OptimizerConfig) -> None:
    if config.name not in OPTIONS:
        _check_custom(config)
        return
    taken = OPTIONS[config.name]
    for name, value in config.options.items():
        if name not in taken:
            has = f"the options are {', '.join(taken)}" if taken else "there is no option"
            raise UserError(f"{KEY}.options.{name}={value}: {config.name} has no such option; {has}")
        if (problem := taken[name](value)) is not None:
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
