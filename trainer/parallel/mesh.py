"""Process group and device mesh of the ranks."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def pick_device(device: str) -> str:
    """`cuda` or `cpu` for the setting `trainer.device`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


_listening: dict[str, socket.socket] = {}


def listen(host: str, port: int = 0) -> str:
    """Reserve the port on which this process will host a store; returns its address, `host:port`.

    torch alone would listen on all interfaces of the machine; this socket is bound to that of `host`.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        reserved.listen()  # else another process could take it as well; who connects early waits
    except OSError:
        reserved.close()
        raise
    address = f"{host}:{reserved.getsockname()[1]}"
    _listening[address] = reserved
    return address


def open_store(address: str, is_host: bool, world_size: int, timeout_s: float) -> dist.Store:
    """The key-value store through which the members of a group find each other.

    Args:
        address: `file:///path`, for members on one machine: it has no port that others could reach; or
            `host:port`, which the host listens on (`listen` reserves one that is free).
    """
    if address.startswith("file://"):
        store = dist.FileStore(address.removeprefix("file://"), world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    host, _, port = address.rpartition(":")
    if is_host and address not in _listening:
        listen(host, int(port))
    reserved = {"master_listen_fd": _listening.pop(address).detach()} if is_host else {}
    return dist.TCPStore(
        host,
        int(port),
        is_master=is_host,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        **reserved,
    )


def init_process_group(rank: int, world_size: int, address: str, device: str, timeout_s: float) -> None:
    """Join the ranks' process group, whose store is at `address` (see `open_store`).

    On CUDA tensors in host memory (offloaded shards, small metrics) go over gloo, the rest over NCCL.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=open_store(address, rank == 0, world_size, timeout_s),
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
