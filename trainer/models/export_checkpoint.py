"""Write the policy of a checkpoint as a Hugging Face directory, without ranks. One file is in memory at a time.

No code in the checkpoint is executed, and only files that its manifest contains are copied.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.files.documents import Shape
from trainer.files.hf_hub import first_line
from trainer.models.export import (
    CONFIG,
    WEIGHTS_ONLY,
    assign_to_files,
    atomic_directory,
    with_dtype,
    write_files,
    write_index,
)
from trainer.models.files import ADAPTER_CONFIG
from trainer.models.heads import SCORE_HEAD, VALUE_HEAD, is_classifier, score_name
from trainer.models.lora import adapted_weight, adapter_parameters, peft_name
from trainer.models.weight_files import check_model_files, weight_shapes
from trainer.models.weight_names import empty_model, file_tensors, file_units

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

    tensors: dict[str, Tensor]
    """Shape and dtype of each tensor, on the meta device, in the order of the files."""
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
    if _heads(files) and (adapter or not is_classifier(config.get("architectures"))):
        problem = "an adapter's files lack; write the merged weights" if adapter else "no class of transformers reads"
        raise UserError(f"{files.path}: its policy has a head for values or scores, which {problem}")
    if (adapter or base) and not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UserError(f"--dtype=auto: the config of the model has {dtype!r}; name one of {', '.join(DTYPES)}")
    if adapter:
        source, stem, max_file_bytes = _adapter(files), "adapter_model", sys.maxsize
    elif lora:
        source, stem = _merged(files, lora, base or lora["base_model_name_or_path"]), "model"
    else:
        source, stem = _plain(files, config), "model"
    if not adapter:
        source = _in_files(source, empty_model(config), getattr(torch, dtype))
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in source.tensors.items()}
    assets = _assets(files, WEIGHTS_ONLY if adapter else (ADAPTER_CONFIG,))
    if not adapter:
        assets[CONFIG] = with_dtype(assets[CONFIG], dtype)
    try:
        with atomic_directory(out) as writing:
            write_files(writing, assets)
            return _write(writing, source, assign_to_files(sizes, max_file_bytes, stem))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another directory") from error


def read_policy(files: SavedFiles) -> dict[str, Tensor]:
    """Return the trained weights as they were saved. For a policy with adapters: the adapters, with peft's names.

    Raises:
        UserError: the checkpoint has no policy.
    """
    config = files.json(f"{_ASSETS}config.json", {})
    has_adapters = f"{_ASSETS}{ADAPTER_CONFIG}" in files.entries
    source = _adapter(files) if has_adapters else _plain(files, config)
    if not source.tensors:
        raise UserError(f"{files.path}: contains no policy")
    return source.read(list(source.tensors))


def adapter_files(files: SavedFiles) -> tuple[str, bytes, str]:
    """Return peft's config and weights of a policy with adapters, and the directory of the adapted weights."""
    from safetensors.torch import save

    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    source = _adapter(files)
    weights = save(source.read(list(source.tensors)), metadata={"format": "pt"})
    return files.read(f"{_ASSETS}{ADAPTER_CONFIG}").decode(), weights, lora["base_model_name_or_path"]


def _assets(files: SavedFiles, excluded: Collection[str]) -> dict[str, bytes]:
    """Return the files of the export except the weights, by their name."""
    names = {path.removeprefix(_ASSETS): path for path in files.entries if path.startswith(_ASSETS)}
    return {name: files.read(path) for name, path in names.items() if name not in excluded}


