"""Write the policy of a checkpoint as a Hugging Face directory, without ranks. One file is in memory at a time.

No code in the checkpoint is executed, and only files that its manifest contains are copied.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.files.documents import Shape
from trainer.files.hf_hub import first_line
from trainer.models.export import assign_to_files, atomic_directory, write_index
from trainer.models.files import ADAPTER_CONFIG
from trainer.models.lora import adapted_weight, adapter_parameters, peft_name
from trainer.models.untrusted import check_model_files, files_in_index, tensor_shapes

DTYPES = ("float32", "bfloat16", "float16")
_ADAPTER_FIELDS: dict[Any, Shape] = {
    "base_model_name_or_path": str,
    "lora_alpha": (int, float),
    "r": lambda rank: type(rank) is int and rank > 0,
}
_ASSETS = "policy/huggingface/"
_MODEL = "model."


class SavedFiles(Protocol):
    """The files of a checkpoint, and the tensors of its roles (see `trainer.checkpoint.tensors`)."""

    @property
    def path(self) -> str: ...
    @property
    def entries(self) -> Collection[str]: ...
    def read(self, path: str) -> bytes: ...
    def json(self, path: str, shape: dict[Any, Shape]) -> dict[str, Any]: ...
    def shapes(self, role: str) -> Mapping[str, Any]: ...
    def tensors(self, role: str, names: Iterable[str]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class _Source:
    """The tensors of an export."""

    bytes_of: dict[str, int]
    """Size of each tensor in the file, in the order of the file."""
    read: Callable[[list[str]], dict[str, Tensor]]


def export(
    files: SavedFiles, out: str, dtype: str, max_file_bytes: int, adapter: bool = False, base: str | None = None
) -> list[str]:
    """Write the policy as a Hugging Face directory, atomically.

    Args:
        dtype: `auto` (the dtype in the config), `float32`, `bfloat16` or `float16`.
        adapter: write only the adapter, in peft's format and in float32.
        base: directory of the adapted weights. None: the directory that the run used.

    Returns:
        the names of the weight files.

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
    if (adapter or base) and not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UserError(f"--dtype=auto: the config of the model has {dtype!r}; name one of {', '.join(DTYPES)}")
    target = torch.float32 if adapter else getattr(torch, dtype)
    if adapter:
        tensors, stem, max_file_bytes = _adapter(files), "adapter_model", sys.maxsize
    elif lora:
        tensors, stem = _merged(files, lora, base or lora["base_model_name_or_path"], target), "model"
    else:
        tensors, stem = _plain(files, config, target), "model"
    excluded = {"config.json", "generation_config.json"} if adapter else {"config.json", ADAPTER_CONFIG}
    assets = _assets(files, excluded)
    if not adapter:
        assets["config.json"] = json.dumps({**config, "dtype": dtype}, indent=2).encode()
    try:
        with atomic_directory(out) as writing:
            for name, data in assets.items():
                path = os.path.join(writing, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
            return _write(writing, tensors, target, assign_to_files(tensors.bytes_of, max_file_bytes, stem))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another directory") from error


def read_policy(files: SavedFiles) -> dict[str, Tensor]:
    """Return the trained weights as they were saved. For a policy with adapters: the adapters, with peft's names.

    Raises:
        UserError: the checkpoint has no policy.
    """
    config = files.json(f"{_ASSETS}config.json", {})
    has_adapters = f"{_ASSETS}{ADAPTER_CONFIG}" in files.entries
    source = _adapter(files) if has_adapters else _plain(files, config, torch.float32)
    if not source.bytes_of:
        raise UserError(f"{files.path}: contains no policy")
    return source.read(list(source.bytes_of))


def adapter_files(files: SavedFiles) -> tuple[str, bytes, str]:
    """Return peft's config and weights of a policy with adapters, and the directory of the adapted weights."""
    from safetensors.torch import save

    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    source = _adapter(files)
    weights = save(source.read(list(source.bytes_of)), metadata={"format": "pt"})
    return files.read(f"{_ASSETS}{ADAPTER_CONFIG}").decode(), weights, lora["base_model_name_or_path"]


def _assets(files: SavedFiles, excluded: set[str]) -> dict[str, bytes]:
    """Return the files of the export except the weights, by their name."""
    names = {path.removeprefix(_ASSETS): path for path in files.entries if path.startswith(_ASSETS)}
    return {name: files.read(path) for name, path in names.items() if name not in excluded}


def _write(directory: str, tensors: _Source, target: torch.dtype, groups: Mapping[str, list[str]]) -> list[str]:
    """Write the weight files, with floating-point tensors as `target`. Return the names of the files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weight_map, total = {}, 0
    for file, names in groups.items():
        written = {
            name: tensor.to(target) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.read(names).items()
        }
        try:
            save_file(written, os.path.join(directory, file), metadata={"format": "pt"})
        except SafetensorError as error:  # for example, a full disk
            raise OSError(first_line(error)) from error
        total += sum(tensor.numel() * tensor.itemsize for tensor in written.values())
        weight_map |= dict.fromkeys(written, file)
    if len(groups) > 1:
        write_index(directory, weight_map, total)
    return list(groups)


def _plain(files: SavedFiles, config: dict[str, Any], target: torch.dtype) -> _Source:
    """Return the weights of a policy without adapters."""
    sizes = {}
    for name, entry in files.shapes("policy").items():
        tied = config.get("tie_word_embeddings") and name == f"{_MODEL}lm_head.weight"
        if name.startswith(_MODEL) and not tied:
            saved = entry.properties.dtype
            itemsize = (target if saved.is_floating_point else saved).itemsize
            sizes[name.removeprefix(_MODEL)] = math.prod(entry.size) * itemsize

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [f"{_MODEL}{name}" for name in names])
        return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}

    return _Source(sizes, fetch)


def _adapter(files: SavedFiles) -> _Source:
    """Return the adapters, with the names that peft's files use."""
    names = [name for name in files.shapes("policy") if name.startswith(_MODEL)]
    by_peft_name = {peft_name(name.removeprefix(_MODEL)): name for name in names}

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [by_peft_name[name] for name in names])
        return {name: tensors[by_peft_name[name]] for name in names}

    return _Source(dict.fromkeys(by_peft_name, 0), fetch)


