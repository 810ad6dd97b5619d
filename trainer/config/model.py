"""`model.*`, and how the models are trained and sharded: critic and reference as the policy, but for the learning
rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.fields import ResumeRule, Section, setting, subsection

_OTHER_MODEL = ResumeRule("never", "the saved weights belong to another model", ("weights", "optimizer"))


SEED_OF_TINY = 1
"""Seed of the random weights of the built-in model and of the order of its warm start, whatever `trainer.seed` is: runs
of several seeds start from one model."""
LONGEST_OF_TINY = 4096
"""Tokens of the longest sequence of the built-in model."""


@dataclass
class TinyConfig(Section):
    hidden_size: int = setting(128, at_least=32, resume=_OTHER_MODEL)
    """Width. A head has 32 numbers, and the MLP has three times the width."""
    num_layers: int = setting(2, at_least=1, resume=_OTHER_MODEL)
    """Number of blocks."""
    # A resume compares the initial weights where a checkpoint depends on them, so the key itself is harmless.
    start_accuracy: float | None = setting(0.7, above=0, at_most=1, resume="harmless")
    """The warm start ends when the model answers this share of 128 training prompts exactly, and at the latest after
    `sft.steps`: reinforcement learning needs answers to improve. null: always after `sft.steps`."""


@dataclass
class ModelConfig(Section):
    path: str | None = setting(
        None, resume=ResumeRule("rollouts", "the saved weights belong to that model", ("weights", "optimizer"))
    )
    """Hugging Face id or directory of a causal LM. null: build the built-in Qwen3 of `model.tiny`, warm it up with
    supervised steps (see `sft`) and cache it."""
    tiny: TinyConfig = subsection(TinyConfig)
    """Shape of the built-in model."""
    cache_dir: str | None = setting(None, resume="harmless")
    """Directory of the built-in models that were built and warmed up, one directory per configuration, and of the
    verdicts on models (`check`). null: the
    environment variable TRAINER_CACHE, or `~/.cache/trainer`."""
    attn_implementation: str = setting("sdpa", choices=("sdpa", "eager", "flash_attention_2"), resume="rollouts")
    """Attention of the trainer's models. `sdpa`: torch's kernels, each packed sequence by itself; a class without them
    that cannot pack has its own attention, and one sequence a row. `flash_attention_2`: the package flash-attn.
    `eager`: plain matrices, whose size is the square of all tokens of a micro-batch."""
    check: str = setting("refuse", choices=("refuse", "accept"), resume="harmless")
    """What happens if the comparison before the first step finds that the ranks compute something else than the model's
    own class in transformers: `refuse` the run, or `accept` it. That is said at each start and in each checkpoint's
    manifest. The verdict is kept in `cache_dir`."""
    trust_remote_code: bool = setting(False, resume="rollouts")
    """Allow the model directory to run its own Python code."""
    chat_template: str | None = setting(None, resume="rollouts")
    """A Jinja file that replaces the tokenizer's chat template, or the name of one of its templates if there are
    several. null: `tool_use` for chats with tools, and `default` for the others."""
    chat_template_kwargs: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="rollouts")
    """Variables of the chat template. Qwen3: `{enable_thinking: false}` lets the model answer without thinking first.
    Exported models keep them in their chat template."""


SCHEDULE_STEPS = ResumeRule(
    "update", "the learning rate of every step goes by it (null: the number of steps of the run)"
)


@dataclass
class OptimizerConfig(Section):
    name: str = setting(
        "adamw", resume=ResumeRule("never", "the saved moments belong to another optimizer", ("optimizer",))
    )
    """`adamw`, `muon` (linear layers of the blocks and experts; AdamW has the rest), or the import path of a function
    that gets the named parameters, `lr`, `weight_decay` and `options`, and returns a torch optimizer."""
    options: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="update")
    """Options of the optimizer. `muon`: `momentum` (0.95), `nesterov` (true), `ns_steps` (5), `adamw_lr` (`lr`)."""
    lr: float = setting(1e-6, at_least=0, resume="update")
    """Peak learning rate."""
    betas: list[float] = setting(default_factory=lambda: [0.9, 0.999], resume="update")
    """AdamW's decay rates of the first and second moment."""
    eps: float = setting(1e-8, above=0, resume="update")
    """AdamW's epsilon."""
    weight_decay: float = setting(0.0, at_least=0, resume="update")
    """Decoupled weight decay."""
    max_grad_norm: float = setting(1.0, at_least=0, resume="update")
    """Gradients are clipped to this global norm. 0: no clipping."""
    scheduler: str = setting("constant", choices=("constant", "cosine"), resume="update")
    """Learning rate after warm-up: `constant`, or `cosine` (decays to `min_lr_ratio` over `schedule_steps`)."""
    warmup_steps: int = setting(0, at_least=0, resume="update")
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = setting(0.1, at_least=0, at_most=1, resume="update")
    """Learning rate at the end of `cosine`, as a share of `lr`."""
    schedule_steps: int | None = setting(
        None,
        at_least=1,
        resume=SCHEDULE_STEPS,
    )
    """Steps of the run after which `cosine` has ended; later steps keep its last value. null: the steps of the run
    (`trainer.total_steps`, `sft.steps`). With a number, a run can be extended without changing the schedule."""


