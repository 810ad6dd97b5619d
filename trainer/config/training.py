"""`trainer.policy`, `trainer.critic`, `trainer.reference`: how each model is trained and sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import (
    HARMLESS,
    ResumeRule,
    SavedRun,
    Section,
    changed_keys,
    choice,
    config_error,
    number,
    setting,
    subsection,
    walk_keys,
)

if TYPE_CHECKING:
    from trainer.config.schema import Config


@dataclass
class OptimizerConfig(Section):
    lr: float = number(1e-6, at_least=0, resume="update")
    """Peak learning rate of AdamW."""
    betas: list[float] = setting(default_factory=lambda: [0.9, 0.999], resume="update")
    """AdamW's decay rates of the first and second moment."""
    eps: float = number(1e-8, above=0, resume="update")
    """AdamW's epsilon."""
    weight_decay: float = number(0.0, at_least=0, resume="update")
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = number(1.0, at_least=0, resume="update")
    """Gradients are clipped to this global norm. 0: no clipping."""
    scheduler: str = choice("constant", ("constant", "cosine"), resume="update")
    """Learning rate after warm-up: `constant`, or `cosine` (decays to `min_lr_ratio` over `schedule_steps`)."""
    warmup_steps: int = number(0, at_least=0, resume="update")
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = number(0.1, at_least=0, at_most=1, resume="update")
    """Learning rate at the end of `cosine`, as a share of `lr`."""
    schedule_steps: int | None = number(
        None,
        at_least=1,
        resume=ResumeRule(
            "update", "the learning rate of every step goes by it (null: the number of steps of the run)"
        ),
    )
    """Steps of the run after which `cosine` has ended; later steps keep its last value. null: the steps of the run
    (`trainer.total_steps`, `sft.steps`). With a number, a run can be extended without changing the schedule."""

    def check_values(self, config: Config, name: str) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise config_error(config, f"{name}.betas", "must be two numbers, each at least 0 and below 1")


@dataclass
class ShardingConfig(Section):
    param_dtype: str = choice("auto", ("auto", "bfloat16", "float32"), resume="rollouts")
    """Precision of parameters in forward and backward passes: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16`
    or `float32`. The optimizer always keeps float32 master weights. bfloat16 is faster on CPUs with matrix units."""
    reshard_after_forward: bool | None = setting(None, resume="harmless")
    """Free a block's gathered parameters after its forward pass, which takes less memory. An update then gathers them
    twice for each micro-batch. false: they stay, and are gathered once for a mini-batch. null: false on GPUs if each
    rank has all weights, all of them are trained, and `cpu_offload` is off; else true."""
    cpu_offload: bool = setting(False, resume="rounding")
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    prefetch: int | None = number(None, at_least=0, resume="rounding")
    """Number of blocks whose parameters are gathered while the block before them computes. A higher number hides a
    slower network, and takes the memory of as many blocks. 0: torch decides, which gathers one block ahead, but in
    forward passes as late as it can. null: 1 on CUDA if the weights are sharded over several ranks, else 0."""
    compile: bool | None = setting(None, resume="rounding")
    """Compile the blocks and the softmax with `torch.compile`: faster passes, but the first ones wait for the compiler.
    null: on CUDA without `trainer.context_parallel_size`, `trainer.tensor_parallel_size` and `trainer.deterministic`;
    not on CPU. true is refused with tensor parallelism, and with `trainer.deterministic`: what a kernel is compiled to
    depends on the sizes that a process meets first."""


CHECKPOINTING_OF_BOOL = {"True": "full", "False": "none"}
"""What `activation_checkpointing` meant when it was true or false."""


