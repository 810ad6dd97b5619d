"""`algorithm.*`: advantages, policy loss, KL, corrections, sampling of prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer import import_utils
from trainer.config.fields import ResumeRule, Section, setting, subsection
from trainer.config.rollout import works_ahead
from trainer.process.model_server import MOST_TOP_K

if TYPE_CHECKING:
    from trainer.config.schema import Config

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
CORRECTIONS = ("tis", "mis")
SAMPLED, FORWARD, REVERSE, JSD = "sampled", "forward", "reverse", "jsd"
TEACHER_KEY, TEACHER_URL, TEACHER_LOGPROBS = "algorithm.teacher.path", "algorithm.teacher.url", "teacher_logprobs"
_OF_MODELS = ("ref_logprobs", "rollout_logprobs", TEACHER_LOGPROBS)
TEACHER_TOP = "teacher_top"
"""Arrays of the teacher's likeliest tokens, `(B, T, k)`, begin with this: `teacher_top_ids`, `teacher_top_logprobs`."""
AUTO, OFF = "auto", "off"


ESTIMATOR, LOSS = "advantage_estimator", "policy_loss"
"""The keys that choose a function with options of its own."""


KL_OPTIONS = ("kl_target", "kl_horizon")
CRITIC_OPTIONS = ("value_clip",)
CORRECTION_OPTIONS = ("rollout_correction_level", "rollout_correction_low", "rollout_correction_high")
ESTIMATOR_OPTIONS = ("gamma", "lam", "normalize_std")
"""Options that a policy loss gets only if it has a parameter of that name."""
RUN_OPTIONS = {"filter_zero_variance": False, "overlong_masking": False, "overlong_factor": 1.0}
RUN_OPTIONS |= {"max_gen_batches": 10, "baseline_decay": 0.95}
"""Options that no function gets, with their defaults (`AlgorithmConfig.run_option`)."""
INPUTS = {
    ESTIMATOR: ("values", "baselines", "player_baselines", "input_ids", "old_logprobs", *_OF_MODELS),
    LOSS: (*_OF_MODELS, "values", "returns", "group_ids"),
}
"""Arrays that a function gets if it has a parameter of that name, besides `GIVEN` and the `computes` of roles."""
OPTION_KEYS: dict[str, tuple[str, ...]] = {ESTIMATOR: (), LOSS: ("clip_low", "clip_high", "aggregation")}
"""The keys of the schema that are options of the functions that a key chooses."""
GIVEN = {
    ESTIMATOR: ("rewards", "mask", "group_ids"),
    LOSS: ("logprobs", "old_logprobs", "advantages", "mask"),
}
"""Arrays that every function gets, in the order of its parameters."""
BUILT_IN_INPUTS = {
    "gae": frozenset({"values"}),
    "remax": frozenset({"baselines"}),
    "rae": frozenset({"player_baselines"}),
    "reverse_kl": frozenset({"old_logprobs", TEACHER_LOGPROBS}),
}
"""The built-in functions that read one of `INPUTS`."""


@dataclass
class TeacherConfig(Section):
    path: Any = setting(None, is_open=True, resume="update")
    """The teacher of on-policy distillation, on the ranks: a Hugging Face id or a directory. It has the tokens of the
    policy. With `data.mix`, a mapping may name one for each source: `{math: DIRECTORY, code: DIRECTORY}`. null: no
    teacher on the ranks."""
    divergence: str = setting(SAMPLED, choices=(SAMPLED, FORWARD, REVERSE, JSD), resume="update")
    """The divergence that `algorithm.opd_kl_coef` weighs: `sampled` (KL(policy || teacher) at the sampled tokens), or
    over the whole vocabulary `forward` (KL(teacher || policy)), `reverse` (KL(policy || teacher)) or `jsd`."""
    beta: float = setting(0.5, at_least=0.05, at_most=0.95, resume="update")
    """`jsd`: weight of the teacher in the mixture (GKD, Agarwal et al., 2023)."""
    temperature: float = setting(1.0, above=0, resume="update")
    """The divergence is that of the softmax of both models' logits divided by this."""
    url: Any = setting(None, is_open=True, resume="harmless")
    """In place of `path`, the address of an inference server with the teacher (`trainer inference model.path=…`), or a
    mapping from sources to addresses. A resume finds the same weights there, at this address or another."""
    top_k: int = setting(16, at_least=1, at_most=MOST_TOP_K, resume="update")
    """With `url`, a divergence over the vocabulary compares this number of the teacher's likeliest tokens, and the
    probability of all others together."""

    @property
    def exists(self) -> bool:
        """Whether there is a teacher, on the ranks or on a server."""
        return self.path is not None or self.url is not None

    @property
    def paths(self) -> dict[str, str]:
        """The teachers on the ranks, by the source of the mix whose rows each reads. `""`: all rows."""
        return _by_source(self.path)

    @property
    def urls(self) -> dict[str, str]:
        """The teachers on servers, by source."""
        return _by_source(self.url)


