"""`trainer.policy`, `trainer.critic`: how the models are trained and sharded.

The critic and the reference are sharded as the policy, and the critic is trained as the policy, with its own learning
rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.fields import (
    ResumeRule,
    Section,
    choice,
    number,
    setting,
    subsection,
)

SCHEDULE_STEPS = ResumeRule(
    "update", "the learning rate of every step goes by it (null: the number of steps of the run)"
)


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
        resume=SCHEDULE_STEPS,
    )
    """Steps of the run after which `cosine` has ended; later steps keep its last value. null: the steps of the run
    (`trainer.total_steps`, `sft.steps`). With a number, a run can be extended without changing the schedule."""


@dataclass
class FSDPConfig(Section):
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
    reduce_dtype: str = choice("float32", ("float32", "bfloat16"), resume="rollouts")
    """Precision in which gradients are summed over ranks: `float32` or `bfloat16`."""
    activation_checkpointing: str = choice("none", ("none", "selective", "full"), resume="rounding")
    """Which activations of a block the backward pass computes again instead of keeping them: `none`, `selective` (all
    but the results of matrix products and of attention: little work, about half of the memory) or `full` (all: about a
    third more work, least memory)."""


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


@dataclass
class PolicyConfig(Section):
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    """Optimizer of the policy, and of the critic but for the learning rate."""
    lora: LoraConfig = subsection(LoraConfig)
    """Adapters of the policy and of the critic, whose value head is always trained in full."""
    fsdp: FSDPConfig = subsection(FSDPConfig)
    """Sharding of all models."""


@dataclass
class CriticOptimizerConfig(Section):
    lr: float = number(5e-6, at_least=0, resume="update")
    """Peak learning rate of the critic. The rest is as in `trainer.policy.optimizer`."""


@dataclass
class CriticConfig(Section):
    path: str | None = setting(None, resume="update")
    """Initial weights of the critic's backbone: a Hugging Face id or a directory. null: those of the policy."""
    optimizer: CriticOptimizerConfig = subsection(CriticOptimizerConfig)
    """Optimizer of the critic."""
    warmup_steps: int = number(0, at_least=0, resume="update")
    """First steps of the run in which only the critic is trained."""
