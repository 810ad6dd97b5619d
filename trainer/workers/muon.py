"""Muon: each matrix moves along the nearest orthogonal matrix of its momentum (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.parallel.collectives import divide_work
from trainer.parallel.shard import transformer_blocks

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUTERS = ("gate", "router")
_FUSED = ("qkv", "in_proj", "query_key_value", "c_attn", "kv_a_proj", "kv_b_proj")
"""Names of layers whose rows belong to several projections, in an order that only the model's code knows."""
_MOST_WHOLE = 8  # most matrices that a rank has whole at a time

Split = Callable[[Tensor], Sequence[Tensor]]
"""Returns views `(…, m, n)` of the matrices that are fused in a tensor of a parameter's shape."""


def muon_matrices(module: nn.Module) -> dict[nn.Parameter, Split]:
    """Return the trained matrices of the blocks, and how each is split: linear layers, and experts. Embeddings, heads,
    norms, biases, routers, convolutions, adapters and fused projections of unknown order are none."""
    embeddings = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    found = [pair for block in transformer_blocks(module) for pair in _matrices_of(block)]
    return {matrix: split for matrix, split in found if matrix.requires_grad and matrix not in embeddings}


def _whole(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


def _matrices_of(block: nn.Module) -> Iterator[tuple[nn.Parameter, Split]]:
    for path, layer in block.named_modules():
        name = path.rpartition(".")[2]
        if hasattr(layer, "is_concatenated") and hasattr(layer, "is_transposed"):  # experts of transformers
            for own, parameter in layer.named_parameters(recurse=False):
                if parameter.ndim == 3 and own == "gate_up_proj" and layer.has_gate:
                    yield parameter, _halves(layer.is_concatenated, -1 if layer.is_transposed else -2)
                elif parameter.ndim == 3:
                    yield parameter, _whole
        elif not isinstance(layer, nn.Linear) or "lora_" in path or name in _ROUTERS or name.endswith("_gate"):
            continue
        elif name == "gate_up_proj":
            yield layer.weight, _halves(True, -2)
        elif name == "qkv_proj" and sum(rows := _attention_rows(block, layer)) == layer.out_features:
            yield layer.weight, lambda tensor, rows=rows: tensor.split(rows, dim=-2)
        elif name == "q_proj" and _attention_rows(block, layer)[:1] not in ([], [layer.out_features]):
            continue  # each head's query is followed by its gate
        elif not any(fused in name for fused in _FUSED):
            yield layer.weight, _whole


def _halves(is_concatenated: bool, dim: int) -> Split:
    if is_concatenated:
        return lambda tensor: tensor.chunk(2, dim)
    return lambda tensor: [tensor.unflatten(dim, (-1, 2)).select(dim, i) for i in range(2)]


def _attention_rows(block: nn.Module, layer: nn.Linear) -> list[int]:
    """Return the rows of the queries, keys and values of the attention that has `layer`; empty: they are not known."""
    owner = next(m for m in block.modules() if any(child is layer for child in m.children()))
    config, width = getattr(owner, "config", None), getattr(owner, "head_dim", None)
    if config is None or width is None:
        return []
    return [config.num_attention_heads * width, *[config.num_key_value_heads * width] * 2]


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Return about the nearest (semi-)orthogonal matrices of `matrices` `(…, m, n)`, with singular values near 1. Each
    is U V' of the singular value decomposition U S V', by a quintic iteration (Jordan et al., Muon, 2024)."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with the scale of AdamW's updates, so that AdamW's learning rate stays usable (Liu et al., Moonlight, 2025).

    With gradient g: m = lerp(g, m, momentum); u = lerp(g, m, momentum) with `nesterov`, else m; the parameter becomes
    `(1 - lr * weight_decay) * parameter - lr * 0.2 * sqrt(max(rows, columns)) * newton_schulz(u)`. Rows and columns
    are those of each matrix, whatever is fused or stacked with it. A matrix is computed whole, on one of the ranks that
    hold it, so the result does not depend on their number. Momentum is float32. Momentum is computed on the raw (or
    clipped) gradient, before the iteration.

    Args:
        device: where matrices are computed: `cpu` in float32, `cuda` in bfloat16.
    """

    def __init__(
        self,
        matrices: Mapping[nn.Parameter, Split],
        device: str,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ):
        self._splits = dict(matrices)
        self._device = device
        values = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(list(matrices), {"lr": lr, **values})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient. Collective over the ranks that hold them."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, direction in self._directions(parameters, group):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32)}

    def _directions(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters with the scaled directions of their updates, which are sharded as they are."""
        by_axis: dict[tuple[DeviceMesh, int] | None, list[Tensor]] = {}
        for parameter in parameters:
            by_axis.setdefault(_sharding_axis(parameter), []).append(parameter)
        for axis, of_axis in by_axis.items():
            ranks = None if axis is None else axis[0].get_group(axis[1])
            size = 1 if axis is None else min(axis[0].size(axis[1]), _MOST_WHOLE)
            for first in range(0, len(of_axis), size):
                some = of_axis[first : first + size]
                updates = [self._momentum(parameter, group) for parameter in some]
                wholes = [_gathered(update, self._device) for update in updates]
                compute = partial(self._orthogonal, [self._splits[parameter] for parameter in some], group["ns_steps"])
                results = [compute(0, wholes[0])] if ranks is None else divide_work(compute, wholes, ranks)
                for parameter, update, result in zip(some, updates, results, strict=True):
                    yield parameter, _sharded_as(update, result).to(parameter.device)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            state |= self.initial_state(parameter)
        gradient, buffer = parameter.grad.float(), state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _orthogonal(self, splits: Sequence[Split], steps: int, index: int, whole: Tensor) -> Tensor:
        dtype, split = torch.bfloat16 if self._device == "cuda" else torch.float32, splits[index]
        result = torch.empty_like(whole)
        for source, target in zip(split(whole), split(result), strict=True):
            scale = 0.2 * math.sqrt(max(source.shape[-2:]))
            target.copy_(newton_schulz(source.to(dtype), steps) * scale if source.numel() else source)
        return result


def _sharding_axis(parameter: Tensor) -> tuple[DeviceMesh, int] | None:
    """Return the mesh and its dimension over which matrices are cut, so that its ranks can divide the work. None: each
    rank computes the matrices that it has whole, or (cut along several dimensions) all."""
    if not isinstance(parameter, DTensor) or _has_whole_matrices(parameter):
        return None
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return (parameter.device_mesh, sharded[0]) if len(sharded) == 1 else None


def _has_whole_matrices(update: DTensor) -> bool:
    """Return whether each rank has whole matrices: the tensor is not sharded, or only along its experts."""
    return all(p.is_replicate() or (update.ndim == 3 and type(p) is Shard and p.dim == 0) for p in update.placements)


def _gathered(update: Tensor, device: str) -> Tensor:
    """Return the matrices of an update that this rank may compute, on `device`: all, or those that it has whole."""
    if not isinstance(update, DTensor):
        return update.to(device)
    local = update.to_local().to(device)
    if _has_whole_matrices(update):
        return local
    shape, stride = update.shape, update.stride()
    return DTensor.from_local(local, update.device_mesh, update.placements, shape=shape, stride=stride).full_tensor()


def _sharded_as(like: Tensor, result: Tensor) -> Tensor:
    """Return `result`, computed from `_gathered(like)`, sharded as `like` is. No communication."""
    if not isinstance(like, DTensor):
        return result
    mesh, placements = like.device_mesh, like.placements
    if _has_whole_matrices(like):
        return DTensor.from_local(result, mesh, placements, shape=like.shape, stride=like.stride())
    if any(not placement.is_replicate() and type(placement) is not Shard for placement in placements):
        whole = DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)
    return distribute_tensor(result, mesh, placements, src_data_rank=None)
