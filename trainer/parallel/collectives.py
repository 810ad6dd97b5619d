"""Collectives with gradients, for ranks that compute parts of the same micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Peers:
    """The ranks along one axis, which all compute the same loss from parts of it."""

    group: dist.ProcessGroup
    rank: int
    """The number of this rank among them."""
    size: int

    @classmethod
    def along(cls, mesh: DeviceMesh) -> Peers:
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


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
