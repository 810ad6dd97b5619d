"""Collectives with gradients, for ranks that compute the same micro-batch together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis, which compute one loss together."""

    group: dist.ProcessGroup
    rank: int  # index of this rank along the axis
    size: int

    @classmethod
    def along(cls, mesh: DeviceMesh) -> AxisGroup:
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks. All ranks must compute the same with the sum, so the gradient of
        each tensor is the gradient of the sum."""
        return _AllReduce.apply(tensor, self.group)

    def all_reduce_grad(self, tensor: Tensor) -> Tensor:
        """Return `tensor` unchanged. Its gradient is the sum of the gradients of all ranks. Use it where the ranks
        compute different parts of a result from the same tensor."""
        return _AllReduceGrad.apply(tensor, self.group)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks, without gradients."""
        maximum = values.detach().clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        return maximum

    def all_to_all(self, tensors: Tensor) -> Tensor:
        """Send `tensors[i]` to rank i. Return the received tensors in the order of the ranks."""
        return _AllToAll.apply(tensors, self.group)


def divide_work(
    function: Callable[[int, Tensor], Tensor], tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return `function(i, tensors[i])`, each of the same shape and dtype as its tensor, on all ranks of `group`. Rank i
    computes the i-th result while the others compute theirs. `tensors` is overwritten. A collective."""
    rank = dist.get_rank(group)
    results = [(function(i, own) if i == rank else own).contiguous() for i, own in enumerate(tensors)]
    for i, result in enumerate(results):
        dist.broadcast(result, group=group, group_src=i)
    return results


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllReduceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensors, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_to_all(tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensors = tensors.contiguous()
    received = torch.empty_like(tensors)
    dist.all_to_all_single(received, tensors, group=group)
    return received
