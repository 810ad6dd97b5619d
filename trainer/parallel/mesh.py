"""The ranks: their devices, stores and process groups, and the mesh that says which rows and shards each has."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.metadata import Distribution, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config.engines import EngineSpec
from trainer.import_utils import user_code
from trainer.parallel.axes import AXES
from trainer.parallel.collectives import AxisGroup
from trainer.process.startup import importing


def pick_device(device: str, engine: EngineSpec | None) -> str:
    """Return `cuda` or `cpu` for the value of `trainer.device`. With `auto`, no GPU is used if the installed build of
    this engine cannot use it. Raises UserError: a torchvision is installed that was built for another torch.
    transformers and vLLM would import it."""
    check_torchvision()
    if device != "auto":
        return device
    name = engine.cpu_distribution if engine is not None else None
    is_cpu_build = name is not None and any(Distribution.discover(name=name))
    return "cuda" if torch.cuda.is_available() and not is_cpu_build else "cpu"


def check_torchvision(is_needed: bool = False) -> None:
    """Refuse a torchvision that was built for another torch: transformers and vLLM would import it. The import takes
    seconds. So it is tried only if a model needs it, or if the labels of the two builds differ."""
    refusal = "torchvision: cannot be imported with this torch ({}); uninstall it with `pip uninstall torchvision`, or "
    own, _, build = version("torch").partition("+")
    for found in Distribution.discover(name="torchvision"):
        pins = [pin[1] for line in found.requires or () if (pin := re.match(r"torch *\(?== *([^\s;)]+)", line))]
        label = found.version.partition("+")[2]  # a build of PyPI has none, and is for CUDA
        with importing(), user_code(f"{refusal}install its build for this torch"):
            if pins and own not in pins:
                raise ImportError(f"{found.version} is for torch {pins[0]}, and torch is {own}")
            if is_needed or label != build and ("cpu" in (label, build) or label and build):
                import_module("torchvision")


_listening: dict[str, socket.socket] = {}


def listen(host: str, port: int = 0) -> str:
    """Reserve the port (0: a free one) on which this process will host a store. Return its address, `host:port`.

    torch alone would listen on all interfaces of the machine. This socket listens only on the interface of `host`.
    Raises OSError: the port is not available."""
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
    """Open the key-value store through which the ranks of a process group find each other: `file:///path` for ranks on
    one machine (other users cannot reach it through a port), or `host:port`, where the host listens (see `listen`)."""
    if address.startswith("file://"):
        store = dist.FileStore(address.removeprefix("file://"), world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    host, _, port = address.rpartition(":")
    if is_host and address not in _listening:
        listen(host, int(port))
    reserved = {"master_listen_fd": _listening.pop(address).detach()} if is_host else {}
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=timeout_s), **reserved}
    return dist.TCPStore(host, int(port), is_master=is_host, **options)


def init_process_group(rank: int, world_size: int, address: str, device: str, timeout_s: float) -> None:
    """Join the process group of the ranks, whose store is at `address` (see `open_store`). With CUDA, tensors in host
    memory (offloaded shards, small metrics) go over gloo and all others over NCCL."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=open_store(address, rank == 0, world_size, timeout_s),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class SideGroup:
    """A second gloo group of all ranks, through which a thread can communicate while the ranks train."""

    def __init__(self) -> None:
        self.handle = dist.new_group(backend="gloo")
        self.rank = dist.get_rank(self.handle)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self.handle)
        dist.all_gather_object(values, value, group=self.handle)
        return values


