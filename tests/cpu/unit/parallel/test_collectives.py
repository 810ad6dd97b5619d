"""Collectives and their gradients, on two ranks of gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from trainer.parallel.collectives import AxisGroup
from trainer.workers.rank import Rank


def compute(rank: Rank) -> dict[str, Any]:
    """Each collective of tensors that differ between the ranks, with its gradient."""
    axis = AxisGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    weight = torch.tensor([10.0, 1.0]) if axis.rank == 0 else torch.tensor([20.0, 2.0])

    def with_gradient(collective: str, tensor: torch.Tensor, weight: torch.Tensor) -> tuple[list, list]:
        tensor = tensor.clone().requires_grad_()
        out = getattr(axis, collective)(tensor)
        (out * weight).sum().backward()
        return out.tolist(), tensor.grad.tolist()

    own = torch.tensor([1.0, 2.0]) + 2 * axis.rank
    exchanged = torch.tensor([[1.0], [2.0]]) + 2 * axis.rank
    maximum = axis.all_reduce_max(own.requires_grad_() * torch.tensor([1.0, -1.0]))
    return {
        "rank": (axis.rank, axis.size),
        "sum": with_gradient("all_reduce", own.detach(), torch.tensor([10.0, 1.0])),
        "sum of gradients": with_gradient("all_reduce_grad", own.detach(), weight),
        "maximum": (maximum.tolist(), maximum.requires_grad),
        "exchange": with_gradient("all_to_all", exchanged, weight[:, None]),
    }


def test_values_and_gradients_of_two_ranks():
    first, second = run_ranks(2, compute)
    assert (first["rank"], second["rank"]) == ((0, 2), (1, 2))
    for result in (first, second):
        assert result["sum"] == ([4.0, 6.0], [10.0, 1.0]), "all ranks compute one loss with the sum"
        assert result["maximum"] == ([3.0, -2.0], False)
    assert first["sum of gradients"] == ([1.0, 2.0], [30.0, 3.0])
    assert second["sum of gradients"] == ([3.0, 4.0], [30.0, 3.0])
    assert first["exchange"] == ([[1.0], [3.0]], [[10.0], [20.0]])
    assert second["exchange"] == ([[2.0], [4.0]], [[1.0], [2.0]])


def along(rank: Rank) -> tuple[int, int, list[float]]:
    axis = AxisGroup.along(rank.layout.fsdp_mesh)
    return axis.rank, axis.size, axis.all_reduce(torch.ones(1)).tolist()


def test_the_ranks_along_a_mesh_are_an_axis():
    assert run_ranks(2, along) == [(0, 2, [2.0]), (1, 2, [2.0])]
