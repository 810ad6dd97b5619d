"""`plan.*`: the cluster and the mean lengths for which `trainer plan` computes memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import Section, number, setting

if TYPE_CHECKING:
    from trainer.config.schema import Config


@dataclass
class PlanConfig(Section):
    gpus: str = setting("cpu", resume="harmless")
    """Cluster to plan for: `8xH100` (one node of eight), `4x8xH100` (four such nodes), or `cpu`, this machine."""
    prompt_tokens: int | None = number(None, at_least=1, resume="harmless")
    """Tokens of a prompt, on average. null: half of `rollout.max_prompt_tokens`; in supervised training, of
    `sft.max_length`."""
    response_tokens: int | None = number(None, at_least=1, resume="harmless")
    """Tokens of a completion, on average; with an environment, of all replies and messages after the prompt. null: half
    of `rollout.max_response_tokens`, or of what the prompt leaves of the longest episode; in supervised training, what
    the prompt leaves of `sft.max_length`."""

    def mean_prompt(self, config: Config) -> int:
        """Return the tokens of a prompt of a rollout, on average."""
        return self.prompt_tokens or max(1, config.rollout.max_prompt_tokens // 2)

    def most_response_tokens(self, config: Config) -> int:
        """Return the most tokens after the prompt in a rollout; with an environment, those of all turns."""
        if not any(environment.name for environment in config.environments):
            return config.rollout.max_response_tokens
        return max(1, config.longest_sequence - self.mean_prompt(config))
