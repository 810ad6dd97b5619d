"""The tensors of a checkpoint without ranks: compared, and exported, a bounded number of bytes at a time."""

from __future__ import annotations

import glob
import io
import json
import math
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.manifest import Checkpoint, DamagedError, FileEntry
from trainer.checkpoint.safe_dcp import SafePlanner, load_metadata
from trainer.checkpoint.store import MANIFEST
from trainer.documents import Shape, parse_object
from trainer.durable import digest_bytes, digest_weights, read_file, sync_directory, sync_tree
from trainer.errors import UserError
from trainer.hub import first_line

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FIELDS: dict[Any, Shape] = {
    "base_model_name_or_path": str,
    "lora_alpha": (int, float),
    "r": lambda rank: type(rank) is int and rank > 0,
}
_ASSETS = "policy/huggingface/"
_BATCH_BYTES = 1 << 30
_MODEL = "model."


@dataclass(frozen=True)
class NamedFiles:
    """The files of a checkpoint that its manifest names; no other file is read."""

    checkpoint: Checkpoint

    @cached_property
    def entries(self) -> dict[str, FileEntry]:
        """The entries of the manifest by path."""
        return {entry.path: entry for entry in self.checkpoint.entries}

    def read(self, path: str) -> bytes:
        """The content of a small file.

        Raises:
            DamagedError: it is not the content that was saved, or is reached through a link.
        """
        try:
            data = self.checkpoint.files.read(path)
        except OSError as error:
            raise DamagedError(f"{self.checkpoint.path}: {path} cannot be read ({error.strerror})") from error
        if digest_bytes(data) != self.entries[path].hash:
            raise DamagedError(f"{self.checkpoint.path}: {path} does not have the content that was saved")
        return data

    def json(self, path: str, shape: dict[Any, Shape]) -> dict[str, Any]:
        """The JSON object in a file; empty when the manifest does not name the file."""
        if path not in self.entries:
            return {}
        try:
            return parse_object(self.read(path), shape)
        except DamagedError:
            raise
        except ValueError as error:
            raise DamagedError(f"{self.checkpoint.path}: {path} is damaged ({error})") from error

    def shapes(self, role: str) -> dict[str, TensorStorageMetadata]:
        """Names, shapes and types of the tensors of a role; empty when the checkpoint does not hold the role."""
        if f"{role}/.metadata" not in self.entries:
            return {}
        try:
            metadata = load_metadata(io.BytesIO(self.read(f"{role}/.metadata")))
        except DamagedError:
            raise
        except UserError as error:
            raise DamagedError(f"{self.checkpoint.path}: {role}/{error}") from error
        files = {f"{role}/{info.relative_path}" for info in metadata.storage_data.values()}
        if not files <= set(self.entries):
            unnamed = sorted(files - set(self.entries))[0]
            raise DamagedError(
                f"{self.checkpoint.path}: {role}/.metadata needs {unnamed}, which {MANIFEST} does not name"
            )
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        available = sum(self.entries[file].bytes for file in files)
        for name, entry in tensors.items():
            if _bytes(entry) > available:
                raise DamagedError(
                    f"{self.checkpoint.path}: {role}/.metadata is damaged ({name} is larger than its files)"
                )
        return tensors

    def tensors(self, role: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors of a role, put together from the shards of all ranks."""
        known = self.shapes(role)
        wanted = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
        reader = self.checkpoint.files.reader(role)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            try:
                dcp.load(wanted, storage_reader=reader, planner=_Flat(), no_dist=True)
            except dcp.CheckpointException as error:  # a BaseException: nothing else catches it
                cause = next(iter(error.failures.values()))[0]
                raise DamagedError(f"{self.checkpoint.path}/{role}: cannot be loaded: {first_line(cause)}") from None
        return wanted


class _Flat(SafePlanner):
    """Takes names as they are in the checkpoint."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def compare(a: NamedFiles, b: NamedFiles) -> list[dict[str, Any]]:
    """How each tensor of two checkpoints differs: `relative` is |b - a| / |a|, `largest` max |b - a|."""
    rows: list[dict[str, Any]] = []
    for role in ("policy", "critic", "reference"):
        here, there = a.shapes(role), b.shapes(role)
        for name in sorted(set(here) | set(there)):
            row = {"name": f"{role}/{name}", "relative": None, "largest": None, "note": None}
            if name not in here or name not in there:
                row["note"] = f"only in {'b' if name not in here else 'a'}"
            elif here[name].size != there[name].size:
                row["note"] = f"{tuple(here[name].size)} became {tuple(there[name].size)}"
            rows.append(row)
        common = [r["name"].partition("/")[2] for r in rows if r["note"] is None and r["name"].startswith(f"{role}/")]
        by_name = {row["name"]: row for row in rows}
        for names in _batches(common, here):
            before, after = a.tensors(role, names), b.tensors(role, names)
            for name in names:
                delta = after[name].double() - before[name].double()
                norm = float(before[name].double().norm())
                by_name[f"{role}/{name}"] |= {
                    "relative": float(delta.norm()) / max(norm, 1e-30),
                    "largest": float(delta.abs().max()) if delta.numel() else 0.0,
                }
    return rows


def _batches(names: list[str], known: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    batch: list[str] = []
    used = 0
    for name in names:
        size = _bytes(known[name])
        if batch and used + size > _BATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(name)
        used += size
    if batch:
        yield batch


def _bytes(entry: TensorStorageMetadata, dtype: torch.dtype | None = None) -> int:
    """Bytes of a whole tensor, floating-point ones as `dtype`."""
    own = entry.properties.dtype
    return math.prod(entry.size) * (dtype if dtype is not None and own.is_floating_point else own).itemsize


@dataclass(frozen=True)
class _Source:
    """The tensors of an export."""

    bytes_of: dict[str, int]
    """Size of each as it will be written, in the order of the file."""
    read: Callable[[list[str]], dict[str, Tensor]]


def export(files: NamedFiles, out: str, dtype: str, max_file_bytes: int, adapter: bool = False,
           base: str | None = None) -> list[str]:  # fmt: skip
    """Write the policy as a Hugging Face directory, whole or not at all. Holds one file's tensors at a time.

    Executes nothing that the checkpoint holds, and copies only files that its manifest names.

    Args:
        dtype: `auto` (the config's), `float32`, `bfloat16` or `float16`.
        adapter: write peft's adapter alone, in float32.
        base: directory of the weights under the adapters; None: the one that the run had.

    Returns:
        the names of the weight files.

    Raises:
        UserError: `out` exists or cannot be written, or the checkpoint holds no policy, or no adapter, or its base is
            not there.
    """
    if os.path.lexists(out):
        raise UserError(f"{out}: exists already; name another directory")
    if f"{_ASSETS}config.json" not in files.entries:
        raise UserError(f"{files.checkpoint.path}: holds no policy with its Hugging Face config")
    config = files.json(f"{_ASSETS}config.json", {})
    lora = files.json(f"{_ASSETS}{ADAPTER_CONFIG}", _ADAPTER_FIELDS)
    if (adapter or base) and not lora:
        raise UserError(f"{files.checkpoint.path}: its policy was trained without adapters (trainer.policy.lora)")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise UserError(f"--dtype=auto: the config of the model has {dtype!r}; name one of {', '.join(DTYPES)}")
    target = torch.float32 if adapter else getattr(torch, dtype)
    if adapter:
        tensors = _adapter(files)
    elif lora:
        tensors = _merged(files, lora, base or lora["base_model_name_or_path"], target)
    else:
        tensors = _plain(files, config, target)
    written_config = None if adapter else {**config, "dtype": dtype}
    left_out = {"config.json", "generation_config.json"} if adapter else {"config.json", ADAPTER_CONFIG}
    assets = {
        path.removeprefix(_ASSETS): files.read(path)
        for path in files.entries
        if path.startswith(_ASSETS) and path.removeprefix(_ASSETS) not in left_out
    }
    if written_config is not None:
        assets["config.json"] = json.dumps(written_config, indent=2).encode()
    out = os.path.abspath(out)
    writing = f"{out}.writing-{secrets.token_hex(4)}"
    try:
        os.makedirs(os.path.dirname(out), exist_ok=True)
        os.mkdir(writing)
        try:
            weights = _write(writing, assets, tensors, target, sys.maxsize if adapter else max_file_bytes, adapter)
            sync_tree(writing)
            os.rename(writing, out)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        sync_directory(os.path.dirname(out))
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another directory") from error
    return weights


def _write(directory: str, assets: dict[str, bytes], tensors: _Source, target: torch.dtype, max_file_bytes: int,
           adapter: bool) -> list[str]:  # fmt: skip
    """Write the files of an export; returns the names of those with weights."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, data in assets.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    stem = "adapter_model" if adapter else "model"
    groups = _file_groups(tensors.bytes_of, max_file_bytes)
    weight_map, total, files = {}, 0, []
    for i, group in enumerate(groups):
        name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        written = {
            key: tensor.to(target) if tensor.is_floating_point() else tensor
            for key, tensor in tensors.read(group).items()
        }
        try:
            save_file(written, os.path.join(directory, name), metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, say
            raise OSError(first_line(error)) from error
        total += sum(t.numel() * t.itemsize for t in written.values())
        weight_map |= dict.fromkeys(written, name)
        files.append(name)
    if len(groups) > 1:
        with open(os.path.join(directory, "model.safetensors.index.json"), "w") as index:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
    return files


def _plain(files: NamedFiles, config: dict[str, Any], target: torch.dtype) -> _Source:
    sizes = {
        name.removeprefix(_MODEL): _bytes(entry, target)
        for name, entry in files.shapes("policy").items()
        if name.startswith(_MODEL) and not (config.get("tie_word_embeddings") and name == f"{_MODEL}lm_head.weight")
    }

    def fetch(names: list[str]) -> dict[str, Tensor]:
        found = files.tensors("policy", [f"{_MODEL}{name}" for name in names])
        return {name.removeprefix(_MODEL): tensor for name, tensor in found.items()}

    return _Source(sizes, fetch)


def _adapter(files: NamedFiles) -> _Source:
    """The adapters under the names of peft's files."""
    known = {
        f"base_model.model.{name.removeprefix(_MODEL).replace('.default.', '.')}": name
        for name in files.shapes("policy")
        if name.startswith(_MODEL)
    }

    def fetch(names: list[str]) -> dict[str, Tensor]:
        found = files.tensors("policy", [known[name] for name in names])
        return {name: found[known[name]] for name in names}

    return _Source(dict.fromkeys(known, 0), fetch)


def _merged(files: NamedFiles, lora: dict[str, Any], base: str, target: torch.dtype) -> _Source:
    """The weights in the directory `base` with the adapters in them."""
    from safetensors import SafetensorError, safe_open

    index = os.path.join(base, "model.safetensors.index.json")
    if os.path.exists(index):
        try:
            weight_map = parse_object(read_file(os.path.realpath(index)), {"weight_map": {str: str}})["weight_map"]
        except (OSError, ValueError) as error:
            raise UserError(f"{index}: cannot be read ({first_line(error)})") from error
        shards = [os.path.join(base, name) for name in sorted(set(weight_map.values()))]
    else:
        shards = sorted(glob.glob(os.path.join(glob.escape(base), "model*.safetensors")))
    if not shards:
        raise UserError(f"{base}: holds no safetensors, and the adapters belong to the weights that were there; name "
                        "their directory with --base, or write the adapter alone with --adapter")  # fmt: skip
    place, sizes = {}, {}
    for file in shards:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118, it is no dict
                    place[name] = file
                    sizes[name] = math.prod(weights.get_slice(name).get_shape()) * target.itemsize
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read ({first_line(error)}); name the weights with --base") from error
    a, b = ".lora_A.default.weight", ".lora_B.default.weight"
    own = [name.removeprefix(_MODEL) for name in files.shapes("policy") if name.startswith(_MODEL)]
    adapted = {f"{name.removesuffix(a)}.weight" for name in own if name.endswith(a)}
    if not adapted <= set(place):
        raise UserError(f"{base}: has no {sorted(adapted - set(place))[0]}, which has an adapter; its files name the "
                        "weights in their own way, so write the adapter alone with --adapter")  # fmt: skip
    known = files.json("start_weights.json", {str: str}).get("model.path")
    if known not in (None, digest_weights(base)):
        raise UserError(f"{base}: its weights are not those that the adapters were trained on; name the "
                        "directory of those with --base, or write the adapter alone with --adapter")  # fmt: skip
    scale = lora["lora_alpha"] / lora["r"]

    def fetch(names: list[str]) -> dict[str, Tensor]:
        layers = {name: f"{_MODEL}{name.removesuffix('.weight')}" for name in names if name in adapted}
        parts = [f"{layer}{part}" for layer in layers.values() for part in (a, b)]
        own = files.tensors("policy", parts) if parts else {}
        found = {}
        for name in names:
            with safe_open(place[name], framework="pt") as weights:
                found[name] = weights.get_tensor(name)
            if name in layers:
                found[name] = found[name].float() + scale * (own[f"{layers[name]}{b}"] @ own[f"{layers[name]}{a}"])
        return found

    return _Source(sizes, fetch)


def _file_groups(sizes: dict[str, int], max_file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups
