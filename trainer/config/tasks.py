"""The tasks that `trainer.task` can name, and the models of a run, as data that is known without torch.

Whatever depends on the kind of training asks `TASKS`, so that a new kind is one more `TaskSpec`: an entry here, or a
value in a module of the user.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.algorithm import TEACHER_KEY, TEACHER_LOGPROBS, TEACHER_URL
from trainer.config.data import SIMPO
from trainer.config.fields import matches, value_of
from trainer.config.trainer import FSDPConfig, LoraConfig, OptimizerConfig
from trainer.errors import UserError, did_you_mean
from trainer.import_utils import import_function, import_numpy, user_code
from trainer.process.model_server import LOGPROBS, SCORES, ModelServer, model_server

if TYPE_CHECKING:
    from trainer.config.schema import Config


LM, VALUE, SCORE = "lm", "value", "score"
POLICY_KEY = "model.path"
REWARD_MODEL = "reward_model"
"""The role whose scores are the rewards of `reward.name=model`."""


@dataclass(frozen=True)
class RoleSpec:
    """One model of a run. Ranks, checkpoints and restores loop over the roles, and know only the policy by its name."""

    name: str
    path: str | None = None
    """Directory or Hugging Face id of the initial weights. None: those of the policy."""
    head: str = LM
    """`lm` (log-probs of tokens), `value` (of the state before each token) or `score` (of the state after it, as that
    of a reward model)."""
    trained: bool = False
    saved: bool = False
    """The weights are part of checkpoints. Else a resume loads the initial weights again."""
    sharding: FSDPConfig = field(default_factory=FSDPConfig)
    optimizer: OptimizerConfig | None = None
    """Of a trained role."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of a trained role."""
    computes: str = ""
    """Name of the array that the role computes for each step before the update, such as `ref_logprobs`. Empty: none."""
    section: str = ""
    """The config section of `sharding` and `lora`, for messages. Empty: the task sets them itself."""
    path_key: str = POLICY_KEY
    """Names `path`: a config key, or a name of its own. Resumes compare its weights with those of the first start under
    this name, and `trainer.allow_config_change` takes it."""
    skipped_steps: int = 0
    """First steps of the run in which the role is not trained."""
    updates_per_step: int = 1
    """Optimizer steps of a trained role in each later step of the run."""
    sync_interval: int | None = None
    """Copy the policy's weights into this role every this many steps. None: never."""
    is_policy_base: bool = False
    """The role is the policy without its adapters, and needs no module of its own."""
    source: str = ""
    """The source of `data.mix` whose rows alone the role reads before the update. Empty: all rows."""
    read_by: str = ""
    """The trained role whose update reads the distributions of this one over the vocabulary. Empty: none."""

    def __post_init__(self) -> None:
        if self.path is not None and self.path_key == POLICY_KEY:  # a resume would compare the policy's weights instead
            raise UserError(
                f"the role {self.name} has a path of its own, so it needs a path_key of its own: "
                f"RoleSpec({self.name!r}, path=..., path_key={self.name!r})"
            )
        if self.trained and self.optimizer is None:
            raise UserError(
                f"the role {self.name} is trained, so it needs an optimizer: RoleSpec({self.name!r}, trained=True, "
                "optimizer=OptimizerConfig())"
            )

    def optimizer_steps(self, steps: int) -> int:
        """Return the number of optimizer steps in the first `steps` steps of a run."""
        return max(0, steps - self.skipped_steps) * self.updates_per_step

    def setting(self, name: str) -> str:
        """Return how messages name a field: by its config key if there is one, such as `trainer.policy.fsdp`."""
        if not self.section:
            return f"RoleSpec({self.name!r}).{name}"
        return f"{self.section}.{'fsdp' if name == 'sharding' else name}"

    @property
    def config_key(self) -> str:
        """The config key with `path`, or with a mapping from sources to paths."""
        return self.path_key.removesuffix(f".{self.source}")

    @property
    def has_adapters(self) -> bool:
        return self.lora.rank is not None

    @property
    def trained_whole(self) -> bool:
        """Whether all of its weights are trained."""
        return self.trained and not self.has_adapters

    @property
    def needs_initial_weights(self) -> bool:
        """Whether a resume computes with the initial weights, because a checkpoint does not hold all of the weights."""
        return not self.saved or self.has_adapters