def _write(directory: str, source: _Source, groups: Mapping[str, list[str]]) -> list[str]:
    """Write the weight files. Return their names."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weight_map, total = {}, 0
    for file, names in groups.items():
        written = {
            name: tensor.to(source.tensors[name].dtype) if tensor.is_floating_point() else tensor
            for name, tensor in source.read(names).items()
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


def _in_files(source: _Source, model: nn.Module, dtype: torch.dtype) -> _Source:
    """Return the tensors of a model's files, from its weights by their names in the module.

    Args:
        model: an empty one.
        dtype: of the floating-point tensors.
    """
    units = file_units(model, source.tensors)
    tensors_of = {
        unit: {score_name(name): tensor for name, tensor in file_tensors([unit], source.tensors, dtype).items()}
        for unit in units
    }

    def fetch(names: list[str]) -> dict[str, Tensor]:
        wanted, found = set(names), {}
        touched = [unit for unit in units if wanted & set(tensors_of[unit])]
        weights = source.read([name for unit in touched for name in unit.names])
        for unit in touched:
            for name, tensor in unit.to_files({name: weights.pop(name) for name in unit.names}).items():
                if (name := score_name(name)) in wanted:
                    found[name] = tensor.contiguous()
        return {name: found[name] for name in names}

    return _Source({name: tensor for unit in units for name, tensor in tensors_of[unit].items()}, fetch)


def _heads(files: SavedFiles) -> dict[str, Tensor]:
    """Return the head of a policy that gives one value, without content (see `_Source`). Empty: a language model."""
    return {
        name.removeprefix(_MODEL): torch.empty(tuple(entry.size), device="meta")
        for name, entry in files.shapes("policy").items()
        if name.startswith(f"{_MODEL}{VALUE_HEAD}")
    }


def _plain(files: SavedFiles, config: dict[str, Any]) -> _Source:
    """Return the weights of a policy without adapters, with their names in the module."""
    weights = {}
    for name, entry in files.shapes("policy").items():
        tied = config.get("tie_word_embeddings") and name == f"{_MODEL}lm_head.weight"
        if name.startswith(_MODEL) and not tied:
            empty = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="meta")
            weights[name.removeprefix(_MODEL)] = empty

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [f"{_MODEL}{name}" for name in names])
        return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}

    return _Source(weights, fetch)


def _adapter(files: SavedFiles) -> _Source:
    """Return the adapters, with the names that peft's files use."""
    shapes = {name: entry for name, entry in files.shapes("policy").items() if name.startswith(_MODEL)}
    by_peft_name = {peft_name(name.removeprefix(_MODEL)): name for name in shapes}

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [by_peft_name[name] for name in names])
        return {name: tensors[by_peft_name[name]] for name in names}

    empty = {peft: torch.empty(tuple(shapes[name].size), device="meta") for peft, name in by_peft_name.items()}
    return _Source(empty, fetch)


def _merged(files: SavedFiles, lora: dict[str, Any], base: str) -> _Source:
    """Return the weights in the directory `base`, with the adapters merged."""
    from safetensors import safe_open

    if os.path.isdir(base):
        check_model_files(base, "--base")
    file_of, weights = _base_weights(base)
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
    heads = _heads(files)  # trained whole, in place of that of the base
    if heads:
        of_base = {name: weight for name, weight in weights.items() if not name.startswith(("lm_head.", SCORE_HEAD))}
        weights = of_base | heads

    def fetch(names: list[str]) -> dict[str, Tensor]:
        pairs = {name: [f"{_MODEL}{p}" for p in adapter_parameters(name)] for name in names if name in adapted}
        adapters = files.tensors("policy", [p for pair in pairs.values() for p in pair]) if pairs else {}
        merged = {}
        for name in names:
            if name in heads:
                merged |= {name: files.tensors("policy", [f"{_MODEL}{name}"])[f"{_MODEL}{name}"]}
                continue
            with safe_open(file_of[name], framework="pt") as weights:
                merged[name] = weights.get_tensor(name)
            if name in pairs:
                a, b = (adapters[parameter] for parameter in pairs[name])
                merged[name] = merged[name].float() + scale * (b @ a)
        return merged

    return _Source(weights, fetch)


def _base_weights(base: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the file of each weight in the directory `base`, and its shape and dtype (see `_Source`)."""
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
    return file_of, {name: torch.empty(found[name][1], device="meta") for name in file_of}
