"""Write the weights of models as Hugging Face safetensors: of sharded modules, and of checkpoints without ranks.

The layout of a safetensors file follows from names, shapes and dtype. Rank 0 creates the files at full size. Then every
rank writes its shards at their offsets, without a gather and without a second copy of the model. Experts, which are
stacked in memory, are written one by one. Exports and the weight sync through shared memory both use this writer.

The policy of a checkpoint is written file by file: the weights of one file are in memory. No code in the checkpoint is
executed, and only files that its manifest contains are copied.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import _TYPES, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.files.documents import Shape
from trainer.models.checks import SCORE_HEAD, VALUE_HEAD, is_classifier, score_name
from trainer.models.export import CONFIG, WEIGHTS_ONLY, atomic_directory, with_dtype, write_files
from trainer.models.files import ADAPTER_CONFIG, check_model_files, tensors_in, weight_shapes
from trainer.models.lora import (
    adapted_weight,
    adapter_parameters,
    adapters_of,
    full_tensor,
    hugging_face_name,
    peft_name,
)
from trainer.models.weight_deltas import bits_of
from trainer.models.weight_names import FileUnit, empty_model, file_tensors, file_units, whole_units
from trainer.parallel.shard import reshard

T = TypeVar("T")
MAX_FILE_BYTES = 5 * 10**9  # Hugging Face's own shard size
_DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Region(NamedTuple):
    """Where a block of a tensor lies: `runs` pieces of `size` bytes, whose beginnings are `stride` bytes apart."""

    file: str
    start: int
    runs: int
    size: int
    stride: int
    itemsize: int  # bytes of an element


@dataclass(frozen=True)
class FileLayout:
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

    def region(self, name: str, first: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """Return where a block of the tensor `name` lies, whose first element has the indices `first`."""
        entry = self.entries[name]
        strides = [math.prod(entry.shape[axis + 1 :]) * entry.dtype.itemsize for axis in range(len(entry.shape))]
        start = entry.offset + sum(index * stride for index, stride in zip(first, strides, strict=True))
        # A block of complete rows is contiguous in the file. In other blocks, only each row is.
        runs = 1 if shape[1:] == entry.shape[1:] else shape[0]
        size = math.prod(shape) * entry.dtype.itemsize // runs
        return Region(entry.file, start, runs, size, strides[0] if runs > 1 else 0, entry.dtype.itemsize)

    @contextmanager
    def opened(self, directory: str) -> Iterator[Callable[[str, tuple[int, ...], Tensor], None]]:
        """Open the files that `create` has made. Yield a function that writes a block of a tensor: its arguments are
        the tensor's name, the indices of the block's first element, and the block."""
        handles: dict[str, int] = {}

        def write(name: str, first: tuple[int, ...], block: Tensor) -> None:
            entry = self.entries[name]
            if entry.file not in handles:
                handles[entry.file] = _open_without_links(os.path.join(directory, entry.file), os.O_WRONLY)
            region = self.region(name, first, tuple(block.shape))
            # The cast is on the device: a combined copy and cast would cast on the CPU.
            data = memoryview(bits_of(block.to(entry.dtype).cpu().contiguous().view(-1).view(torch.uint8)))
            for run in range(region.runs):
                piece, offset = data[run * region.size : (run + 1) * region.size], region.start + run * region.stride
                while piece:
                    written = os.pwrite(handles[entry.file], piece, offset)
                    piece, offset = piece[written:], offset + written

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
        if (file_name := hugging_face_name(name)) is not None:
            tensors[score_name(file_name)] = parameter.detach()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return tensors | {name: value for name, value in module.state_dict().items() if name not in parameters}


def merged_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `export_tensors`, adapters merged. A collective with adapters."""
    adapters = adapters_of(module)
    for name, tensor in export_tensors(module).items():
        yield name, adapters[name].merged_into(tensor) if name in adapters else tensor


