"""`sft.*`: supervised training, and the warm start of the built-in model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import Section, choice, config_error, number, setting, subsection, value_of
from trainer.config.training import OptimizerConfig

if TYPE_CHECKING:
    from trainer.config.schema import Config


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
    optimizer: OptimizerConfig = subsection(lambda: OptimizerConfig(lr=2e-3, warmup_steps=10))
    """Optimizer of supervised training."""

    def check_values(self, config: Config, name: str) -> None:
        files = config.data.train_files + [file for source in config.data.mix.values() for file in source.files]
        if self.source == "rollouts" and not files:
            problem = "needs data.train_files, the files that logger.save_rollouts=true makes a run write"
            raise config_error(config, "sft.source", problem)
        for key in ("sft.min_reward", "sft.max_weight"):
            if self.source != "rollouts" and value_of(config, key) is not None:
                raise config_error(config, key, "is for rollouts; set sft.source=rollouts or drop the key")