def _by_source(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    return {str(name): str(one) for name, one in value.items()} if isinstance(value, Mapping) else {"": str(value)}


@dataclass
class AlgorithmConfig(Section):
    advantage_estimator: str = setting("grpo", resume="update")
    """`gae` (with a critic), `reward`, `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`,
    `rae` (self-play), `maxrl`, `opo`, `grpo_passk`, `reverse_kl`, `zero` (see docs/algorithms.md), or an import path
    `package.module:function`."""
    policy_loss: str = setting("clip", resume="update")
    """`clip`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `reinforce`, `importance_weighted_ce` (see
    docs/algorithms.md), or an import path `package.module:function`."""
    clip_low: float | None = setting(None, at_least=0, resume="update")
    """`clip`, `gspo`, `cispo`, `clip_cov`: the lower bound of the ratio is `1 - clip_low`."""
    clip_high: float | None = setting(None, at_least=0, resume="update")
    """`clip`, `gspo`, `cispo`, `clip_cov`: the upper bound of the ratio is `1 + clip_high`."""
    aggregation: str | None = setting(None, choices=(None, *AGGREGATIONS), resume="update")
    """How token losses are averaged, always over the global mini-batch: `token_mean`, `seq_mean_token_mean`,
    `seq_mean_token_sum` or `seq_mean_token_sum_norm` (sums divided by `rollout.max_response_tokens`). null: the
    default of the policy loss; `token_mean` for a function by import path that has none."""
    options: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="update")
    """Further options of the chosen functions, such as `+algorithm.options.dual_clip=3`: of the estimator and the loss
    (docs/algorithms.md), also of your own (null: the function's own default); `kl_target` (the KL to reach, in nats per
    token: an adaptive controller adjusts `kl_coef`) and `kl_horizon` (10000: number of completions over which it may
    change `kl_coef` by about a fifth); of a critic `value_clip` (0.2: in the value loss, new values are clipped to at
    most this distance from the old ones); of `rollout_correction` `rollout_correction_level` (`token`: one ratio per
    token; or one per sequence: the `arithmetic` mean, the `geometric` mean or the `product` of the ratios of its
    tokens), `rollout_correction_high` (2.0: ratios above it are set to it by `tis`, and their tokens do not count in
    the loss of `mis`) and `rollout_correction_low` (0.5: tokens with a ratio below it do not count in the loss of
    `mis`); `filter_zero_variance` (false; true: prompts whose completions all got the same reward do not count in the
    losses and their denominators); `overlong_masking` (false; true: completions that were cut at the limit do not count
    in the losses); of `overlong_buffer` `overlong_factor` (1.0: the penalty at the length limit, subtracted from the
    reward); of `rae` `baseline_decay` (0.95: share of a player's moving average that its next reward leaves); and of
    `dynamic_sampling` `max_gen_batches` (10: most batches of prompts that a step samples; if they hold too few prompts
    with different rewards, the step is filled up with the other prompts)."""
    old_logprobs: str = setting("recompute", choices=("recompute", "rollout"), resume="update")
    """Log-probs of the old policy in the ratio: `recompute` (computed by the ranks: before the update, or for the first
    optimizer step in the update) or `rollout` (those of the engine that sampled; no pass before the update)."""
    kl_coef: float = setting(0.0, at_least=0, resume="update")
    """Weight of the KL to the reference. 0: no KL, and no reference unless a function reads `ref_logprobs`."""
    kl_in: str = setting("loss", choices=("loss", "reward"), resume="update")
    """Where the KL is applied: `loss` (a term of the policy loss) or `reward` (subtracted from the reward of each
    token)."""
    kl_estimator: str = setting("k3", choices=KL_ESTIMATORS, resume="update")
    """Estimator of the KL: `k1`, `k2`, `k3` or `abs`; in the loss also `k1+` and `k3+`, which have the value of `k1` or
    `k3` and the gradient of `k2`."""
    teacher: TeacherConfig = subsection(TeacherConfig)
    """The teacher of on-policy distillation (docs/distillation.md)."""
    opd_kl_coef: float = setting(0.0, at_least=0, resume="update")
    """Weight of the divergence from the teacher in the policy loss. 0: none."""
    ref_sync_interval: int = setting(
        -1, at_least=1, off=-1, resume=ResumeRule("never", "it decides whether the checkpoint holds the reference")
    )
    """Copy the policy into the reference every this many steps; the reference is then part of checkpoints. -1: the
    reference stays the initial weights."""
    entropy_coef: float = setting(0.0, at_least=0, resume="update")
    """Weight of the entropy bonus in the policy loss."""
    rollout_correction: str = setting(AUTO, choices=(AUTO, OFF, *CORRECTIONS), resume="update")
    """Multiply advantages by the ratio of the trainer's to the engine's probability: `tis` (truncated), `mis` (masked)
    or `off`. `auto`: `tis` if older weights sample (`rollout.ahead`, `rollout.in_flight_updates`), unless
    `old_logprobs=rollout`, whose ratio corrects already; else `off`."""
    overlong_buffer: int = setting(0, at_least=0, resume="update")
    """Number of last tokens before the length limit over which a penalty for long completions grows (DAPO). 0: no
    penalty."""
    dynamic_sampling: bool = setting(False, resume="rollouts")
    """Replace prompts whose completions all get the same reward by further prompts (DAPO, Yu et al., 2025)."""

    def run_option(self, name: str) -> Any:
        """Return the value of one of `RUN_OPTIONS`."""
        return self.options.get(name, RUN_OPTIONS[name])

    @property
    def adapts_kl(self) -> bool:
        """Whether a controller adjusts `kl_coef`."""
        return "kl_target" in self.options

    def __post_init__(self) -> None:
        self.options = {name: value for name, value in self.options.items() if value is not None}

    @property
    def reads(self) -> frozenset[str]:
        """The arrays that estimator, loss and KL read, of those that something has to compute or keep for them.

        Raises:
            UserError: a function is given by import path and cannot be imported.
        """
        kl = {"ref_logprobs"} if self.kl_coef > 0 else set()
        return self.inputs_of(ESTIMATOR) | self.inputs_of(LOSS) | kl

    def inputs_of(self, key: str) -> frozenset[str]:
        """Return which of `INPUTS` the function reads that `algorithm.<key>` chooses."""
        if not import_utils.is_import_path(name := getattr(self, key)):
            return BUILT_IN_INPUTS.get(name, frozenset())
        return frozenset(INPUTS[key]).intersection(
            import_utils.parameter_names(import_utils.import_function(name, f"algorithm.{key}"))
        )

    @property
    def vocabulary_divergence(self) -> TeacherConfig | None:
        """The divergence over the vocabulary that the policy loss has; None: it has none."""
        return self.teacher if self.opd_kl_coef > 0 and self.teacher.divergence != SAMPLED else None

    @property
    def reads_teacher_logprobs(self) -> bool:
        """Whether the estimator, the loss or the divergence reads the teacher's log-probs of the sampled tokens."""
        return TEACHER_LOGPROBS in self.reads or self.opd_kl_coef > 0 and self.vocabulary_divergence is None