def plan_layout(tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES, stem: str = "model") -> FileLayout:
    """Assign the tensors, in order, to files `{stem}….safetensors` of at most so many bytes, or of one tensor."""
    groups = in_groups({name: tensor.nbytes for name, tensor in tensors.items()}, max_file_bytes)
    headers, sizes, layout = {}, {}, {}
    for number, names in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{stem}{part}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin, starts = 0, {}
        for name in names:
            tensor = tensors[name]
            starts[name], end = begin, begin + tensor.nbytes
            dtype, shape = _DTYPE_NAMES[tensor.dtype], list(tensor.shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
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
    """Divide things of these `sizes`, in order, into groups of at most `most` bytes, or of one thing that is larger."""
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
    All ranks must see the same directory. Returns the names of the files."""
    layout, blocks = own_blocks(module, dtype)
    if dist.get_rank() == 0:
        layout.create(directory)
    dist.barrier()
    with layout.opened(directory) as write:
        for name, first, block in blocks:
            write(name, first, block)
    dist.barrier()
    return sorted(layout.headers)


def own_blocks(
    module: nn.Module, dtype: torch.dtype
) -> tuple[FileLayout, Iterator[tuple[str, tuple[int, ...], Tensor]]]:
    """Return the layout of the files of `write_safetensors`, and what this rank has of them: its blocks, one by one.

    A block is the name of a tensor in the files, the indices of the block's first element, and the block, which may
    have another dtype than the files. Each `next` may be a collective.
    """
    weights = export_tensors(module)
    units = file_units(module, weights)

    def blocks() -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        for unit, parts in whole_units({unit: unit.names for unit in units}, merged_tensors(module)):
            yield from _own_blocks(unit, parts, dtype)

    return plan_layout(file_tensors(units, weights, dtype)), blocks()


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
    """Yield this rank's blocks of a unit. A collective if the unit has a converter and is not split by rows."""
    tensor = next(iter(weights.values()))
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    has_whole_rows = all(isinstance(placement, Replicate) or placement == Shard(0) for placement in placements)
    if unit.converter is None:
        if (shard := _local_shard(tensor)) is not None:
            yield unit.first, *shard
    elif unit.is_by_rows and has_whole_rows:
        if (shard := _local_shard(tensor)) is not None:
            (row, *_), rows = shard
            for name, part in unit.rows_to_files(rows, row, tensor.shape):
                yield name, (0,) * part.dim(), part
    else:
        for name, part in _complete(unit, weights, dtype):
            if dist.get_rank() == 0:
                yield name, (0,) * part.dim(), part


def _complete(unit: FileUnit, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a unit in the files, by name. A collective."""
    # The cast is before the gather, to halve the traffic (bfloat16).
    cast = ((name, weight.to(unit.stored_dtype(weight, dtype))) for name, weight in weights.items())
    whole = {name: full_tensor(weight) for name, weight in cast}
    if unit.is_by_rows:
        (rows,) = whole.values()
        yield from unit.rows_to_files(rows, 0, rows.shape)
    else:
        yield from unit.to_files(whole).items()


def _local_shard(tensor: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Return the indices of the first element of this rank's shard (some rows, or some columns of some rows), and the
    shard. None: another rank writes it, or it is empty."""
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


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


# ---------------------------------------------------------------------------------------------------
# The policy of a checkpoint

DTYPES = ("float32", "bfloat16", "float16")
_ADAPTER_FIELDS: dict[Any, Shape] = {
    "base_model_name_or_path": str,
    "lora_alpha": (int, float),
    "r": lambda rank: type(rank) is int and rank > 0,
}
_ASSETS = "policy/huggingface/"
_MODEL = "model."


@dataclass(frozen=True)
class _SavedWeights:
    """The weights of an export, by their names in the module; adapters by those in peft's files."""

    weights: dict[str, Tensor]  # shape and dtype of each weight, on the meta device, in the order of the files
    read: Callable[[list[str]], dict[str, Tensor]]


def export(
    files: Any,
    out: str,
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    adapter: bool = False,
    base: str | None = None,
) -> list[str]:
    """Write the policy as a Hugging Face directory, atomically; return the names of the weight files.

    Args:
        files: those of a checkpoint, and the tensors of its roles (`trainer.checkpoint.tensors.NamedFiles`).
        dtype: `auto` (the dtype in the config), `float32`, `bfloat16` or `float16`.
        adapter: write only the adapter, in peft's format and in float32.
        base: directory of the adapted weights. None: the directory that the run used.

    Raises:
        UserError: `out` exists or is not writable; the checkpoint has no policy or no adapter; or the adapted weights
            are missing.
    """
    if os.path.lexists(out):
        raise UserError(f"{out}: exists already; name another directory")
    if f"{_ASSETS}config.json" not in files.entries:
        raise UserError(f"{files.path}: contains no policy with its Hugging Face config")
    config = files.json(f"{_ASSETS}config.json", {})
    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if _head(files).weights and (adapter or not is_classifier(config.get("architectures"))):
        problem = "an adapter's files lack; write the merged weights" if adapter else "no class of transformers reads"
        raise UserError(f"{files.path}: its policy has a head for values or scores, which {problem}")
    if (adapter or base) and not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UserError(f"--dtype=auto: the config of the model has {dtype!r}; name one of {', '.join(DTYPES)}")
    if adapter:
        policy, assets = _saved(files, peft_name), _assets(files, WEIGHTS_ONLY)
    else:
        policy = _merged(files, lora, base or lora["base_model_name_or_path"]) if lora else _plain(files, config)
        assets = _assets(files, (ADAPTER_CONFIG,))
        assets[CONFIG] = with_dtype(assets[CONFIG], dtype)
    try:
        with atomic_directory(out) as writing:
            write_files(writing, assets)
            if adapter:
                return _write(writing, policy, nn.Module(), torch.float32, sys.maxsize, "adapter_model")
            return _write(writing, policy, empty_model(config), getattr(torch, dtype), max_file_bytes, "model")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another directory") from error


def read_policy(files: Any) -> dict[str, Tensor]:
    """Return the trained weights as they were saved. For a policy with adapters: the adapters, with peft's names.
    Raises UserError: the checkpoint has no policy."""
    config = files.json(f"{_ASSETS}config.json", {})
    has_adapters = f"{_ASSETS}{ADAPTER_CONFIG}" in files.entries
    policy = _saved(files, peft_name) if has_adapters else _plain(files, config)
    if not policy.weights:
        raise UserError(f"{files.path}: contains no policy")
    return policy.read(list(policy.weights))


def adapter_files(files: Any) -> tuple[str, bytes, str]:
    """Return peft's config and weights of a policy with adapters, and the directory of the adapted weights."""
    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    weights = save(read_policy(files), metadata={"format": "pt"})
    return files.read(f"{_ASSETS}{ADAPTER_CONFIG}").decode(), weights, lora["base_model_name_or_path"]


def _assets(files: Any, excluded: Collection[str]) -> dict[str, bytes]:
    names = {path.removeprefix(_ASSETS): path for path in files.entries if path.startswith(_ASSETS)}
    return {name: files.read(path) for name, path in names.items() if name not in excluded}


def _write(
    directory: str, policy: _SavedWeights, model: nn.Module, dtype: torch.dtype, max_file_bytes: int, stem: str
) -> list[str]:
    """Write the weight files of `model`, which is empty, with floating-point tensors of `dtype`. Return their names."""
    units = file_units(model, policy.weights)
    layout = plan_layout(file_tensors(units, policy.weights, dtype), max_file_bytes, stem)
    layout.create(directory)
    sizes = {unit: sum(policy.weights[name].nbytes for name in unit.names) for unit in units}
    with layout.opened(directory) as write:
        for group in in_groups(sizes, max_file_bytes):
            weights = policy.read([name for unit in group for name in unit.names])
            for unit in group:
                for name, tensor in unit.to_files({name: weights.pop(name) for name in unit.names}).items():
                    write(name, (0,) * tensor.dim(), tensor)
    return list(layout.headers)


def _saved(files: Any, named: Callable[[str], str | None]) -> _SavedWeights:
    """Return weights of the policy as they were saved, by the names that `named` gives those in the module, or None."""
    saved, weights = {}, {}
    for path, entry in files.shapes("policy").items():
        if path.startswith(_MODEL) and (name := named(path.removeprefix(_MODEL))) is not None:
            saved[name] = path
            weights[name] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="meta")

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [saved[name] for name in names])
        return {name: tensors[saved[name]] for name in names}

    return _SavedWeights(weights, fetch)


