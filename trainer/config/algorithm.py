"""`algorithm.*`: advantages, policy loss, KL, corrections, sampling of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.fields import (
    HARMLESS,
    ResumeRule,
    SavedRun,
    Section,
    choice,
    config_error,
    constraint_of,
    number,
    open_section,
    option,
    setting,
)
from trainer.config.functions import built_in_defaults, inputs_of
from trainer.config.rollout import works_ahead
from trainer.errors import UserError
from trainer.import_utils import default_of, import_function, is_import_path, options_of, takes_any_option

if TYPE_CHECKING:
    from trainer.config.schema import Config

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
CORRECTIONS = ("tis", "mis")
AUTO, OFF = "auto", "off"


def correction_or_off(value: object) -> Any:
    """Return a value of `rollout_correction`, and `off` for null (of earlier versions) and for false (off in YAML)."""
    return OFF if value is None or str(value) == "False" else value


CORRECTION_LEVELS = ("token", "arithmetic", "geometric", "product")
ESTIMATOR, LOSS = "advantage_estimator", "policy_loss"
"""The keys that choose a function with options of its own."""


@dataclass
class AlgorithmConfig(Section):
    advantage_estimator: str = setting("grpo", resume="update")
    """`gae` (with a critic), `reward`, `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`,
    `maxrl`, `opo`, `grpo_passk` (see docs/algorithms.md), or an import path `package.module:function`."""
    normalize_std: bool | None = option(ESTIMATOR)
    """`grpo`: divide by the standard deviation of the group. `gae`, `remax`: whiten over the batch. null: the
    function's default."""
    gamma: float | None = option(ESTIMATOR, at_least=0, at_most=1)
    """`gae`, `reinforce_plus_plus`, `remax`: discount."""
    lam: float | None = option(ESTIMATOR, at_least=0, at_most=1)
    """`gae`: lambda."""
    pass_k: int | None = option(ESTIMATOR, at_least=1)
    """`grpo_passk`: the k of pass@k."""
    policy_loss: str = setting("clip", resume="update")
    """`clip`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `reinforce`, `importance_weighted_ce` (see
    docs/algorithms.md), or an import path `package.module:function`."""
    clip_low: float | None = option(LOSS, at_least=0)
    """`clip`, `gspo`, `cispo`, `clip_cov`: the lower bound of the ratio is `1 - clip_low`."""
    clip_high: float | None = option(LOSS, at_least=0)
    """`clip`, `gspo`, `cispo`, `clip_cov`: the upper bound of the ratio is `1 + clip_high`."""
    dual_clip: float | None = option(LOSS, above=1)
    """`clip`: where the advantage A is negative, the loss of a token is at most `dual_clip * |A|`."""
    tau_pos: float | None = option(LOSS, above=0)
    """`sapo`: temperature of the gate for positive advantages."""
    tau_neg: float | None = option(LOSS, above=0)
    """`sapo`: temperature of the gate for negative advantages."""
    cov_frac: float | None = option(LOSS, at_least=0, at_most=1)
    """`clip_cov`: fraction of the tokens that is detached. `kl_cov`: fraction of the tokens that gets the penalty."""
    cov_low: float | None = option(LOSS)
    """`clip_cov`: only tokens whose covariance is above this are detached."""
    cov_high: float | None = option(LOSS)
    """`clip_cov`: only tokens whose covariance is below this are detached."""
    cov_kl_coef: float | None = option(LOSS, at_least=0)
    """`kl_cov`: weight of the penalty."""
    max_weight: float | None = option(LOSS, above=0)
    """`importance_weighted_ce`: upper bound of the importance weights."""
    aggregation: str | None = option(LOSS, choices=AGGREGATIONS)
    """How token losses are averaged, always over the global mini-batch: `token_mean`, `seq_mean_token_mean`,
    `seq_mean_token_sum` or `seq_mean_token_sum_norm` (sums divided by `rollout.max_response_tokens`). null: the
    default of the policy loss; `token_mean` for a function by import path that has none."""
    options: dict[str, Any] = open_section(resume="update")
    """Further options of functions that are given by import path."""
    old_logprobs: str = choice("recompute", ("recompute", "rollout"), resume="update")
    """Log-probs of the old policy in the ratio: `recompute` (computed by the ranks: before the update, or for the first
    optimizer step in the update) or `rollout` (those of the engine that sampled; no pass before the update)."""
    kl_coef: float = number(0.0, at_least=0, resume="update")
    """Weight of the KL to the reference. 0: no KL, and no reference unless a function reads `ref_logprobs`."""
    kl_in: str = choice("loss", ("loss", "reward"), resume="update")
    """Where the KL is applied: `loss` (a term of the policy loss) or `reward` (subtracted from the reward of each
    token)."""
    kl_estimator: str = choice("k3", KL_ESTIMATORS, resume="update")
    """Estimator of the KL: `k1`, `k2`, `k3` or `abs`; in the loss also `k1+` and `k3+`, which have the value of `k1` or
    `k3` and the gradient of `k2`."""
    ref_sync_interval: int = number(
        -1, at_least=1, off=-1, resume=ResumeRule("never", "it decides whether the checkpoint holds the reference")
    )
    """Copy the policy into the reference every this many steps; the reference is then part of checkpoints. -1: the
    reference stays the initial weights."""
    kl_controller: str = choice("fixed", ("fixed", "adaptive"), resume="update")
    """`fixed`: `kl_coef` stays as it is. `adaptive`: it is adjusted so that the KL approaches `kl_target`."""
    kl_target: float = number(0.05, above=0, resume="update")
    """`kl_controller=adaptive`: the KL to reach, in nats per token."""
    kl_horizon: float = number(10000, above=0, resume="update")
    """`kl_controller=adaptive`: number of completions over which `kl_coef` may change by about a fifth."""
    entropy_coef: float = number(0.0, at_least=0, resume="update")
    """Weight of the entropy bonus in the policy loss."""
    value_clip: float = number(0.2, at_least=0, resume="update")
    """`gae`: in the value loss, new values are clipped to at most this distance from the old values."""
    rollout_correction: str | None = choice(AUTO, (AUTO, OFF, *CORRECTIONS), resume="update")
    """Multiply advantages by the ratio of the trainer's to the engine's probability: `tis` (truncated), `mis` (masked)
    or `off`. `auto`: `tis` if older weights sample (`rollout.ahead`, `rollout.in_flight_updates`), unless
    `old_logprobs=rollout`, whose ratio corrects already; else `off`. null and false mean `off`."""
    rollout_correction_level: str = choice("token", CORRECTION_LEVELS, resume="update")
    """One ratio per `token`, or one per sequence: the `arithmetic` mean, the `geometric` mean or the `product` of the
    ratios of its tokens."""
    rollout_correction_low: float = number(0.5, at_least=0, resume="update")
    """`rollout_correction=mis`: tokens with a ratio below this do not count in the loss."""
    rollout_correction_high: float = number(2.0, above=0, resume="update")
    """Ratios above this are set to it (`tis`), or their tokens do not count in the loss (`mis`)."""
    filter_zero_variance: bool = setting(False, resume="update")
    """Exclude prompts whose completions all got the same reward from the losses and from their denominators."""
    overlong_buffer: int = number(0, at_least=0, resume="update")
    """Number of last tokens before the length limit over which a penalty for long completions grows (DAPO). 0: no
    penalty."""
    overlong_factor: float = number(1.0, at_least=0, resume="update")
    """Penalty at the length limit, subtracted from the reward. Needs `overlong_buffer`."""
    overlong_masking: bool = setting(False, resume="update")
    """Exclude completions that were cut at the limit from the losses."""
    dynamic_sampling: bool = setting(False, resume="rollouts")
    """Replace prompts whose completions all get the same reward by further prompts (DAPO, Yu et al., 2025)."""
    max_gen_batches: int = number(10, at_least=1, resume="rollouts")
    """Largest number of batches of prompts that a step samples with `dynamic_sampling`. If they hold too few prompts
    with different rewards, the step is filled up with the other prompts."""

    def __post_init__(self) -> None:
        self.rollout_correction = correction_or_off(self.rollout_correction)

    @property
    def reads(self) -> frozenset[str]:
        """The arrays that estimator, loss and KL read, of those that something has to compute or keep for them."""
        kl = {"ref_logprobs"} if self.kl_coef > 0 else set()
        return inputs_of(ESTIMATOR, self.advantage_estimator) | inputs_of(LOSS, self.policy_loss) | kl

    def check_values(self, config: Config, name: str) -> None:
        rollout = config.rollout
        if self.pass_k is not None and self.pass_k > rollout.n:
            raise config_error(config, "algorithm.pass_k", f"exceeds rollout.n={rollout.n}")
        if self.rollout_correction == "mis" and self.rollout_correction_low > self.rollout_correction_high:
            raise config_error(
                config,
                "algorithm.rollout_correction_low",
                f"exceeds algorithm.rollout_correction_high={self.rollout_correction_high}, which leaves no token to "
                "learn from",
            )
        if self.rollout_correction in CORRECTIONS and self.old_logprobs == "rollout":
            problem = "corrects the engine's log-probs, and algorithm.old_logprobs=rollout takes them as they are"
            raise config_error(config, "algorithm.rollout_correction", problem)
        if self.overlong_buffer > rollout.max_response_tokens:
            problem = f"exceeds rollout.max_response_tokens={rollout.max_response_tokens}"
            raise config_error(config, "algorithm.overlong_buffer", problem)
        penalised = self.overlong_buffer > 0 or (self.kl_in == "reward" and self.kl_coef > 0)
        if self.advantage_estimator == "grpo_passk" and penalised:
            raise config_error(
                config,
                "algorithm.advantage_estimator",
                "grpo_passk asks whether a reward reaches 1, which one with a penalty taken off does not; use "
                "algorithm.kl_in=loss and algorithm.overlong_buffer=0",
            )
        self._check_kl(config)
        if self.dynamic_sampling:
            check_group_size(config, "algorithm.dynamic_sampling")

    def resume_rules(self, config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
        rules = {}
        if _correction(saved.config) == correction_of(config):
            rules["rollout_correction"] = HARMLESS
        if ("critic" in saved.roles) != ("critic" in {role.name for role in config.roles}):
            rules["advantage_estimator"] = ResumeRule("never", "only one of the two has a critic")
        if saved.config.get("algorithm", {}).get("kl_controller") == self.kl_controller == "adaptive":
            reason = "the adaptive controller has steered the weight since"
            rules["kl_coef"] = ResumeRule("never", reason, ("state",))
        return rules

    def _check_kl(self, config: Config) -> None:
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            raise config_error(
                config,
                "algorithm.kl_estimator",
                "a straight-through estimator only differs in its gradient, and a reward has none; choose k1, k2, k3 "
                "or abs",
            )
        if self.kl_controller == "adaptive":
            if self.kl_coef == 0:
                raise config_error(config, "algorithm.kl_controller", "needs algorithm.kl_coef above 0 to start from")
            completions = config.trainer.train_batch_size * config.rollout.n
            if self.kl_horizon < completions:
                problem = f"must be at least the {completions} completions of one step"
                raise config_error(config, "algorithm.kl_horizon", problem)
        if self.ref_sync_interval > 0:
            if "ref_logprobs" not in self.reads:
                problem = "there is no reference model with algorithm.kl_coef=0"
                raise config_error(config, "algorithm.ref_sync_interval", problem)
            if not config.trainer.colocate_roles:
                raise config_error(
                    config,
                    "algorithm.ref_sync_interval",
                    "needs trainer.colocate_roles=true: the reference takes the weights of the policy beside it",
                )


def correction_of(config: Config, is_stale: bool = False) -> str | None:
    """Return how the advantages of rollouts are corrected, one of `CORRECTIONS`; None: not at all.

    Args:
        is_stale: they come from older weights although this run does not work ahead: a checkpoint has held them.
    """
    return _correction({name: vars(getattr(config, name)) for name in ("algorithm", "rollout")}, is_stale)


def _correction(config: Mapping[str, Any], is_stale: bool = False) -> str | None:
    """Return what `correction_of` returns for a nested config, which may be one of an earlier version."""
    algorithm = config.get("algorithm", {})
    chosen = algorithm.get("rollout_correction")
    if chosen == AUTO:
        ahead = is_stale or works_ahead(config.get("rollout", {}))
        corrects = ahead and algorithm.get("old_logprobs") != "rollout"
        return "tis" if corrects else None
    return chosen if chosen in CORRECTIONS else None


def check_group_size(config: Config, key: str) -> None:
    """Refuse groups whose completions cannot differ, because `key` compares the completions of a prompt.

    Raises:
        UserError: there is one completion per prompt, or all are greedy.
    """
    if config.rollout.n < 2:
        raise config_error(config, "rollout.n", f"{key} compares completions of a prompt and needs at least 2")
    if config.rollout.temperature == 0:
        problem = f"greedy completions of a prompt are all equal, and {key} compares them; use a value above 0"
        raise config_error(config, "rollout.temperature", problem)


def chosen_options(function: Callable[..., Any], algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    """Return the options of `function` (see `options_of`) that the config sets.

    Args:
        key: the key that chooses the function, `ESTIMATOR` or `LOSS`. Options of the other key are left out.
    """
    names, any_name = set(options_of(function)), takes_any_option(function)
    known = {name: value for name, value in named_options(algorithm, key).items() if name in names}
    further = algorithm.options if is_import_path(getattr(algorithm, key)) else {}
    return known | {name: value for name, value in further.items() if any_name or name in names}


def aggregation_of(policy_loss: Callable[..., Any], algorithm: AlgorithmConfig) -> str:
    """Return how token losses are averaged: as the config says, else by the default in the function's signature."""
    return algorithm.aggregation or default_of(policy_loss, "aggregation") or "token_mean"


def named_options(algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    """Return the options that the config sets for the function that `key` chooses, without `algorithm.options`."""
    return {name: value for name in option_names(key) if (value := getattr(algorithm, name)) is not None}


def option_names(key: str) -> list[str]:
    """Return the keys of the schema that are options of the functions that `key` chooses."""
    return [f.name for f in dataclasses.fields(AlgorithmConfig) if constraint_of(f).option_of == key]


def own_defaults(algorithm: Mapping[str, Any], custom: bool = False) -> dict[str, Any]:
    """Return the default options of the functions that the section `algorithm` chooses.

    Args:
        custom: include functions that are given by import path. A function that cannot be imported has no defaults.
    """
    found: dict[str, Any] = {}
    for key in (ESTIMATOR, LOSS):
        name = algorithm.get(key) or ""
        defaults = _custom_defaults(key, name) if custom and is_import_path(name) else built_in_defaults(key, name)
        found |= {option: defaults[option] for option in option_names(key) if option in defaults}
    return found


def with_own_defaults(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `algorithm` with the functions' own defaults (see `own_defaults`) in place of null."""
    return {**algorithm, **{k: v for k, v in own_defaults(algorithm).items() if algorithm.get(k) is None}}


def _custom_defaults(key: str, path: str) -> dict[str, Any]:
    defaults = {"aggregation": "token_mean"} if key == LOSS else {}
    try:
        function = import_function(path, f"algorithm.{key}")
    except UserError:
        return defaults
    own = {name: default_of(function, name) for name in options_of(function)}
    return defaults | {name: value for name, value in own.items() if value is not None}
