"""The models of a run as data: one `RoleSpec` for the policy, the critic, the reference, a teacher, a reward model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.training import FSDPConfig, LoraConfig, OptimizerConfig
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config.schema import Config

LM, VALUE, SCORE = "lm", "value", "score"
POLICY_KEY = "model.path"


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
    scores: str = ""
    """Name of the array that the role computes for each step before the update, such as `ref_logprobs`. Empty: none."""
    section: str = ""
    """The config section of `sharding` and `lora`, for messages. Empty: the task sets them itself."""
    key: str = POLICY_KEY
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

    def __post_init__(self) -> None:
        if self.path is not None and self.key == POLICY_KEY:  # a resume would compare the policy's weights instead
            raise UserError(
                f"the role {self.name} has a path of its own, so it needs a key of its own: RoleSpec({self.name!r}, "
                f"path=..., key={self.name!r})"
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
    policy = config.trainer.policy
    return RoleSpec(
        "policy",
        trained=True,
        saved=True,
        section="trainer.policy",
        sharding=policy.fsdp,
        optimizer=optimizer or policy.optimizer,
        lora=policy.lora,
        skipped_steps=skipped_steps,
        updates_per_step=updates_per_step or _updates_per_step(config),
    )


def like_policy(config: Config, section: Any) -> OptimizerConfig:
    """Return the optimizer of the policy with the keys of another section, such as its own `lr`."""
    return dataclasses.replace(config.trainer.policy.optimizer, **vars(section))


def critic_role(config: Config) -> RoleSpec:
    """Return the trained critic."""
    policy, critic = config.trainer.policy, config.trainer.critic
    return RoleSpec(
        "critic",
        critic.path,
        VALUE,
        trained=True,
        saved=True,
        section="trainer.policy",
        sharding=policy.fsdp,
        optimizer=like_policy(config, critic.optimizer),
        lora=policy.lora,
        scores="values",
        updates_per_step=_updates_per_step(config),
        key=POLICY_KEY if critic.path is None else "trainer.critic.path",
    )


def reference_role(config: Config) -> RoleSpec:
    """Return the reference: the initial policy, or with `algorithm.ref_sync_interval` the policy of a later step."""
    t, interval = config.trainer, config.algorithm.ref_sync_interval
    is_copied = interval > 0
    is_policy_base = t.policy.lora.rank is not None and t.colocate_roles and not is_copied
    return RoleSpec(
        "reference",
        saved=is_copied,
        scores="ref_logprobs",
        section="trainer.policy",
        sharding=t.policy.fsdp,
        sync_interval=interval if is_copied else None,
        is_policy_base=is_policy_base,
    )


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
        if role.scores and role.scores == other.scores:
            raise UserError(f"the roles {role.name} and {other.name} both compute {role.scores}; rename one")
        if role.key == other.key and role.path != other.path:
            raise UserError(
                f"the roles {role.name} and {other.name} have different paths, {role.path} and {other.path}, and one "
                f"key, {role.key}; a resume compares their weights by the key, so give each its own"
            )


def _updates_per_step(config: Config) -> int:
    t = config.trainer
    return t.train_batch_size // t.mini_batch_size * t.update_epochs


def policy_gradient_roles(config: Config) -> tuple[RoleSpec, ...]:
    """Return the roles of a policy gradient: the policy, and a critic and a reference if a function reads them."""
    reads = config.algorithm.reads
    has_critic = "values" in reads
    roles = [policy_role(config, skipped_steps=config.trainer.critic.warmup_steps if has_critic else 0)]
    if has_critic:
        roles.append(critic_role(config))
    if "ref_logprobs" in reads:
        roles.append(reference_role(config))
    return tuple(roles)


def supervised_roles(config: Config) -> tuple[RoleSpec, ...]:
    """Return the role of supervised training: the policy, which makes one optimizer step in each step."""
    return (policy_role(config, like_policy(config, config.sft.optimizer), updates_per_step=1),)