@dataclass(frozen=True)
class ServerSpec:
    """A frozen model of a run on an inference server (`trainer.process.model_server`)."""

    name: str
    """As of a role."""
    url: str
    path_key: str
    """Names `url`, as that of a role names a path."""
    output: str
    """`LOGPROBS` or `SCORES`."""
    source: str = ""
    """As of a role."""
    computes: str = ""
    """As of a role."""
    top_k: int = 0
    """Likeliest tokens that it gives for a divergence over the vocabulary."""

    @property
    def server(self) -> ModelServer:
        """Its client."""
        return model_server(self.url, self.path_key, self.output)


def servers_of(config: Config) -> tuple[ServerSpec, ...]:
    """Return the frozen models of a run that are on servers."""
    a, url = config.algorithm, config.reward_model.url
    servers = [ServerSpec(REWARD_MODEL, url, "reward.model.url", SCORES)] if url is not None else []
    computes = TEACHER_LOGPROBS if a.reads_teacher_logprobs else ""
    top_k = a.teacher.top_k if a.vocabulary_divergence is not None else 0
    for source, one in a.teacher.urls.items() if config.task.trains else ():
        name, key = _of_source("teacher", source, "_"), _of_source(TEACHER_URL, source, ".")
        servers.append(ServerSpec(name, one, key, LOGPROBS, source, computes, top_k))
    return tuple(servers)


def _of_source(name: str, source: str, joint: str) -> str:
    return f"{name}{joint}{source}" if source else name


def policy_role(
    config: Config,
    optimizer: OptimizerConfig | None = None,
    skipped_steps: int = 0,
    updates_per_step: int | None = None,
) -> RoleSpec:
    """Return the trained policy.

    Args:
        optimizer: None: `trainer.policy.optimizer`.
        updates_per_step: None: as `trainer.mini_batch_size` and `trainer.update_epochs` say.
    """
    t = config.trainer
    return RoleSpec(
        "policy",
        trained=True,
        saved=True,
        section="trainer.policy",
        sharding=t.policy.fsdp,
        optimizer=optimizer or t.policy.optimizer,
        lora=t.policy.lora,
        skipped_steps=skipped_steps,
        updates_per_step=updates_per_step or t.train_batch_size // t.mini_batch_size * t.update_epochs,
    )


def like_policy(config: Config, section: Any) -> OptimizerConfig:
    """Return the optimizer of the policy with the keys of another section, such as its own `lr`."""
    return dataclasses.replace(config.trainer.policy.optimizer, **vars(section))


def critic_role(config: Config) -> RoleSpec:
    """Return the trained critic: as the policy, but for its head, its initial weights and its learning rate."""
    path, own = config.trainer.critic.path, policy_role(config, like_policy(config, config.trainer.critic.optimizer))
    key = POLICY_KEY if path is None else "trainer.critic.path"
    return dataclasses.replace(own, name="critic", path=path, path_key=key, head=VALUE, computes="values")


def reference_role(config: Config, moves: bool = True) -> RoleSpec:
    """Return the reference: the initial policy, or with `algorithm.ref_sync_interval` the policy of a later step."""
    policy, interval = config.trainer.policy, config.algorithm.ref_sync_interval
    is_copied = moves and interval > 0
    return RoleSpec(
        "reference",
        saved=is_copied,
        computes="ref_logprobs",
        section="trainer.policy",
        sharding=policy.fsdp,
        sync_interval=interval if is_copied else None,
        is_policy_base=policy.lora.rank is not None and not is_copied,
    )


def teacher_roles(config: Config) -> list[RoleSpec]:
    """Return the frozen teachers of on-policy distillation on the ranks: one, or one for each source of the data."""
    a = config.algorithm
    return [
        RoleSpec(
            _of_source("teacher", source, "_"),
            path,
            computes=TEACHER_LOGPROBS if a.reads_teacher_logprobs else "",
            section="trainer.policy",
            sharding=config.trainer.policy.fsdp,
            path_key=_of_source(TEACHER_KEY, source, "."),
            source=source,
            read_by="policy" if a.vocabulary_divergence is not None else "",
        )
        for source, path in a.teacher.paths.items()
    ]