def _plain(files: Any, config: dict[str, Any]) -> _SavedWeights:
    tied = "lm_head.weight" if config.get("tie_word_embeddings") else None
    return _saved(files, lambda name: None if name == tied else score_name(name))


def _head(files: Any) -> _SavedWeights:
    """Return the head of a policy that gives one value. Empty: it is a language model."""
    return _saved(files, lambda name: score_name(name) if name.startswith(VALUE_HEAD) else None)


def _merged(files: Any, lora: dict[str, Any], base: str) -> _SavedWeights:
    if os.path.isdir(base):
        check_model_files(base, "--base")
    file_of, weights = _base_weights(base)
    adapters = _saved(files, lambda name: name)
    adapted = {weight for weight in map(adapted_weight, adapters.weights) if weight is not None}
    if not adapted <= set(file_of):
        raise UserError(
            f"{base}: has no {sorted(adapted - set(file_of))[0]}, which has an adapter; its files use other names for "
            "the weights, so write only the adapter with --adapter"
        )
    saved_digest = files.json("start_weights.json", {str: str}).get("model.path")
    if saved_digest not in (None, digest_weights(base)):
        raise UserError(
            f"{base}: its weights are not those that the adapters were trained on; name the directory of those with "
            "--base, or write only the adapter with --adapter"
        )
    scale = lora["lora_alpha"] / lora["r"]
    head = _head(files)  # trained whole, in place of that of the base
    if head.weights:
        of_base = {name: weight for name, weight in weights.items() if not name.startswith(("lm_head.", SCORE_HEAD))}
        weights = of_base | head.weights

    def fetch(names: list[str]) -> dict[str, Tensor]:
        of_head = [name for name in names if name in head.weights]
        found = head.read(of_head) if of_head else {}
        pairs = {name: adapter_parameters(name) for name in names if name in adapted}
        parts = adapters.read([part for pair in pairs.values() for part in pair]) if pairs else {}
        for name in names:
            if name not in found:
                with safe_open(file_of[name], framework="pt") as opened:
                    found[name] = opened.get_tensor(name)
            if name in pairs:
                a, b = (parts[part] for part in pairs[name])
                found[name] = found[name].float() + scale * (b @ a)
        return found

    return _SavedWeights(weights, fetch)


def _base_weights(base: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the file of each weight in the directory `base`, and its shape and dtype (see `_SavedWeights`)."""
    try:
        found = weight_shapes(base)
    except ValueError as error:
        raise UserError(f"{base}: {error}; name the weights with --base") from error
    if not found:
        raise UserError(
            f"{base}: contains no safetensors, and the adapters need the weights that were there; name their "
            "directory with --base, or write only the adapter with --adapter"
        )
    file_of = {name: file for name, (file, _) in sorted(found.items())}
    kinds = {name: kind for file in set(file_of.values()) for name, (kind, _) in tensors_in(file).items()}
    return file_of, {name: torch.empty(found[name][1], dtype=_TYPES[kinds[name]], device="meta") for name in file_of}
