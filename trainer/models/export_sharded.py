"""Write sharded modules as Hugging Face safetensors. Each rank writes its own shards.

The layout of a safetensors file follows from names, shapes and dtype. Rank 0 creates the files at full size. Then every
rank writes its shards at their offsets, without a gather and without a second copy of the model. Experts, which are
stacked in memory, are written one by one. Exports and the weight sync through shared memory both use this writer.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import _TYPES
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.models.heads import score_name
from trainer.models.lora import adapters_of, full_tensor, hugging_face_name
from trainer.models.weight_names import FileUnit, file_tensors, file_units, whole_units
from trainer.parallel.shard import reshard

T = TypeVar("T")
MAX_FILE_BYTES = 5 * 10**9  # Hugging Face's own shard size
_DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """The position of one tensor in the files."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class FileLayout:
    """The headers and sizes of the files, and the entry of every tensor."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    entries: dict[str, TensorEntry]

    def create(self, directory: str) -> None:
        """Create the files at their full size; if there are several, also the index, which has the file of each."""
        os.makedirs(directory, exist_ok=True)
        for file, header in self.headers.items():
            with open(os.path.join(directory, file), "wb", opener=_open_without_links) as out:
                out.write(header)
                out.truncate(self.sizes[file])
        if len(self.headers) > 1:
            total = sum(self.sizes.values()) - sum(map(len, self.headers.values()))
            weight_map = {name: entry.file for name, entry in self.entries.items()}
            with open(os.path.join(directory, "model.safetensors.index.json"), "w") as index:
                json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)

    @contextmanager
    def opened(self, directory: str) -> Iterator[Callable[[str, tuple[int, ...], Tensor], None]]:
        """Open the files that `create` has made. Yield a function that writes a block of a tensor at its place.

        Its arguments are the name of the tensor, the indices of the first element of the block, and the block.
        """
        handles: dict[str, int] = {}

        def write(name: str, first: tuple[int, ...], block: Tensor) -> None:
            entry = self.entries[name]
            if entry.file not in handles:
                handles[entry.file] = _open_without_links(os.path.join(directory, entry.file), os.O_WRONLY)
            _write_block(handles[entry.file], entry, first, block)

        try:
            yield write
        finally:
            for handle in handles.values():
                os.close(handle)


def export_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a model's files hold: parameters (tied ones once) and persistent buffers, without adapters.

    The names are those in the module, except that of a head (`score.weight`). See `trainer.models.weight_names` for
    those in the files.
    """
    reshard(module)
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        file_name = hugging_face_name(name)
        if file_name is not None:
            tensors[score_name(file_name)] = parameter.detach()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        if name not in parameters:
            tensors[name] = value
    return tensors


def merged_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `export_tensors` one by one, with their adapters merged. A collective with adapters."""
    adapters = adapters_of(module)
    for name, tensor in export_tensors(module).items():
        yield name, adapters[name].merged_into(tensor) if name in adapters else tensor


def plan_layout(tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES, stem: str = "model") -> FileLayout:
    """Assign the tensors, in order, to files of at most `max_file_bytes` of data. A larger one has a file of its own.

    Args:
        stem: what the names of the files begin with.
    """
    groups = in_groups({name: tensor_bytes(tensor) for name, tensor in tensors.items()}, max_file_bytes)
    headers, sizes, layout = {}, {}, {}
    for number, names in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{stem}{part}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        starts = {}
        for name in names:
            starts[name], end = begin, begin + tensor_bytes(tensors[name])
            entries[name] = {
                "dtype": _DTYPE_NAMES[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        sizes[file] = len(headers[file]) + begin
        for name in names:
            start = len(headers[file]) + starts[name]
            layout[name] = TensorEntry(file, start, tuple(tensors[name].shape), tensors[name].dtype)
    return FileLayout(headers, sizes, layout)


def in_groups(sizes: Mapping[T, int], most: int) -> list[list[T]]:
    """Divide things, in order, into groups of at most `most` bytes, or of one thing that is larger.

    Args:
        sizes: bytes of each.
    """
    groups: list[list[T]] = [[]]
    used = 0
    for thing, size in sizes.items():
        if groups[-1] and used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(thing)
        used += size
    return groups


def write_safetensors(module: nn.Module, directory: str, dtype: torch.dtype) -> list[str]:
    """Write the weights of `module` to `directory`: adapters merged, floating-point tensors as `dtype`. A collective.

    All ranks must see the same directory. Returns the names of the files.
    """
    weights = export_tensors(module)
    units = file_units(module, weights)
    layout = plan_layout(file_tensors(units, weights, dtype))
    if dist.get_rank() == 0:
        layout.create(directory)
    dist.barrier()
    with layout.opened(directory) as write:
        for unit, parts in whole_units({unit: unit.names for unit in units}, merged_tensors(module)):
            for name, first, block in _own_blocks(unit, parts, dtype):
                write(name, first, block)
    dist.barrier()
    return sorted(layout.headers)


def stream_tensors(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the complete tensor of what `write_safetensors` writes. Each `next` may be a collective."""
    units = file_units(module, export_tensors(module))
    for unit, parts in whole_units({unit: unit.names for unit in units}, merged_tensors(module)):
        yield from _complete(unit, parts, dtype)


