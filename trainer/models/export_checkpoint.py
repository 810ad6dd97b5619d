"""Write the policy of a checkpoint as a Hugging Face directory, without ranks. The weights of one file are in memory.

No code in the checkpoint is executed, and only files that its manifest contains are copied.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, save
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.files.documents import Shape
from trainer.models.export import CONFIG, WEIGHTS_ONLY, atomic_directory, with_dtype, write_files
from trainer.models.export_sharded import MAX_FILE_BYTES, in_groups, plan_layout, tensor_bytes
from trainer.models.files import ADAPTER_CONFIG, check_model_files, tensors_in, weight_shapes
from trainer.models.heads import SCORE_HEAD, VALUE_HEAD, is_classifier, score_name
from trainer.models.lora import adapted_weight, adapter_parameters, peft_name
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
    """The weights of an export, by their names in the module; adapters by those in peft's files."""

    weights: dict[str, Tensor]
    """Shape and dtype of each weight, on the meta device, in the order of the files."""
    read: Callable[[list[str]], dict[str, Tensor]]


def export(
    files: SavedFiles,
    out: str,
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    adapter: bool = False,
    base: str | None = None,
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
        source, assets = _saved(files, peft_name), _assets(files, WEIGHTS_ONLY)
    else:
        source = _merged(files, lora, base or lora["base_model_name_or_path"]) if lora else _plain(files, config)
        assets = _assets(files, (ADAPTER_CONFIG,))
        assets[CONFIG] = with_dtype(assets[CONFIG], dtype)
    try:
        with atomic_directory(out) as writing:
            write_files(writing, assets)
            if adapter:
                return _write(writing, source, nn.Module(), torch.float32, sys.maxsize, "adapter_model")
            return _write(writing, source, empty_model(config), getattr(torch, dtype), max_file_bytes, "model")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another directory") from error


def read_policy(files: SavedFiles) -> dict[str, Tensor]:
    """Return the trained weights as they were saved. For a policy with adapters: the adapters, with peft's names.

    Raises:
        UserError: the checkpoint has no policy.
    """
    config = files.json(f"{_ASSETS}config.json", {})
    has_adapters = f"{_ASSETS}{ADAPTER_CONFIG}" in files.entries
    source = _saved(files, peft_name) if has_adapters else _plain(files, config)
    if not source.weights:
        raise UserError(f"{files.path}: contains no policy")
    return source.read(list(source.weights))


def adapter_files(files: SavedFiles) -> tuple[str, bytes, str]:
    """Return peft's config and weights of a policy with adapters, and the directory of the adapted weights."""
    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if not lora:
        raise UserError(f"{files.path}: its policy was trained without adapters (trainer.policy.lora)")
    weights = save(read_policy(files), metadata={"format": "pt"})
    return files.read(f"{_ASSETS}{ADAPTER_CONFIG}").decode(), weights, lora["base_model_name_or_path"]


def _assets(files: SavedFiles, excluded: Collection[str]) -> dict[str, bytes]:
    """Return the files of the export except the weights, by their name."""
    names = {path.removeprefix(_ASSETS): path for path in files.entries if path.startswith(_ASSETS)}
    return {name: files.read(path) for name, path in names.items() if name not in excluded}


def _write(
    directory: str, source: _Source, model: nn.Module, dtype: torch.dtype, max_file_bytes: int, stem: str
) -> list[str]:
    """Write the weight files. Return their names.

    Args:
        model: an empty one, whose files have these weights.
        dtype: of the floating-point tensors.
    """
    units = file_units(model, source.weights)
    layout = plan_layout(file_tensors(units, source.weights, dtype), max_file_bytes, stem)
    layout.create(directory)
    sizes = {unit: sum(tensor_bytes(source.weights[name]) for name in unit.names) for unit in units}
    with layout.opened(directory) as write:
        for group in in_groups(sizes, max_file_bytes):
            weights = source.read([name for unit in group for name in unit.names])
            for unit in group:
                for name, tensor in unit.to_files({name: weights.pop(name) for name in unit.names}).items():
                    write(name, (0,) * tensor.dim(), tensor)
    return list(layout.headers)


def _saved(files: SavedFiles, named: Callable[[str], str | None]) -> _Source:
    """Return weights of the policy as they were saved.

    Args:
        named: returns the name of a weight in the source, from that in the module. None: it is left out.
    """
    saved, weights = {}, {}
    for path, entry in files.shapes("policy").items():
        if path.startswith(_MODEL) and (name := named(path.removeprefix(_MODEL))) is not None:
            saved[name] = path
            weights[name] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="meta")

    def fetch(names: list[str]) -> dict[str, Tensor]:
        tensors = files.tensors("policy", [saved[name] for name in names])
        return {name: tensors[saved[name]] for name in names}

    return _Source(weights, fetch)


def _plain(files: SavedFiles, config: dict[str, Any]) -> _Source:
    """Return the weights of a policy without adapters."""
    tied = "lm_head.weight" if config.get("tie_word_embeddings") else None
    return _saved(files, lambda name: None if name == tied else score_name(name))


def _head(files: SavedFiles) -> _Source:
    """Return the head of a policy that gives one value. Empty: it is a language model."""
    return _saved(files, lambda name: score_name(name) if name.startswith(VALUE_HEAD) else None)


def _merged(files: SavedFiles, lora: dict[str, Any], base: str) -> _Source:
    """Return the weights in the directory `base`, with the adapters merged."""
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
    kinds = {name: kind for file in set(file_of.values()) for name, (kind, _) in tensors_in(file).items()}
    return file_of, {name: torch.empty(found[name][1], dtype=_TYPES[kinds[name]], device="meta") for name in file_of}
