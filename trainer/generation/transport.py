"""Choose how the policy's weights reach the engines."""

from __future__ import annotations

from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES, find_engine
from trainer.errors import UserError


def choose_transport(rollout: RolloutConfig, same_node: bool, device: str = "cpu") -> str:
    """Return how weights reach the engines: `shared_memory`, `broadcast` or `ipc`.

    Args:
        same_node: all ranks and engines are on one node.
        device: of ranks and engines.

    Raises:
        UserError: what `rollout.weight_sync` asks for cannot work for this engine or placement.
    """
    weight_sync, on_gpus = rollout.weight_sync, device == "cuda"
    if weight_sync == "auto":
        # Between GPUs, NCCL is much faster than host memory, but it cannot join two processes on one GPU.
        fast = "ipc" if rollout.colocate else "broadcast"
        if on_gpus and fast in find_engine(rollout.engine).transports:
            weight_sync = fast
        else:
            weight_sync = "shared_memory" if same_node else "broadcast"
    if weight_sync == "ipc" and not (on_gpus and rollout.colocate):
        raise UserError(
            "rollout.weight_sync=ipc: weights go from rank to engine within one GPU, and they share none; choose auto, "
            "or rollout.colocate=true on GPUs"
        )
    if weight_sync == "shared_memory" and not same_node:
        raise UserError(
            "rollout.weight_sync=shared_memory: ranks and engines are on several nodes; choose auto or broadcast"
        )
    if weight_sync not in find_engine(rollout.engine).transports:
        able = " or ".join(name for name, spec in ENGINES.items() if weight_sync in spec.transports)
        raise UserError(
            f"rollout.weight_sync={weight_sync}: rollout.engine={rollout.engine} takes weights through "
            f"{' or '.join(find_engine(rollout.engine).transports)} only; use one node, or choose rollout={able}"
        )
    if weight_sync == "broadcast" and rollout.colocate:
        raise UserError(
            "rollout.weight_sync=broadcast: NCCL cannot join a rank and an engine on one GPU; use one node, or choose "
            "rollout.colocate=false"
        )
    return weight_sync
