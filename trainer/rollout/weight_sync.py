"""How the policy's weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import UserError


@dataclass(frozen=True)
class WeightSource:
    """Where an engine finds new weights: `path` is a directory in shared memory with safetensors files."""

    path: str


def choose(weight_sync: str, engine: str, same_node: bool) -> str:
    """The way for the setting `rollout.weight_sync`.

    Raises:
        UserError: the way cannot work for this engine or placement.
    """
    if weight_sync == "auto":
        weight_sync = "shared_memory" if same_node else "broadcast"
    if weight_sync == "shared_memory" and not same_node:
        raise UserError("rollout.weight_sync=shared_memory: the engines are not all on rank 0's node; choose broadcast")
    if weight_sync == "broadcast" and engine != "vllm":
        raise UserError(f"rollout.weight_sync=broadcast: rollout.engine={engine} takes weights through shared memory "
                        "only; use one node, or choose rollout=vllm")  # fmt: skip
    return weight_sync
