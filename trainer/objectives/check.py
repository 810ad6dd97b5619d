"""Check the functions that a config chooses to learn with: their signatures, and a call on a small example."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import Totals
from trainer.algorithms.correction import LEVELS, correction_weights
from trainer.algorithms.kl import AdaptiveKL
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.algorithms.registry import has_ratio, needs_different_completions, resolve
from trainer.config import algorithm as keys
from trainer.config.algorithm import ESTIMATOR, LOSS, TEACHER_LOGPROBS, AlgorithmConfig
from trainer.config.fields import Constraint
from trainer.config.rules import check_group_size
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.import_utils import default_of, is_import_path, options_of, parameter_names, takes_any_option, user_code

_NOT_FOR_USERS = {"eps", "totals"}.union(*keys.INPUTS.values())  # the caller passes them, or they are fixed
_OF_THE_TRAINER = {"loss", "grad_norm", "lr"}  # metrics of an update that no loss may name


def check_functions(config: Config) -> None:
    """Check the chosen advantage estimator and policy loss, and the options that the config sets for them.

    A function that is given by import path is called once, on four short completions. Raises UserError: there is no
    such function; it does not behave like the functions of `trainer.algorithms`; it does not take an option that the
    config sets; or the estimator compares completions that cannot differ."""
    algorithm = config.algorithm
    scores = {one.computes for one in (*config.roles, *config.servers) if one.computes}
    if TEACHER_LOGPROBS in algorithm.reads - scores:
        readers = [key for key in (ESTIMATOR, LOSS) if TEACHER_LOGPROBS in algorithm.inputs_of(key)]
        named = " and ".join(f"algorithm.{key}={getattr(algorithm, key)}" for key in readers)
        verb = "reads" if len(readers) == 1 else "read"
        raise UserError(f"{keys.TEACHER_KEY}=null: {named} {verb} {TEACHER_LOGPROBS}; name a teacher")
    estimator = _resolve(ADVANTAGES, algorithm, ESTIMATOR, scores)
    loss = _resolve(POLICY_LOSSES, algorithm, LOSS, scores)
    functions = {ESTIMATOR: estimator, LOSS: loss}
    _check_keys(algorithm, functions)
    _check_further_options(config, functions)
    _check_amounts(config, loss)
    if config.rollout.works_ahead:
        ahead = config.rollout.ahead
        check_stale(loss, config, f"rollout.ahead={ahead}" if ahead else "rollout.in_flight_updates=true")
    _check_replay(config, loss)
    if needs_different_completions(estimator):
        check_group_size(config, f"algorithm.advantage_estimator={algorithm.advantage_estimator}")


def _check_replay(config: Config, loss: Callable[..., Any]) -> None:
    """Refuse recorded rollouts that nothing corrects, or that lack what the estimator reads."""
    a, names = config.algorithm, [name for name, source in config.data.mix.items() if source.replay]
    if names and "baselines" in a.reads:
        raise UserError(
            f"data.mix.{names[0]}.replay=true: there is no greedy completion of recorded rollouts, which algorithm."
            f"{ESTIMATOR}={a.advantage_estimator} subtracts; choose another one"
        )
    is_corrected = keys.correction_of(config, is_stale=True) or (a.old_logprobs == "rollout" and has_ratio(loss))
    if names and not is_corrected:
        raise UserError(
            f"data.mix.{names[0]}.replay=true: another policy has sampled the rollouts, and nothing corrects for it; "
            "set algorithm.rollout_correction=tis"
        )


def _resolve(
    registry: dict[str, Callable[..., Any]], algorithm: AlgorithmConfig, key: str, scores: Collection[str]
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
        with user_code(message, has_place=True):
            _try(function, algorithm, key, scores)
    return function


def _check_keys(algorithm: AlgorithmConfig, functions: dict[str, Callable[..., Any]]) -> None:
    """Refuse a key of the schema that is an option, if the function that another key chooses does not take it."""
    for key, function in functions.items():
        taken = user_options(function)
        for name, value in keys.named_options(algorithm, key).items():
            if name in taken or name == "aggregation":  # every loss gets it, if only by **options
                continue
            instead = f"it takes {', '.join(taken)}" if taken else "it takes no option"
            raise UserError(
                f"algorithm.{name}={value}: algorithm.{key}={getattr(algorithm, key)} does not take it; {instead}"
            )


def _check_further_options(config: Config, functions: dict[str, Callable[..., Any]]) -> None:
    """Refuse `algorithm.options` that neither the task nor a chosen function has, and values that none can use."""
    algorithm = config.algorithm
    built_in = [*keys.KL_OPTIONS] if algorithm.adapts_kl else []
    built_in += keys.CRITIC_OPTIONS if any(role.name == "critic" for role in config.roles) else ()
    built_in += keys.CORRECTION_OPTIONS if algorithm.rollout_correction != keys.OFF else ()
    needs = {"overlong_factor": algorithm.overlong_buffer, "max_gen_batches": algorithm.dynamic_sampling}
    needs["baseline_decay"] = "player_baselines" in algorithm.reads
    built_in += [name for name in keys.RUN_OPTIONS if needs.get(name, True)]
    custom: list[str] = []
    for key, function in functions.items():
        of_function = custom if is_import_path(getattr(algorithm, key)) else built_in
        of_function += [
            name for name in user_options(function) if of_function is custom or name not in keys.OPTION_KEYS[key]
        ]
    takes_any = any(takes_any_option(function) for function in functions.values())
    for name, value in algorithm.options.items():
        if name in built_in and name not in custom:
            _check_option(name, value)
        elif name not in (*custom, *config.task.options) and not takes_any:
            taken = [*built_in, *custom]
            instead = f"the options are {', '.join(taken)}" if taken else "there is no option"
            raise UserError(f"algorithm.options.{name}={value}: no chosen function has this option; {instead}")


_ABOVE_0 = Constraint(above=0)
_BOUNDS = {
    "gamma": Constraint(at_least=0, at_most=1),
    "lam": Constraint(at_least=0, at_most=1),
    "pass_k": Constraint(at_least=1),
    "dual_clip": Constraint(above=1),
    "tau_pos": _ABOVE_0,
    "tau_neg": _ABOVE_0,
    "cov_frac": Constraint(at_least=0, at_most=1),
    "cov_kl_coef": Constraint(at_least=0),
    "max_weight": _ABOVE_0,
    "kl_target": _ABOVE_0,
    "kl_horizon": _ABOVE_0,
    "value_clip": Constraint(at_least=0),
    "rollout_correction_level": Constraint(choices=LEVELS),
    "rollout_correction_low": Constraint(at_least=0),
    "rollout_correction_high": _ABOVE_0,
    "overlong_factor": Constraint(at_least=0),
    "max_gen_batches": Constraint(at_least=1),
    "baseline_decay": Constraint(at_least=0, at_most=1),
}
"""The values that options of built-in functions may have."""


def _check_option(name: str, value: Any) -> None:
    constraint = _BOUNDS.get(name, Constraint())
    problem = constraint.problem(value)
    if problem is None and not constraint.choices:
        kind = {"pass_k": int, "normalize_std": bool}.get(name) or type(keys.RUN_OPTIONS.get(name, 1.0))
        described = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        problem = None if type(value) in (kind, int if kind is float else kind) else f"must be {described}"
    if problem is not None:
        raise UserError(f"algorithm.options.{name}={value}: {problem}")


def _check_amounts(config: Config, loss: Callable[..., Any]) -> None:
    """Refuse options that are too large or too small beside keys, or beside each other."""
    algorithm, given = config.algorithm, config.algorithm.options
    if not is_import_path(algorithm.advantage_estimator) and given.get("pass_k", 1) > config.rollout.n:
        raise UserError(f"algorithm.options.pass_k={given['pass_k']}: exceeds rollout.n={config.rollout.n}")
    completions = config.trainer.train_batch_size * config.rollout.n
    horizon = given.get("kl_horizon", default_of(AdaptiveKL.__init__, "horizon"))
    if algorithm.adapts_kl and horizon < completions:
        problem = f"must be at least the {completions} completions of one step"
        raise UserError(f"algorithm.options.kl_horizon={horizon}: {problem}")
    ranges = {"rollout_correction": correction_weights} if algorithm.rollout_correction == "mis" else {}
    if {"cov_low", "cov_high"} <= set(options_of(loss)) and not is_import_path(algorithm.policy_loss):
        ranges["cov"] = loss
    for prefix, function in ranges.items():
        names = [f"{prefix}_{end}" for end in ("low", "high")]
        own = [name if prefix == "cov" else name.rpartition("_")[2] for name in names]
        low, high = (given.get(name, default_of(function, key)) for name, key in zip(names, own, strict=True))
        if low > high:
            problem = f"exceeds {names[1]}={high}, which leaves no token to learn from"
            raise UserError(f"algorithm.options.{names[0]}={low}: {problem}")


def user_options(function: Callable[..., Any]) -> list[str]:
    return [name for name in options_of(function) if name not in _NOT_FOR_USERS]


def check_stale(loss: Callable[..., Any], config: Config, owner: str) -> None:
    """Refuse older weights of `owner` that nothing corrects, unless the user switched the correction off."""
    a = config.algorithm
    if keys.correction_of(config, is_stale=True) is None and not has_ratio(loss) and a.rollout_correction == keys.AUTO:
        raise UserError(
            f"algorithm.policy_loss={a.policy_loss}: has no ratio that corrects for the older weights of {owner}; "
            "choose algorithm.old_logprobs=recompute, or algorithm.rollout_correction=off to train without a correction"
        )


def _try(function: Callable[..., Any], algorithm: AlgorithmConfig, key: str, scores: Collection[str]) -> None:
    """Call an advantage estimator or a policy loss on a small example, and check what it returns."""
    rewards, mask, groups = torch.zeros(4, 3), torch.ones(4, 3), torch.tensor([0, 0, 1, 1])
    rewards[[0, 2, 3], -1] = 1.0  # one group whose rewards differ, and one whose rewards are equal
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    arrays = dict.fromkeys((*keys.INPUTS[key], *scores), logprobs.detach())
    options = keys.chosen_options(function, algorithm, key)
    if key == ESTIMATOR:
        arguments = rewards, mask, groups
        arrays |= dict.fromkeys(("baselines", "player_baselines"), torch.zeros(4))
    else:
        first = next(iter(parameter_names(function, follow_wrapped=False)), "")
        if first.startswith("old"):  # in this order in other frameworks
            raise TypeError(f"its first parameter is {first}; the order is logprobs, old_logprobs, advantages, mask")
        arguments, arrays["group_ids"] = (logprobs, logprobs.detach(), mask - 0.5, mask), groups
        options |= {"aggregation": keys.aggregation_of(function, algorithm), "totals": Totals.of(mask)}
    options |= {name: arrays[name] for name in parameter_names(function) if name in arrays}
    result = function(*arguments, **options)
    shapes = [getattr(one, "shape", None) for one in result] if isinstance(result, tuple) else []
    if key == ESTIMATOR:
        if shapes != [mask.shape] * 2 or not all(isinstance(one, torch.Tensor) for one in result):
            raise TypeError("it must return (advantages, returns), both tensors of the shape of the rewards, (4, 3)")
        if not all(bool(one.isfinite().all()) for one in result):
            raise ValueError("it returned NaN or an infinity; mind a group of equal rewards, whose deviation is 0")
        return
    if shapes != [(), None] or not isinstance(metrics := result[1], dict):
        raise TypeError("it must return (loss, metrics), the loss a scalar tensor, the metrics a dict")
    if not result[0].requires_grad:
        raise TypeError("its loss does not depend on the log-probs")
    if not all(getattr(value, "shape", None) == () for value in metrics.values()):
        raise TypeError("its metrics must be scalar tensors by their names, such as {'share': torch.tensor(0.5)}")
    if taken := _OF_THE_TRAINER & metrics.keys():
        raise TypeError(f"its metric {min(taken)} has the name of one of the trainer's; choose another")
