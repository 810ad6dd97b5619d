"""Shard a model with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.config import FSDPConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def param_dtype(config_dtype: str, device: str) -> torch.dtype:
    """Return the dtype for the config value `auto`, `float32` or `bfloat16` on `device`."""
    if config_dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return _DTYPES[config_dtype]


def shard_model(
    model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, trained_whole: bool, uncast: Sequence[nn.Module] = ()
) -> None:
    """Turn the parameters of `model` into DTensors over `mesh`, in place. Each block is an FSDP unit, the rest another.

    The model may be on the meta device. Parameters stay float32, because they are the optimizer's master weights. The
    mixed-precision policy casts them for forward and backward, but for those of the modules `uncast`, each a unit.
    """
    shards, device = mesh.size(mesh.ndim - 1), mesh.device_type
    frees = frees_after_forward(config, device, shards, trained_whole)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if config.cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "reshard_after_forward": frees, "offload_policy": offload}
    dtype = param_dtype(config.param_dtype, device)
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    as_stored = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = transformer_blocks(model)
    for module in uncast:
        fully_shard(module, mp_policy=as_stored, **options)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=cast, **options)
    if (depth := prefetch_depth(device, shards)) > 0:
        _prefetch(model, blocks, depth)


def frees_after_forward(config: FSDPConfig, device: str, shards: int, trained_whole: bool) -> bool:
    """Return whether a block's gathered parameters are freed after its forward pass, and after each backward pass.

    A rank that has all of a parameter (one of `shards`) has nothing to gather, but FSDP copies it. On a GPU that takes
    as long as the products of a small model. The copies are small beside the optimizer's state, but as large as frozen
    weights.
    """
    if config.reshard_after_forward is not None:
        return config.reshard_after_forward
    return device == "cpu" or shards > 1 or config.cpu_offload or not trained_whole


def prefetch_depth(device: str, shards: int) -> int:
    """Return how many blocks ahead of use FSDP gathers parameters of so many shards. 0: torch decides."""
    return 1 if device == "cuda" and shards > 1 else 0


def _prefetch(model: nn.Module, blocks: list[nn.Module], depth: int) -> None:
    """Let each FSDP unit prefetch the `depth` units that run after it, in the forward and the backward pass. The unit
    of `model` itself (embeddings, output layer) runs around the blocks. It is gathered first in both passes."""
    forward, backward = [model, *blocks], [model, *reversed(blocks)]
    for i in range(len(forward)):
        forward[i].set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + depth])
        backward[i].set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + depth])


def reshard(model: nn.Module) -> None:
    """Reshard the parameters, which a forward pass without a backward pass may have left unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of the model: its longest `ModuleList`."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