def check_roles(roles: Sequence[RoleSpec]) -> None:
    """Check that the roles of a task can be told apart.

    Raises:
        UserError: the first is not the policy, or two have one name, one key or one array.
    """
    if not roles or roles[0].name != "policy":
        raise UserError(f"the roles of the task are {[role.name for role in roles]}; the first must be the policy")
    for role, other in itertools.combinations(roles, 2):
        if role.name == other.name:
            raise UserError(f"two roles of the task have the name {role.name}; give them different names")
        if role.computes and role.computes == other.computes and role.source == other.source:
            raise UserError(f"the roles {role.name} and {other.name} both compute {role.computes}; rename one")
        if role.path_key == other.path_key and role.path != other.path:
            raise UserError(
                f"the roles {role.name} and {other.name} have different paths, {role.path} and {other.path}, and one "
                f"key, {role.path_key}; a resume compares their weights by the key, so give each its own"
            )


def policy_gradient_roles(config: Config) -> tuple[RoleSpec, ...]:
    """Return the roles of a policy gradient: the policy; a critic and a reference if a function reads them; the
    reward model, if one gives the rewards; and the teacher."""
    reads = config.algorithm.reads
    has_critic = "values" in reads
    roles = [policy_role(config, skipped_steps=config.trainer.critic.warmup_steps if has_critic else 0)]
    if has_critic:
        roles.append(critic_role(config))
    if "ref_logprobs" in reads:
        roles.append(reference_role(config))
    if (path := config.reward_model.path) is not None:
        key, fsdp = "reward.model.path", config.trainer.policy.fsdp
        roles.append(RoleSpec(REWARD_MODEL, path, SCORE, section="trainer.policy", sharding=fsdp, path_key=key))
    return (*roles, *teacher_roles(config))


def preference_roles(config: Config) -> tuple[RoleSpec, ...]:
    """Return the policy, and its initial weights as the reference, if the loss has one."""
    policy = policy_role(config)
    return (policy,) if config.dpo.loss_type == SIMPO else (policy, reference_role(config, moves=False))


KEY = "trainer.task"
OPTIONS = "algorithm.options"
_OF_OTHER_COMMANDS = ("inference.*", "plan.*")
"""Keys of `trainer inference` and `trainer plan`, which no task reads."""
ACCURACY = "val/accuracy"


class Metric(NamedTuple):
    """What a metric is. The rest is for the metrics that a task declares."""

    meaning: str
    unit: str
    better: str = ""
    """`min` or `max`, if lower or higher values are better."""
    panel: str = ""
    """Title of the panel of the report that draws it. Metrics with one title share a panel."""
    watched: bool = False
    """The first steps after a resume, and after a failure, are compared with the steps before in this metric."""