@dataclass
class FSDPConfig(ShardingConfig):
    reduce_dtype: str = choice("float32", ("float32", "bfloat16"), resume="rollouts")
    """Precision in which gradients are summed over ranks: `float32` or `bfloat16`."""
    reduce_gradients: str = choice("micro_batch", ("micro_batch", "mini_batch"), resume="rounding")
    """When gradients are summed over ranks: after each `micro_batch`, or once per `mini_batch` (less communication, but
    each rank keeps all gradients in `reduce_dtype`, however many ranks there are)."""
    activation_checkpointing: str = choice("none", ("none", "selective", "full"), resume="rounding")
    """Which activations of a block the backward pass computes again instead of keeping them: `none`, `selective` (all
    but the results of matrix products and of attention: little work, about half of the memory) or `full` (all: about a
    third more work, least memory). true and false mean `full` and `none`."""

    def __post_init__(self) -> None:
        mode = str(self.activation_checkpointing)
        self.activation_checkpointing = CHECKPOINTING_OF_BOOL.get(mode.capitalize(), mode)


@dataclass
class LoraConfig(Section):
    rank: int | None = number(
        None, at_least=1, resume=ResumeRule("never", "the saved adapters have another shape", ("weights", "optimizer"))
    )
    """Rank of the low-rank adapters that are trained while the weights stay frozen (LoRA, Hu et al., 2021). null:
    train all weights."""
    alpha: float = number(32, above=0, resume="rollouts")
    """Scale of the adapters: their product is multiplied by `alpha / rank`."""
    target_modules: list[str] = setting(
        default_factory=list,
        resume=ResumeRule("never", "the saved adapters belong to other layers", ("weights", "optimizer")),
    )
    """Names of the linear layers that get adapters, such as `q_proj`. Empty: all linear layers of the blocks."""

    def check_values(self, config: Config, name: str) -> None:
        if self.rank is None:
            for key in changed_keys(self, LoraConfig(), name):
                raise config_error(config, key, f"needs {name}.rank")


@dataclass
class PolicyConfig(Section):
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    """Optimizer of the policy."""
    lora: LoraConfig = subsection(LoraConfig)
    """Adapters of the policy."""
    fsdp: FSDPConfig = subsection(FSDPConfig)
    """Sharding of the policy."""


@dataclass
class CriticConfig(Section):
    path: str | None = setting(None, resume="update")
    """Initial weights of the critic's backbone: a Hugging Face id or a directory. null: those of the policy."""
    optimizer: OptimizerConfig = subsection(lambda: OptimizerConfig(lr=5e-6))
    """Optimizer of the critic."""
    lora: LoraConfig = subsection(LoraConfig)
    """Adapters of the critic. Its value head is always trained in full."""
    warmup_steps: int = number(0, at_least=0, resume="update")
    """First steps of the run in which only the critic is trained."""
    fsdp: FSDPConfig = subsection(FSDPConfig)
    """Sharding of the critic."""

    def check_values(self, config: Config, name: str) -> None:
        if self.warmup_steps >= config.trainer.total_steps:
            problem = f"leaves no step of trainer.total_steps={config.trainer.total_steps} for the policy"
            raise config_error(config, f"{name}.warmup_steps", problem)
        changed = changed_keys(self, CriticConfig(), name)
        if changed and not any(role.name == "critic" for role in config.roles):
            estimator = config.algorithm.advantage_estimator
            for key in changed:
                raise config_error(
                    config,
                    key,
                    f"algorithm.advantage_estimator={estimator} has no critic; choose algorithm=ppo or drop the key",
                )

    def resume_rules(self, config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
        if "critic" in saved.roles and any(role.name == "critic" for role in config.roles):
            return {}
        return {key: HARMLESS for key, *_ in walk_keys(self)}  # no critic is restored


@dataclass
class ReferenceConfig(Section):
    fsdp: ShardingConfig = subsection(ShardingConfig)
    """Sharding of the reference."""

    def check_values(self, config: Config, name: str) -> None:
        changed = changed_keys(self, ReferenceConfig(), name)
        if not changed:
            return
        reference = next((role for role in config.roles if role.name == "reference"), None)
        if reference is None:
            problem = "there is no reference model with algorithm.kl_coef=0; raise it or drop the key"
        elif reference.is_policy_base:
            problem = "with trainer.policy.lora the policy without its adapters is the reference; drop the key"
        else:
            return
        for key in changed:
            raise config_error(config, key, problem)