class Layout:
    """The ranks of the process group as a mesh of `AXES`, with sizes as of `axis_sizes`.

    FSDP2 shards weights over `fsdp_mesh`: over `dp_shard` and `cp` together. `dp_replicate` holds copies of the shards.
    Each position along another axis, such as `tp`, has an `fsdp_mesh` of its own.
    """

    def __init__(self, device: str, sizes: Mapping[str, int]):
        assert math.prod(sizes.values()) == dist.get_world_size(), sizes
        self.device = device
        self.rank = dist.get_rank()
        self.sizes = dict(sizes)
        used = [name for name in AXES if sizes[name] > 1]
        copied = [name for name in used if not AXES[name].same_rows and not AXES[name].shards_weights]
        sharded = [name for name in AXES if AXES[name].shards_weights and (name in used or not AXES[name].key)]
        others = [name for name in used if AXES[name].same_rows and not AXES[name].shards_weights]
        fsdp = [names for names in (copied, sharded) if names]
        dims = {"_".join(names): math.prod(sizes[name] for name in names) for names in (*fsdp, *([o] for o in others))}
        mesh = init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
        self.fsdp_mesh: DeviceMesh = mesh[tuple(dims)[: len(fsdp)]] if others else mesh
        self.tp_mesh: DeviceMesh | None = mesh["tp"] if sizes["tp"] > 1 else None
        self.cp: AxisGroup | None = None
        if sizes["cp"] > 1:
            ranks = torch.arange(dist.get_world_size()).view([sizes[name] for name in AXES])
            lines = ranks.movedim(list(AXES).index("cp"), -1).reshape(-1, sizes["cp"])
            group, _ = dist.new_subgroups_by_enumeration(lines.tolist())
            assert group is not None
            self.cp = AxisGroup(group, dist.get_rank(group), sizes["cp"])
        sharing = math.prod(sizes[name] for name in AXES if AXES[name].same_rows)
        self.dp_size = dist.get_world_size() // sharing
        """Number of data-parallel ranks: a batch is split into this many parts."""
        self.dp_rank = self.rank // sharing
        self.is_main_rank = self.rank == 0  # whether the driver uses this rank's result where all have the same
        self.is_first_of_dp_rank = self.rank % sharing == 0
        """The same where all ranks with the same rows have the same result."""

    def describe(self) -> dict[str, object]:
        return {
            "world_size": dist.get_world_size(),
            "dp_size": self.dp_size,
            "mesh_shape": list(self.fsdp_mesh.mesh.shape),
            "mesh_dim_names": list(self.fsdp_mesh.mesh_dim_names or ()),
        }

    def sum_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the data-parallel ranks. A collective. All ranks must pass the same names.
        Ranks that compute the same rows must pass the same values, which count once."""
        own = values if self.is_first_of_dp_rank else dict.fromkeys(values, 0.0)
        return _reduced(own, dist.ReduceOp.SUM)

    def max_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Return the largest of each value over all ranks. A collective. All ranks must pass the same names."""
        return _reduced(values, dist.ReduceOp.MAX)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return a rank's share of a loss, scaled so that gradients are summed: FSDP2 averages them over its mesh."""
        return loss * self.fsdp_mesh.size()

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[Tensor], limit: float) -> float:
        """Clip the gradients to a global norm (0: do not clip), and return the norm before. A collective.

        The numbers are those of `torch.nn.utils.clip_grad_norm_`, from the shards: for lists of DTensors, torch first
        works out how each operation is sharded, which takes most of the time of a rank's first step.
        """
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert grads and all(hasattr(grad, "to_local") for grad in grads), "the module is sharded"
        shards, mesh = [grad.to_local() for grad in grads], grads[0].device_mesh
        norms = torch.stack(torch._foreach_norm(shards))
        for dim in range(mesh.ndim):
            copies = [mesh.size(dim) if grad.placements[dim].is_replicate() else 1 for grad in grads]
            if min(copies) == 1:
                squares = (norms / norms.new_tensor(copies).sqrt()) ** 2
                dist.all_reduce(squares, group=mesh.get_group(dim))
                norms = squares**0.5
        norm = torch.linalg.vector_norm(norms)
        if limit > 0:
            torch._foreach_mul_(shards, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return float(norm)


def _reduced(values: dict[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
    names = sorted(values)
    numbers = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(numbers, operation)
    return dict(zip(names, numbers.tolist(), strict=True))
