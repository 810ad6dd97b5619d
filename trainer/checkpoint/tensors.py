"""The tensors of a checkpoint without ranks: compared, and exported, a bounded number of bytes at a time."""

from __future__ import annotations

import glob
import json
import math
import os
import posixpath
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.safe_dcp import SafePlanner, SafeReader, load_metadata
from trainer.durable import digest_weights, sync_directory, sync_tree
from trainer.errors import UserError

_BATCH_BYTES = 1 << 30
_MODEL = "model."


def shapes(directory: str) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and types of the tensors of one role's directory."""
    with open(posixpath.join(directory, ".metadata"), "rb") as file:
        entries = load_metadata(file).state_dict_metadata
    return {name: meta for name, meta in entries.items() if isinstance(meta, TensorStorageMetadata)}


def read(directory: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors, put together from all ranks' shards."""
    known = shapes(directory)
    wanted = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(wanted, storage_reader=SafeReader(directory), planner=_Flat(), no_dist=True)
    return wanted


class _Flat(SafePlanner):
    """Takes names as they are in the checkpoint."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def compare(a: str, b: str) -> list[dict[str, Any]]:
    """How each tensor of two checkpoints differs: `relative` is |b - a| / |a|, `largest` max |b - a|."""
    rows: list[dict[str, Any]] = []
    for role in ("policy", "critic", "reference"):
        left, right = posixpath.join(a, role), posixpath.join(b, role)
        here, there = (shapes(d) if os.path.exists(posixpath.join(d, ".metadata")) else {} for d in (left, right))
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
            before, after = read(left, names), read(right, names)
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
        size = known[name].size.numel() * known[name].properties.dtype.itemsize
        if batch and used + size > _BATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(name)
        used += size
    if batch:
        yield batch


@dataclass(frozen=True)
class _Source:
    """The tensors of an export."""

    bytes_of: dict[str, int]
    """Size of each as it will be written, in the order of the file."""
    read: Callable[[list[str]], dict[str, Tensor]]


def export(checkpoint: str, out: str, dtype: str, max_file_bytes: int, adapter: bool = False,
           base: str | None = None) -> list[str]:  # fmt: skip
    """Write the policy as a Hugging Face directory, whole or not at all. Holds one file's tensors at a time.

    Args:
        dtype: `auto` (the config's), `float32`, `bfloat16` or `float16`.
        adapter: write peft's adapter alone, in float32.
        base: directory of the weights under the adapters; None: the one that the run had.

    Returns:
        the names of the weight files.

    Raises:
        UserError: `out` exists, or the checkpoint holds no policy, or no adapter, or its base is not there.
    """
    from safetensors.torch import save_file

    source, assets = posixpath.join(checkpoint, "policy"), posixpath.join(checkpoint, "policy", "huggingface")
    if os.path.exists(out):
        raise UserError(f"{out}: exists already; name another directory")
    if not os.path.exists(posixpath.join(assets, "config.json")):
        raise UserError(f"{checkpoint}: holds no policy with its Hugging Face config")
    config = _json(posixpath.join(assets, "config.json"))
    lora = _json(posixpath.join(assets, "adapter_config.json"))
    if (adapter or base) and not lora:
        raise UserError(f"{checkpoint}: its policy was trained without adapters (trainer.policy.lora)")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    target = torch.float32 if adapter else getattr(torch, dtype)
    if adapter:
        tensors = _adapter(source)
    elif lora:
        base = base or lora["base_model_name_or_path"]
        known = _json(posixpath.join(checkpoint, "start_weights.json")).get("model.path")
        tensors = _merged(source, lora, base, target)
        if known not in (None, digest_weights(base)):
            raise UserError(f"{base}: its weights are not those that the adapters were trained on; name the "
                            "directory of those with --base, or write the adapter alone with --adapter")  # fmt: skip
    else:
        tensors = _plain(source, config, target)
    stem = "adapter_model" if adapter else "model"
    groups = _file_groups(tensors.bytes_of, sys.maxsize if adapter else max_file_bytes)
    writing = f"{out.rstrip('/')}.writing-{os.getpid()}"
    others = ("config.json", "generation_config.json") if adapter else ("adapter_config.json",)
    shutil.copytree(assets, writing, ignore=shutil.ignore_patterns(*others))
    try:
        weight_map, total, files = {}, 0, []
        for i, group in enumerate(groups):
            file = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            written = {
                name: tensor.to(target) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.read(group).items()
            }
            save_file(written, os.path.join(writing, file), metadata={"format": "pt"})
            total += sum(t.numel() * t.itemsize for t in written.values())
            weight_map |= dict.fromkeys(written, file)
            files.append(file)
        if len(groups) > 1:
            with open(os.path.join(writing, "model.safetensors.index.json"), "w") as index:
                json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
        if not adapter:
            with open(os.path.join(writing, "config.json"), "w") as file:
                json.dump({**config, "dtype": dtype}, file, indent=2)
        sync_tree(writing)
        os.rename(writing, out)
        sync_directory(os.path.dirname(os.path.abspath(out)))
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    return files


def _plain(source: str, config: dict[str, Any], target: torch.dtype) -> _Source:
    known = {
        name.removeprefix(_MODEL): meta
        for name, meta in shapes(source).items()
        if name.startswith(_MODEL) and not (config.get("tie_word_embeddings") and name == f"{_MODEL}lm_head.weight")
    }
    sizes = {}
    for name, meta in known.items():
        own = meta.properties.dtype
        sizes[name] = meta.size.numel() * (target if own.is_floating_point else own).itemsize

    def fetch(names: list[str]) -> dict[str, Tensor]:
        found = read(source, [f"{_MODEL}{name}" for name in names])
        return {name.removeprefix(_MODEL): tensor for name, tensor in found.items()}

    return _Source(sizes, fetch)


def _adapter(source: str) -> _Source:
    """The adapters under the names of peft's files."""
    known = {
        f"base_model.model.{name.removeprefix(_MODEL).replace('.default.', '.')}": name
        for name in shapes(source)
        if name.startswith(_MODEL)
    }

    def fetch(names: list[str]) -> dict[str, Tensor]:
        found = read(source, [known[name] for name in names])
        return {name: found[known[name]] for name in names}

    return _Source(dict.fromkeys(known, 0), fetch)


def _merged(source: str, lora: dict[str, Any], base: str, target: torch.dtype) -> _Source:
    """The weights in the directory `base` with the adapters in them."""
    from safetensors import safe_open

    index = _json(os.path.join(base, "model.safetensors.index.json"))
    files = [os.path.join(base, name) for name in sorted(set(index.get("weight_map", {}).values()))]
    files = files or sorted(glob.glob(os.path.join(base, "model*.safetensors")))
    if not files:
        raise UserError(f"{base}: holds no safetensors, and the adapters belong to the weights that were there; name "
                        "their directory with --base, or write the adapter alone with --adapter")  # fmt: skip
    place, sizes = {}, {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118, it is no dict
                place[name] = file
                sizes[name] = math.prod(weights.get_slice(name).get_shape()) * target.itemsize
    a, b = ".lora_A.default.weight", ".lora_B.default.weight"
    own = [name.removeprefix(_MODEL) for name in shapes(source) if name.startswith(_MODEL)]
    adapted = {f"{name.removesuffix(a)}.weight" for name in own if name.endswith(a)}
    if not adapted <= set(place):
        raise UserError(f"{base}: has no {sorted(adapted - set(place))[0]}, which has an adapter; its files name the "
                        "weights in their own way, so write the adapter alone with --adapter")  # fmt: skip
    scale = lora["lora_alpha"] / lora["r"]

    def fetch(names: list[str]) -> dict[str, Tensor]:
        layers = {name: f"{_MODEL}{name.removesuffix('.weight')}" for name in names if name in adapted}
        own = read(source, [f"{layer}{part}" for layer in layers.values() for part in (a, b)]) if layers else {}
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


def _json(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return json.load(file)
