"""The devices, stores and process groups of the ranks."""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.engines import EngineSpec


def pick_device(device: str, engine: EngineSpec | None) -> str:
    """Return `cuda` or `cpu` for the value of `trainer.device`.

    Args:
        engine: with `auto`, a GPU is not used if the installed build of this engine cannot use it. None: no
            engine runs.
    """
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and not _is_cpu_build(engine) else "cpu"


def _is_cpu_build(engine: EngineSpec | None) -> bool:
    if engine is None or engine.cpu_distribution is None:
        return False
    try:
        distribution(engine.cpu_distribution)
    except PackageNotFoundError:
        return False
    return True


_listening: dict[str, socket.socket] = {}


def listen(host: str, port: int = 0) -> str:
    """Reserve the port on which this process will host a store. Return its address, `host:port`.

    torch alone would listen on all interfaces of the machine. This socket listens only on the interface of `host`.

    Args:
        port: TCP port. 0: a free port.

    Raises:
        OSError: the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        reserved.listen()  # keeps other processes from using the port; early connections wait in the queue
    except OSError:
        reserved.close()
        raise
    address = f"{host}:{reserved.getsockname()[1]}"
    _listening[address] = reserved
    return address


def open_store(address: str, is_host: bool, world_size: int, timeout_s: float) -> dist.Store:
    """Open the key-value store through which the ranks of a process group find each other.

    Args:
        address: `file:///path` for ranks on one machine (other users cannot reach a file store through a port), or
            `host:port`, where the host listens (`listen` reserves a free port).
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
    """Join the process group of the ranks, whose store is at `address` (see `open_store`).

    With CUDA, tensors in host memory (offloaded shards, small metrics) go over gloo and all others over NCCL.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=open_store(address, rank == 0, world_size, timeout_s),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def destroy_process_group() -> None:
    """Leave the process group if this process belongs to one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class SideGroup:
    """A second gloo group of all ranks, through which a thread can communicate while the ranks train."""

    def __init__(self) -> None:
        self.handle = dist.new_group(backend="gloo")
        self.rank = dist.get_rank(self.handle)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank. A collective."""
        values: list[Any] = [None] * dist.get_world_size(self.handle)
        dist.all_gather_object(values, value, group=self.handle)
        return values