@dataclass(frozen=True)
class TaskSpec:
    """One kind of training."""

    build: str | Callable[[Config], Any]
    """Returns the `Task` (`trainer.tasks.Task`) that a config describes; or the import path of such a function, or the
    name of a built-in task, which `trainer.tasks` builds."""
    total_steps: str = "trainer.total_steps"
    """The key with the number of steps."""
    longest: str = "sft.max_length"
    """The key with the most tokens of a row, unless engines sample the rows."""
    rows_of_group: int = 0
    """The rows of a group, of which a step has `trainer.train_batch_size`, unless engines sample them. 0: a step fills
    `sft.batch_size` rows."""
    optimizer: str = "trainer.policy.optimizer"
    """The section with the optimizer of the policy."""
    best: str = ""
    """The metric that `val/accuracy` stands for in `trainer.best_metric`, one of `metrics`. Empty: the task measures
    accuracy."""
    objective: str | type = "policy_gradient"
    """`policy_gradient`, `cross_entropy`, a class like `trainer.objectives.Objective`, or its import path. The driver
    and each rank build one."""
    roles: Callable[[Config], tuple[RoleSpec, ...]] | None = None
    """Returns the models of a run, the policy first. None: the policy alone."""
    generates: bool = False
    """Inference engines sample its episodes."""
    trains: bool = True
    """Ranks hold the models of its roles. False: no rank is started."""
    reward_functions: bool = True
    """The functions of `reward.name` give the rewards, unless there is an environment. False: a scorer of the task
    gives them, or all are 0. Then `reward.name` is not read, and no function is tried before the start."""
    unused: tuple[str, ...] = ()
    """Patterns of further keys that the task does not read. They may change when a run resumes, a section of which no
    key is read is not checked, and an override of such a key is refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its own, with their defaults. `+algorithm.options.NAME=VALUE` sets one, and the objective reads it in
    `Objective.options`. A resume keeps them, also where `unused` covers `algorithm.*`."""
    may_change: tuple[str, ...] = ()
    """Patterns of further keys that may change when a run resumes."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys by their dotted names, where the user sets none and no group sets another than the schema's."""
    unused_with_path: tuple[str, ...] = ()
    """Further such patterns if `model.path` is set."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The metrics of this task alone, by name."""

    def roles_of(self, config: Config) -> tuple[RoleSpec, ...]:
        """Return the models of the run that the config describes, the policy first."""
        if self.roles is None:
            return (policy_role(config, like_policy(config, value_of(config, self.optimizer))),)
        roles = self.roles(config)
        check_roles(roles)
        return roles

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Check `algorithm.options`.

        Raises:
            UserError: an option of the task has a value of another type than its default; or neither the task nor, as
                it does not read the section `algorithm`, a function has such an option.
        """
        for name in given.keys() & self.options.keys():
            value, default = given[name], self.options[name]
            kinds = (float, int) if type(default) is float else (type(default),)
            if default is not None and type(value) not in kinds:
                raise UserError(f"{OPTIONS}.{name}={value}: must be a value like its default, {default}")
        unknown = [name for name in given if name not in self.options]
        if unknown and self.options and matches("algorithm.", self.unused):
            meant = did_you_mean(unknown[0], self.options) or f"the options are {', '.join(self.options)}"
            raise UserError(f"{OPTIONS}.{unknown[0]}={given[unknown[0]]}: the task has no such option; {meant}")

    def compared_by(self, metric: str) -> tuple[str, str]:
        """Return the metric that `trainer.best_metric` names, and its mode (`max` or `min`)."""
        if self.best and metric == ACCURACY:
            return self.best, self.metrics[self.best].better
        return metric.removeprefix("-"), "min" if metric.startswith("-") else "max"

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of all keys that the task never reads."""
        return (*self.unused, *_OF_OTHER_COMMANDS, *(() if self.reward_functions else ("reward.name",)))

    @property
    def watched(self) -> tuple[str, ...]:
        """Its own metrics that are watched after a resume."""
        return tuple(name for name, metric in self.metrics.items() if metric.watched)

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics of training that the display shows before those of all tasks."""
        own = dict.fromkeys((*self.watched, *([self.best] if self.best and not self.best.startswith("val/") else [])))
        has_loss = self.generates or any(name.endswith("/loss") for name in own)
        return tuple(own) if has_loss else ("policy/loss", *own)


_LOSS, _PAIRS, _REWARDS = "Held-out loss", "Pairs", "Rewards of pairs"
_OF_PAIRS = ("dpo.*", "rm.*", "data.chosen_key", "data.rejected_key", "data.margin_key")
"""Keys of tasks whose data are pairs of answers."""
_OF_ENGINES = ("algorithm.*", "rollout.*", "reward.*", "environment.*", "trainer.critic.*", "data.val_sets*")
"""Keys that no task reads whose data are there before the run."""
_OF_PROMPTS = ("data.curriculum", "data.mix.*.curriculum", "data.mix.*.replay")
_NOT_OF_PAIRS = (*_OF_ENGINES, *_OF_PROMPTS, "sft.*", "data.*answer_key", "data.*messages_key")


def _held_out(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return metrics with those of held-out rows."""
    held_out = {
        f"val/{name}": Metric(f"`{name}` of the held-out pairs.", one.unit, one.better, one.panel)
        for name, one in metrics.items()
    }
    return {**metrics, **held_out}


