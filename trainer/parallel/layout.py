"""The axes of the mesh of ranks, the share of the data of each rank, and sums over these shares."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Layout:
    """The ranks of the process group as a mesh of the axes `replicate`, `shard`, `context` and `tensor`.

    `replicate` and `shard` split the data and are FSDP's: weights are sharded over `shard` and repeated over
    `replicate`. `context` would split sequences and `tensor` matrices; both have size 1. Ranks are numbered with
    `tensor` as the fastest axis.

    Args:
        device: `cpu` or `cuda`.
        replicas: size of `replicate`; it divides the number of ranks.
    """

    def __init__(self, device: str, replicas: int):
        world_size = dist.get_world_size()
        assert world_size % replicas == 0, (world_size, replicas)
        self.device = device
        self.rank = dist.get_rank()
        self.sizes = {"replicate": replicas, "shard": world_size // replicas, "context": 1, "tensor": 1}

        axes = ["shard"] if replicas == 1 else ["replicate", "shard"]
        shape = tuple(self.sizes[axis] for axis in axes)
        self.fsdp_mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=tuple(axes))

    @property
    def data_size(self) -> int:
        """Number of shares into which a batch is split."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def data_rank(self) -> int:
        """The share of this rank."""
        return self.rank // (self.sizes["context"] * self.sizes["tensor"])

    @property
    def reports(self) -> bool:
        """Whether the driver uses the result of this rank where all ranks have the same result."""
        return self.rank == 0

    def describe(self) -> dict[str, object]:
        """Return how weights are sharded, for the checkpoint."""
        return {
            "world_size": self.fsdp_mesh.size(),
            "mesh_shape": list(self.fsdp_mesh.mesh.shape),
            "mesh_dim_names": list(self.fsdp_mesh.mesh_dim_names or ()),
        }

    def sum_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the shares of the data. A collective; every rank passes the same names."""
        names = sorted(values)
        total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        dist.all_reduce(total)  # over all ranks: while context and tensor have size 1, each has different data
        return dict(zip(names, total.tolist(), strict=True))
