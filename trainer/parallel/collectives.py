"""Collectives with gradients, for ranks that compute parts of the same micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis, which all compute the same loss from parts of it."""

    group: dist.ProcessGroup
    rank: int
    """The number of this rank among them."""
    size: int

    @classmethod
    def along(cls, mesh: DeviceMesh) -> AxisGroup:
        """Return the ranks of a mesh with one axis."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of all peers.

        All peers compute the same with it, so the gradient of each part is the gradient of the sum.
        """
        return _Total.apply(part, self.group)

    def shared(self, whole: Tensor) -> Tensor:
        """Return `whole`, of which each peer computes another part of the result.

        The gradients of all peers are added up.
        """
        return _Shared.apply(whole, self.group)

    def highest(self, values: Tensor) -> Tensor:
        """Return the highest value of all peers at each place, without gradients."""
        highest = values.detach().clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        return highest

    def exchange(self, parts: Tensor) -> Tensor:
        """Send `parts[i]` to peer i; returns what came from each peer, in their order."""
        if torch.compiler.is_compiling():
            return _opaque_exchange(parts, self.group.group_name)
        return _Exchange.apply(parts, self.group)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


@torch.library.custom_op("trainer::exchange", mutates_args=())
def _opaque_exchange(parts: Tensor, group: str) -> Tensor:
    """Compute `_Exchange` as one operator, into which `torch.compile` does not look: it would split the graph there."""
    return _exchange(parts, _resolve_process_group(group))


@_opaque_exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return parts.new_empty(parts.shape)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


_opaque_exchange.register_autograd(
    lambda ctx, grad: (_opaque_exchange(grad, ctx.group), None), setup_context=_keep_group
)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
