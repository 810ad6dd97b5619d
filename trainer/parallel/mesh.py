"""Process group and device mesh of the ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def pick_device(device: str) -> str:
    """`cuda` or `cpu` for the setting `trainer.device`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def init_process_group(rank: int, world_size: int, address: str, device: str, timeout_s: float) -> None:
    """Join the ranks' process group at `address` (`host:port`).

    On CUDA tensors in host memory (offloaded shards, small metrics) go over gloo, the rest over NCCL.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def build_mesh(device: str, replicas: int) -> DeviceMesh:
    """All ranks as one `shard` axis (FSDP), or as `replicate` x `shard` (HSDP) for several replicas."""
    world_size = dist.get_world_size()
    assert world_size % replicas == 0, (world_size, replicas)
    if replicas == 1:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Each value summed over all ranks; every rank must pass the same names."""
    names = sorted(values)
    total = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
