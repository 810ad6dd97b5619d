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
    """Tokens of a prompt, on average. null: half of `rollout.max_prompt_tokens`; in supervised training, of
    `sft.max_length`."""
    response_tokens: int | None = number(None, at_least=1, resume="harmless")
    """Tokens of a completion, on average. null: half of `rollout.max_response_tokens`; in supervised training, what the
    prompt leaves of `sft.max_length`."""
    host_memory_gb: float | None = number(None, above=0, resume="harmless")
    """Memory of a node's host, in GB. null: that of a usual node with these GPUs."""
    storage_gb_s: float = number(2.0, above=0, resume="harmless")
    """Speed of the storage of `trainer.ckpt_path` for one node, in GB/s."""

    def check(self, config: Config, name: str) -> None:
        if not config.task.generates:
            self._check_examples(config, name)
            return
        for mean, limit in (("prompt_tokens", "max_prompt_tokens"), ("response_tokens", "max_response_tokens")):
            most = getattr(config.rollout, limit)
            if (getattr(self, mean) or 0) > most:
                raise config_error(config, f"{name}.{mean}", f"is above the longest, rollout.{limit}={most}")

    def _check_examples(self, config: Config, name: str) -> None:
        """Refuse examples of supervised training that are longer than the longest."""
        most, used = config.sft.max_length, 0
        for key in ("prompt_tokens", "response_tokens"):
            used += getattr(self, key) or 0
            if getattr(self, key) and used > most:
                raise config_error(config, f"{name}.{key}", f"makes examples longer than sft.max_length={most}")