def file_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the size in bytes of the files that `write_safetensors` writes. Not a collective."""
    weights = export_tensors(module)
    return sum(plan_layout(file_tensors(file_units(module, weights), weights, dtype)).sizes.values())


def _own_blocks(
    unit: FileUnit, weights: dict[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield what this rank writes: the name of a tensor in the files, the indices of the first element, and a block.

    A collective if the unit has a converter and is not split by rows.
    """
    tensor = next(iter(weights.values()))
    if unit.converter is None:
        if (shard := _local_shard(tensor)) is not None:
            yield unit.first, *shard
    elif unit.is_by_rows and _has_whole_rows(tensor):
        if (shard := _local_shard(tensor)) is not None:
            (row, *_), rows = shard
            for name, part in unit.rows_to_files(rows, row, tensor.shape):
                yield name, (0,) * part.dim(), part
    else:
        for name, part in _complete(unit, weights, dtype):
            if dist.get_rank() == 0:
                yield name, (0,) * part.dim(), part


def _complete(unit: FileUnit, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a unit in the files. A collective."""
    # The cast is before the gather, to halve the traffic (bfloat16).
    whole = {name: full_tensor(weight.to(unit.stored_dtype(weight, dtype))) for name, weight in weights.items()}
    if unit.is_by_rows:
        (rows,) = whole.values()
        yield from unit.rows_to_files(rows, 0, rows.shape)
    else:
        yield from unit.to_files(whole).items()


def _has_whole_rows(tensor: Tensor) -> bool:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return all(isinstance(placement, Replicate) or placement == Shard(0) for placement in placements)


def _local_shard(tensor: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Return the indices of the first element of this rank's shard, and the shard.

    A shard is some rows, or some columns of some rows. None: another rank writes the shard, or it is empty.
    """
    if not isinstance(tensor, DTensor):
        return ((0,) * tensor.dim(), tensor) if dist.get_rank() == 0 else None
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) and mesh.get_local_rank(axis) != 0:  # the first replica writes
            return None
    local = tensor.to_local()
    assert local.shape[2:] == tensor.shape[2:], f"a tensor of shape {tensor.shape} is placed as {tensor.placements}"
    if local.numel() == 0:
        return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return tuple(offset), local


def _write_block(handle: int, entry: TensorEntry, first: tuple[int, ...], block: Tensor) -> None:
    """Write a block of a tensor, whose first element has the indices `first`, at its offset in the file."""
    strides = [math.prod(entry.shape[axis + 1 :]) * entry.dtype.itemsize for axis in range(len(entry.shape))]
    start = entry.offset + sum(index * stride for index, stride in zip(first, strides, strict=True))
    block = block.to(entry.dtype)  # on the device, because a combined copy and cast would cast on the CPU
    content = block.to("cpu").contiguous().view(-1).view(torch.uint8)
    data = memoryview(np.from_dlpack(content))  # with `numpy()`, weights on CPU could not be offloaded any more
    # A block of complete rows is contiguous in the file. In other blocks, only each row is.
    runs = 1 if block.shape[1:] == entry.shape[1:] else len(block)
    size = len(data) // runs
    for run in range(runs):
        _write_all(handle, data[run * size : (run + 1) * size], start + (run * strides[0] if run else 0))


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