_VAL_LOSS = {
    "val/loss": Metric(
        "The run's own loss of held-out rows: cross-entropy of the tokens to train on (`sft`), or the loss of pairs "
        "(`dpo`, `rm`).",
        "nats",
        "min",
        _LOSS,
    )
}
_REWARDS_OF_PAIRS = {
    "rewards/chosen": Metric("Mean reward of the chosen answers.", "reward", "", _REWARDS),
    "rewards/rejected": Metric("Mean reward of the rejected answers.", "reward", "", _REWARDS),
    "rewards/accuracies": Metric(
        "Pairs whose chosen answer has the higher reward. A reward is the score of a reward model, or `dpo.beta` times "
        "the log-ratio of policy and reference, with `simpo` times the mean log-prob of the tokens.",
        "share",
        "max",
        _PAIRS,
        watched=True,
    ),
    "rewards/margins": Metric("Mean difference of the two rewards of a pair.", "reward", "max", _REWARDS),
}
TASKS: dict[str, TaskSpec] = {
    "rl": TaskSpec("rl", roles=policy_gradient_roles, generates=True, unused=_OF_PAIRS, unused_with_path=("sft.*",)),
    "sft": TaskSpec(
        "sft",
        objective="cross_entropy",
        # The policy makes one optimizer step in each step.
        roles=lambda config: (policy_role(config, like_policy(config, config.sft.optimizer), updates_per_step=1),),
        total_steps="sft.steps",
        optimizer="sft.optimizer",
        best="val/loss",
        unused=(
            *_OF_ENGINES,
            *_OF_PROMPTS,
            *_OF_PAIRS,
            *(f"trainer.policy.optimizer.{name}" for name in ("lr", "scheduler", "warmup_steps", "schedule_steps")),
            "trainer.*_batch_size",
            "trainer.update_epochs",
            "trainer.total_steps",
        ),
        may_change=("sft.steps",),
        metrics={
            "sft/loss": Metric(
                "Cross-entropy of the tokens to train on (supervised training).", "nats", "min", _LOSS, watched=True
            ),
            "sft/kl": Metric("KL of the policy that sampled the rollouts to the model, with `sft.max_weight`.", "nats"),
            "sft/clip_frac": Metric("Tokens whose importance weight was cut at `sft.max_weight`.", "share"),
            **_VAL_LOSS,
        },
    ),
    "dpo": TaskSpec(
        "dpo",
        objective="dpo",
        roles=preference_roles,
        longest="dpo.max_length",
        rows_of_group=2,
        best="val/loss",
        unused=(*_NOT_OF_PAIRS, "rm.*", "data.margin_key"),
        metrics=_VAL_LOSS
        | _held_out(
            {
                **_REWARDS_OF_PAIRS,
                "logps/chosen": Metric("Mean log-prob of the chosen answers, summed over their tokens.", "nats"),
                "logps/rejected": Metric("Mean log-prob of the rejected answers, summed over their tokens.", "nats"),
                "dpo/sft_loss": Metric("Cross-entropy of the chosen answers, with `dpo.sft_coef`.", "nats", "min"),
            }
        ),
    ),
    "rm": TaskSpec(
        "rm",
        objective="reward_model",
        # A trained reward model is the policy for all that loops over roles.
        roles=lambda config: (dataclasses.replace(policy_role(config), head=SCORE),),
        longest="rm.max_length",
        rows_of_group=2,
        best="val/loss",
        unused=(*_NOT_OF_PAIRS, "dpo.*"),
        defaults={"trainer.policy.optimizer.lr": 1e-5},
        metrics=_VAL_LOSS
        | _held_out(
            {
                **_REWARDS_OF_PAIRS,
                "rm/accuracy": Metric("The same as `rewards/accuracies`, by TRL's name.", "share", "max"),
                "rm/margin": Metric("The same as `rewards/margins`, by TRL's name.", "reward", "max"),
                "rm/mean_reward": Metric("Mean score of all answers.", "reward"),
                "rm/min_reward": Metric("Lowest score of an answer in a mini-batch.", "reward"),
                "rm/max_reward": Metric("Highest score of an answer in a mini-batch.", "reward"),
            }
        ),
    ),
}
"""The built-in tasks, by the name that `trainer.task` gives them."""


_added: dict[str, Callable[[], TaskSpec]] = {}


def add_task(path: str, load: Callable[[], TaskSpec]) -> None:
    """Make a task known whose module cannot be imported yet; `load` returns it."""
    _added[path] = load


@functools.cache
def find_task(name: str) -> TaskSpec:
    """Return the task that `trainer.task` names.

    Raises:
        UserError: there is none.
    """
    if name in TASKS:
        return TASKS[name]
    if name in _added:
        import_numpy()
        with user_code(f"{KEY}={name}: cannot be imported ({{}})"):
            spec: Any = _added[name]()
    else:
        spec = import_function(name, KEY, known=TASKS)
    if not isinstance(spec, TaskSpec):
        raise UserError(f"{KEY}={name}: is a {type(spec).__name__}; it must be a trainer.tasks.TaskSpec")
    if spec.best and spec.best not in spec.metrics:
        raise UserError(f"{KEY}={name}: its `best` is {spec.best}, which its `metrics` do not declare")
    if spec.best and spec.metrics[spec.best].better not in ("min", "max"):
        problem = f"its `metrics` do not say whether a high or a low {spec.best} is better"
        raise UserError(f"{KEY}={name}: {problem}")
    return spec
