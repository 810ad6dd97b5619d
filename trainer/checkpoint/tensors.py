"""The tensors of a checkpoint without ranks: compared, and exported, a bounded number of bytes at a time."""

from __future__ import annotations

import json
import os
import posixpath
import shutil
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.safe_dcp import SafePlanner, SafeReader, load_metadata
from trainer.durable import sync_directory, sync_tree
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
    for role in ("policy", "critic"):
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


def export(checkpoint: str, out: str, dtype: str, max_file_bytes: int) -> list[str]:
    """Write the policy as a Hugging Face directory, whole or not at all. Holds one file's tensors at a time.

    Args:
        dtype: `auto` (the config's), `float32`, `bfloat16` or `float16`.

    Returns:
        the names of the weight files.

    Raises:
        UserError: `out` exists, or the checkpoint holds no policy.
    """
    from safetensors.torch import save_file

    source, assets = posixpath.join(checkpoint, "policy"), posixpath.join(checkpoint, "policy", "huggingface")
    if os.path.exists(out):
        raise UserError(f"{out}: exists already; name another directory")
    if not os.path.exists(posixpath.join(assets, "config.json")):
        raise UserError(f"{checkpoint}: holds no policy with its Hugging Face config")
    with open(posixpath.join(assets, "config.json")) as file:
        config = json.load(file)
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    target = getattr(torch, dtype)
    known = {name: meta for name, meta in shapes(source).items() if name.startswith(_MODEL)}
    names = [name for name in known if not (config.get("tie_word_embeddings") and name == f"{_MODEL}lm_head.weight")]
    groups = _file_groups(names, known, target, max_file_bytes)
    writing = f"{out.rstrip('/')}.writing-{os.getpid()}"
    shutil.copytree(assets, writing)
    try:
        weight_map, total, files = {}, 0, []
        for i, group in enumerate(groups):
            single = len(groups) == 1
            file = "model.safetensors" if single else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            tensors = {
                name.removeprefix(_MODEL): tensor.to(target) if tensor.is_floating_point() else tensor
                for name, tensor in read(source, group).items()
            }
            save_file(tensors, os.path.join(writing, file), metadata={"format": "pt"})
            total += sum(t.numel() * t.itemsize for t in tensors.values())
            weight_map |= dict.fromkeys(tensors, file)
            files.append(file)
        if len(groups) > 1:
            with open(os.path.join(writing, "model.safetensors.index.json"), "w") as index:
                json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, index, indent=2)
        with open(os.path.join(writing, "config.json"), "w") as file:
            json.dump({**config, "dtype": dtype}, file, indent=2)
        sync_tree(writing)
        os.rename(writing, out)
        sync_directory(os.path.dirname(os.path.abspath(out)))
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    return files


def _file_groups(names: list[str], known: dict[str, TensorStorageMetadata], dtype: torch.dtype,
                 max_file_bytes: int) -> list[list[str]]:  # fmt: skip
    groups: list[list[str]] = [[]]
    used = 0
    for name in names:
        own = known[name].properties.dtype
        size = known[name].size.numel() * (dtype if own.is_floating_point else own).itemsize
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups
