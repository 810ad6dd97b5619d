"""Check the functions that a config chooses: their signatures, and a call on a small example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import Totals
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.algorithms.registry import needs_different_completions, resolve
from trainer.config.algorithm import AlgorithmConfig, check_group_size, chosen_options, named_options
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.plugins import options_of, takes_any_option, user_code

_NOT_FOR_USERS = {"values", "baselines", "eps", "aggregation", "totals"}  # the caller passes them, or they are fixed


def check_functions(config: Config) -> None:
    """Check the chosen advantage estimator and policy loss, and the options that the config sets for them.

    A function that is given by import path is called once, on four short completions.

    Raises:
        UserError: there is no such function; it does not behave like the functions of `trainer.algorithms`; neither
            function takes an option that the config sets; or the estimator compares completions that cannot differ.
    """
    algorithm = config.algorithm
    estimator = _resolve(ADVANTAGES, algorithm, "advantage_estimator", _try_estimator)
    loss = _resolve(POLICY_LOSSES, algorithm, "policy_loss", _try_loss)
    _check_options(algorithm, estimator, loss)
    if needs_different_completions(estimator):
        check_group_size(config, f"algorithm.advantage_estimator={algorithm.advantage_estimator}")


def _resolve(
    registry: dict[str, Callable[..., Any]], algorithm: AlgorithmConfig, key: str, try_out: Callable[..., None]
) -> Callable[..., Any]:
    name = getattr(algorithm, key)
    try:
        function = resolve(registry, name, f"algorithm.{key}")
    except ValueError as error:
        raise UserError(str(error)) from error
    if name not in registry:
        message = (
            f"algorithm.{key}={name}: on four completions of three tokens, with the arguments that "
            "docs/algorithms.md names, it ended in {}"
        )
        with user_code(message):
            try_out(function, algorithm)
    return function


def _check_options(algorithm: AlgorithmConfig, *functions: Callable[..., Any]) -> None:
    custom = algorithm.advantage_estimator not in ADVANTAGES or algorithm.policy_loss not in POLICY_LOSSES
    if algorithm.options and not custom:
        raise UserError(f"algorithm.options={algorithm.options}: is for functions given by import path")
    taken = [name for function in functions for name in user_options(function)]
    given = named_options(algorithm)
    if not any(takes_any_option(function) for function in functions):
        given |= {f"options.{name}": value for name, value in algorithm.options.items()}
    for name, value in given.items():
        if name.removeprefix("options.") not in taken:
            instead = f"they take {', '.join(taken)}" if taken else "they take no option"
            raise UserError(
                f"algorithm.{name}={value}: neither algorithm.advantage_estimator={algorithm.advantage_estimator} nor "
                f"algorithm.policy_loss={algorithm.policy_loss} takes it; {instead}"
            )
    for function in functions:
        _check_covariances(function, algorithm)


def user_options(function: Callable[..., Any]) -> list[str]:
    """Return the names of the options of `function` that a config may set."""
    return [name for name in options_of(function) if name not in _NOT_FOR_USERS]


def _check_covariances(function: Callable[..., Any], algorithm: AlgorithmConfig) -> None:
    """Refuse an empty range of covariances (`clip_cov`)."""
    chosen = chosen_options(function, algorithm)
    bounds = {}
    for name in ("cov_low", "cov_high"):
        if name not in options_of(function):
            return
        bounds[name] = chosen.get(name, inspect.signature(function).parameters[name].default)
    if bounds["cov_low"] > bounds["cov_high"]:
        key = "cov_high" if "cov_high" in chosen else "cov_low"
        room = " to ".join(f"{name}={value}" for name, value in bounds.items())
        raise UserError(f"algorithm.{key}={bounds[key]}: leaves no room from {room}")


def _try_estimator(function: Callable[..., Any], algorithm: AlgorithmConfig) -> None:
    rewards, mask = torch.zeros(4, 3), torch.ones(4, 3)
    rewards[::2, -1] = 1.0
    results = function(rewards, mask, torch.tensor([0, 0, 1, 1]), **chosen_options(function, algorithm))
    if not (isinstance(results, tuple) and [getattr(x, "shape", None) for x in results] == [mask.shape, mask.shape]):
        raise TypeError("it must return (advantages, returns), both of the shape of the rewards")


def _try_loss(function: Callable[..., Any], algorithm: AlgorithmConfig) -> None:
    logprobs, mask = torch.full((4, 3), -1.0, requires_grad=True), torch.ones(4, 3)
    result = function(
        logprobs,
        logprobs.detach(),
        mask - 0.5,
        mask,
        aggregation=algorithm.aggregation,
        totals=Totals.of(mask),
        **chosen_options(function, algorithm),
    )
    if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "shape", None) == ()):
        raise TypeError("it must return (loss, metrics), the loss a scalar tensor")
    if not result[0].requires_grad:
        raise TypeError("its loss does not depend on the log-probs")
    if not (isinstance(result[1], dict) and {"clip_frac", "approx_kl"} <= result[1].keys()):
        raise TypeError("its metrics must hold clip_frac and approx_kl")
