"""`sft.*`: supervised training, and the warm start of the built-in model."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.fields import Section, choice, number, setting, subsection
from trainer.config.training import SCHEDULE_STEPS


@dataclass
class SFTOptimizerConfig(Section):
    lr: float = number(2e-3, at_least=0, resume="update")
    """Peak learning rate."""
    scheduler: str = choice("constant", ("constant", "cosine"), resume="update")
    """Learning rate after warm-up (see `trainer.policy.optimizer.scheduler`)."""
    warmup_steps: int = number(10, at_least=0, resume="update")
    """Optimizer steps of linear warm-up from 0."""
    schedule_steps: int | None = number(None, at_least=1, resume=SCHEDULE_STEPS)
    """Steps of the run after which `cosine` has ended (see `trainer.policy.optimizer.schedule_steps`). null:
    `sft.steps`."""


@dataclass
class SFTConfig(Section):
    steps: int = number(200, at_least=1, resume="rollouts")
    """Optimizer steps of supervised training. Most optimizer steps of the warm start of the built-in model (see
    `model.tiny.start_accuracy`)."""
    batch_size: int = number(8, at_least=1, resume="rollouts")
    """An optimizer step trains on as many whole examples as fill this many rows of `sft.max_length` tokens."""
    max_length: int = number(256, at_least=1, resume="rollouts")
    """Longest example in tokens. A longer one is cut."""
    source: str = choice("examples", ("examples", "rollouts"), resume="rollouts")
    """Content of `data.train_files`: `examples`, or `rollouts` as `logger.save_rollouts` writes them."""
    min_reward: float | None = setting(None, resume="rollouts")
    """`source=rollouts`: train only on completions with at least this reward (rejection sampling). null: all."""
    max_weight: float | None = number(None, above=0, resume="rollouts")
    """`source=rollouts`: multiply the loss of each token by its importance weight, at most this (the loss
    `importance_weighted_ce`). The weight is the token's probability under the model divided by its probability under
    the policy that sampled it. null: plain cross-entropy (distillation)."""
    optimizer: SFTOptimizerConfig = subsection(SFTOptimizerConfig)
    """Optimizer of supervised training. What it does not have is as in `trainer.policy.optimizer`."""