def correction_of(config: Config, is_stale: bool = False) -> str | None:
    """Return how the advantages of rollouts are corrected, one of `CORRECTIONS`; None: not at all.

    Args:
        is_stale: they come from older weights although this run does not work ahead: a checkpoint has held them.
    """
    return saved_correction({name: vars(getattr(config, name)) for name in ("algorithm", "rollout")}, is_stale)


def saved_correction(config: Mapping[str, Any], is_stale: bool = False) -> str | None:
    """Return what `correction_of` returns for a nested config."""
    algorithm = config.get("algorithm", {})
    chosen = algorithm.get("rollout_correction")
    if chosen == AUTO:
        ahead = is_stale or works_ahead(config.get("rollout", {}))
        corrects = ahead and algorithm.get("old_logprobs") != "rollout"
        return "tis" if corrects else None
    return chosen if chosen in CORRECTIONS else None


def chosen_options(function: Callable[..., Any], algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    """Return the options of `function` (see `options_of`) that the config sets.

    Args:
        key: the key that chooses the function, `ESTIMATOR` or `LOSS`. Options of the other key are left out.
    """
    names, any_name = set(import_utils.options_of(function)), import_utils.takes_any_option(function)
    named = {name: value for name, value in named_options(algorithm, key).items() if name in names}
    others = {*KL_OPTIONS, *CRITIC_OPTIONS, *CORRECTION_OPTIONS, *RUN_OPTIONS}
    others = (others.union(ESTIMATOR_OPTIONS) if key == LOSS else others) - names
    return named | {
        name: value for name, value in algorithm.options.items() if name in names or any_name and name not in others
    }


def aggregation_of(policy_loss: Callable[..., Any], algorithm: AlgorithmConfig) -> str:
    """Return how token losses are averaged: as the config says, else by the default in the function's signature."""
    return algorithm.aggregation or import_utils.default_of(policy_loss, "aggregation") or "token_mean"


def named_options(algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    """Return the options that the config sets for the function that `key` chooses, without `algorithm.options`."""
    return {name: value for name in OPTION_KEYS[key] if (value := getattr(algorithm, name)) is not None}


def unprefixed(algorithm: AlgorithmConfig, names: Collection[str]) -> dict[str, Any]:
    """Return those of `algorithm.options` that are in `KL_OPTIONS` or `CORRECTION_OPTIONS`, as parameters: by the last
    word of their names."""
    return {name.rpartition("_")[2]: value for name, value in algorithm.options.items() if name in names}