@dataclass
class FSDPConfig(Section):
    param_dtype: str = setting("auto", choices=("auto", "bfloat16", "float32"), resume="rollouts")
    """Precision of parameters in forward and backward passes: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16`
    or `float32`. The optimizer always keeps float32 master weights. bfloat16 is faster on CPUs with matrix units."""
    reshard_after_forward: bool | None = setting(None, resume="harmless")
    """Free a block's gathered parameters after its forward pass, which takes less memory. An update then gathers them
    twice for each micro-batch. false: they stay, and are gathered once for a mini-batch. null: false on GPUs if each
    rank has all weights, all of them are trained, and `cpu_offload` is off; else true."""
    cpu_offload: bool = setting(False, resume="rounding")
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    compile: bool | None = setting(None, resume="rounding")
    """Compile the blocks and the softmax with `torch.compile`: faster passes, but the first ones wait for the compiler.
    null: on CUDA without `trainer.context_parallel_size`, `trainer.tensor_parallel_size` and `trainer.deterministic`;
    not on CPU. true is refused with these three. With `trainer.deterministic`, because what a kernel is compiled to
    depends on the sizes that a process meets first."""
    activation_checkpointing: str = setting("none", choices=("none", "selective", "full"), resume="rounding")
    """Which activations of a block the backward pass computes again instead of keeping them: `none`, `selective` (all
    but the results of matrix products and of attention: little work, about half of the memory) or `full` (all: about a
    third more work, least memory)."""


@dataclass
class LoraConfig(Section):
    rank: int | None = setting(
        None, at_least=1, resume=ResumeRule("never", "the saved adapters have another shape", ("weights", "optimizer"))
    )
    """Rank of the low-rank adapters that are trained while the weights stay frozen (LoRA, Hu et al., 2021). null:
    train all weights."""
    alpha: float = setting(32, above=0, resume="rollouts")
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
    lr: float = setting(5e-6, at_least=0, resume="update")
    """Peak learning rate of the critic. The rest is as in `trainer.policy.optimizer`."""


@dataclass
class CriticConfig(Section):
    path: str | None = setting(None, resume="update")
    """Initial weights of the critic's backbone: a Hugging Face id or a directory. null: those of the policy."""
    optimizer: CriticOptimizerConfig = subsection(CriticOptimizerConfig)
    """Optimizer of the critic."""
    warmup_steps: int = setting(0, at_least=0, resume="update")
    """First steps of the run in which only the critic is trained."""