def _merged(files: SavedFiles, lora: dict[str, Any], base: str, target: torch.dtype) -> _Source:
    """Return the weights in the directory `base`, with the adapters merged."""
    from safetensors import safe_open

    if os.path.isdir(base):
        check_model_files(base, "--base")
    file_of, sizes = _base_weights(base, target)
    parameters = [name.removeprefix(_MODEL) for name in files.shapes("policy") if name.startswith(_MODEL)]
    adapted = {weight for weight in map(adapted_weight, parameters) if weight is not None}
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

    def fetch(names: list[str]) -> dict[str, Tensor]:
        pairs = {name: [f"{_MODEL}{p}" for p in adapter_parameters(name)] for name in names if name in adapted}
        adapters = (
            files.tensors("policy", [parameter for pair in pairs.values() for parameter in pair]) if pairs else {}
        )
        merged = {}
        for name in names:
            with safe_open(file_of[name], framework="pt") as weights:
                merged[name] = weights.get_tensor(name)
            if name in pairs:
                a, b = (adapters[parameter] for parameter in pairs[name])
                merged[name] = merged[name].float() + scale * (b @ a)
        return merged

    return _Source(sizes, fetch)


def _base_weights(base: str, target: torch.dtype) -> tuple[dict[str, str], dict[str, int]]:
    """Return the file of each weight in the directory `base`, and the size of each weight as `target`."""
    index = os.path.join(base, "model.safetensors.index.json")
    if os.path.exists(index):
        try:
            shards = [os.path.join(base, name) for name in sorted(set(files_in_index(index).values()))]
        except (OSError, ValueError) as error:
            raise UserError(f"{index}: cannot be read ({first_line(error)})") from error
    else:
        shards = sorted(glob.glob(os.path.join(glob.escape(base), "model*.safetensors")))
    if not shards:
        raise UserError(
            f"{base}: contains no safetensors, and the adapters need the weights that were there; name their "
            "directory with --base, or write only the adapter with --adapter"
        )
    file_of: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for file in shards:
        try:
            shapes = dict(sorted(tensor_shapes(file).items()))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({first_line(error)}); name the weights with --base") from error
        file_of |= dict.fromkeys(shapes, file)
        sizes |= {name: math.prod(shape) * target.itemsize for name, shape in shapes.items()}
    return file_of, sizes
