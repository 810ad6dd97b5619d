"""The axes of the mesh of ranks, the part of the data that each rank computes, and sums over the data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.parallel.collectives import AxisGroup


class Layout:
    """The ranks of the process group as a mesh of the axes `replicate`, `shard`, `context` and `tensor`.

    `replicate` and `shard` are data parallelism: ranks along them compute different rows of a batch. `context` splits
    the tokens of a micro-batch, and `tensor` the matrices of a layer: ranks along these two compute the same rows.
    Weights are sharded over `shard` and `context` together, and replicated over `replicate`. Ranks are numbered with
    `tensor` as the fastest axis.

    Args:
        device: `cpu` or `cuda`.
        replicas, context, tensor: sizes of `replicate`, `context` and `tensor`. Their product must divide the number
            of ranks.
    """

    def __init__(self, device: str, replicas: int = 1, context: int = 1, tensor: int = 1):
        world_size = dist.get_world_size()
        assert world_size % (replicas * context * tensor) == 0, (world_size, replicas, context, tensor)
        self.device = device
        self.rank = dist.get_rank()
        shards = world_size // (replicas * context * tensor)
        self.sizes = {"replicate": replicas, "shard": shards, "context": context, "tensor": tensor}

        axes = {"replicate": replicas, "shard": shards * context, "tensor": tensor}
        axes = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.tensor_mesh: DeviceMesh | None = mesh["tensor"] if tensor > 1 else None
        self.fsdp_mesh: DeviceMesh = mesh[tuple(name for name in axes if name != "tensor")] if tensor > 1 else mesh
        self.context = self._context_group() if context > 1 else None

    def _context_group(self) -> AxisGroup:
        """Return the ranks that hold the other tokens of this rank's micro-batches. A collective."""
        size = self.sizes["context"]
        ranks = torch.arange(dist.get_world_size()).view(-1, size, self.sizes["tensor"])
        group, _ = dist.new_subgroups_by_enumeration(ranks.transpose(1, 2).reshape(-1, size).tolist())
        assert group is not None
        return AxisGroup(group, dist.get_rank(group), size)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks: a batch is split into this many parts."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def dp_rank(self) -> int:
        """Index of this rank along the data-parallel axes."""
        return self.rank // self.ranks_per_dp_rank

    @property
    def ranks_per_dp_rank(self) -> int:
        """Number of ranks that compute the same rows."""
        return self.sizes["context"] * self.sizes["tensor"]

    @property
    def is_main_rank(self) -> bool:
        """Whether the driver uses the result of this rank where all ranks have the same result."""
        return self.rank == 0

    @property
    def is_first_of_dp_rank(self) -> bool:
        """Whether the driver uses the result of this rank where all ranks with the same rows have the same result."""
        return self.rank % self.ranks_per_dp_rank == 0

    def describe(self) -> dict[str, object]:
        """Return how weights are sharded, for the checkpoint."""
        return {
            "world_size": dist.get_world_size(),
            "data_size": self.dp_size,
            "mesh_shape": list(self.fsdp_mesh.mesh.shape),
            "mesh_dim_names": list(self.fsdp_mesh.mesh_dim_names or ()),
        }

    def sum_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the data-parallel ranks. A collective. All ranks must pass the same names.

        Ranks that compute the same rows must pass the same values, which count once.
        """
        names = sorted(values)
        total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        if not self.is_first_of_dp_rank:
            total.zero_()
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))
