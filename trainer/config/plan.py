"""`plan.*`: the cluster and the workload for which `trainer plan` computes memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import Section, config_error, number, setting

if TYPE_CHECKING:
    from trainer.config.schema import Config


@dataclass
class PlanConfig(Section):
    gpus: str = setting("cpu", resume="harmless")
    """Cluster to plan for: `8xH100` (one node of eight), `4x8xH100` (four such nodes), or `cpu`, this machine."""
    prompt_tokens: int | None = number(None, at_least=1, resume="harmless")
    """Tokens of a prompt, on average. null: half of `rollout.max_prompt_tokens`."""
    response_tokens: int | None = number(None, at_least=1, resume="harmless")
    """Tokens of a completion, on average. null: half of `rollout.max_response_tokens`."""
    host_memory_gb: float | None = number(None, above=0, resume="harmless")
    """Memory of a node's host, in GB. null: that of a usual node with these GPUs."""
    storage_gb_s: float = number(2.0, above=0, resume="harmless")
    """Speed of the storage of `trainer.ckpt_path` for one node, in GB/s."""

    def check(self, config: Config, name: str) -> None:
        for mean, limit in (("prompt_tokens", "max_prompt_tokens"), ("response_tokens", "max_response_tokens")):
            most = getattr(config.rollout, limit)
            if (getattr(self, mean) or 0) > most:
                raise config_error(config, f"{name}.{mean}", f"is above the longest, rollout.{limit}={most}")
