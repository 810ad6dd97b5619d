"""Read and compare the tensors of a checkpoint without ranks, a bounded number of bytes at a time."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.checkpoint.checkpoint_files import MANIFEST
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, FileEntry, reading
from trainer.checkpoint.safe_dcp import SafePlanner, load_metadata
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import Shape, parse_object
from trainer.files.hf_hub import first_line

_BATCH_BYTES = 1 << 30


@dataclass(frozen=True)
class NamedFiles:
    """Reads the files that the manifest of a checkpoint names, and no other file."""

    checkpoint: Checkpoint

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return self.checkpoint.path

    @cached_property
    def entries(self) -> dict[str, FileEntry]:
        """The entries of the manifest by path."""
        return {entry.path: entry for entry in self.checkpoint.entries}

    @property
    def roles(self) -> set[str]:
        """The roles whose tensors the checkpoint holds."""
        return {path.partition("/")[0] for path in self.entries if path.endswith("/.metadata")}

    def read(self, path: str) -> bytes:
        """Return the content of a small file.

        Raises:
            CorruptCheckpointError: the content is not the saved content, or `path` contains a link.
        """
        with reading(self.path, path):
            data = self.checkpoint.files.read(path)
        if digest_bytes(data) != self.entries[path].hash:
            raise CorruptCheckpointError(f"{self.path}: {path} does not have the content that was saved")
        return data

    def json(self, path: str, shape: dict[Any, Shape]) -> dict[str, Any]:
        """Return the JSON object in a file; empty if the manifest does not name the file."""
        if path not in self.entries:
            return {}
        with reading(self.path, path):
            return parse_object(self.read(path), shape)

    def shapes(self, role: str) -> dict[str, TensorStorageMetadata]:
        """Return the names, shapes and types of the tensors of a role; empty if the checkpoint lacks the role."""
        if f"{role}/.metadata" not in self.entries:
            return {}
        data = self.read(f"{role}/.metadata")
        try:
            metadata = load_metadata(io.BytesIO(data))
        except UserError as error:
            raise CorruptCheckpointError(f"{self.path}: {role}/{error}") from error
        files = {f"{role}/{info.relative_path}" for info in metadata.storage_data.values()}
        if not files <= set(self.entries):
            unnamed = sorted(files - set(self.entries))[0]
            raise CorruptCheckpointError(
                f"{self.path}: {role}/.metadata needs {unnamed}, which {MANIFEST} does not name"
            )
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        available = sum(self.entries[file].bytes for file in files)
        for name, entry in tensors.items():
            if _bytes(entry) > available:
                raise CorruptCheckpointError(
                    f"{self.path}: {role}/.metadata is damaged ({name} is larger than its files)"
                )
        return tensors

    def tensors(self, role: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors of a role, assembled from the shards of all ranks."""
        known = self.shapes(role)
        wanted = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
        reader = self.checkpoint.files.reader(role)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            try:
                dcp.load(wanted, storage_reader=reader, planner=_Flat(), no_dist=True)
            except dcp.CheckpointException as error:  # a BaseException, so `except Exception` would not catch it
                cause = next(iter(error.failures.values()))[0]
                with reading(self.path, role):
                    if isinstance(cause, OSError):
                        raise cause from None
                raise CorruptCheckpointError(f"{self.path}/{role}: cannot be loaded: {first_line(cause)}") from None
        return wanted


class _Flat(SafePlanner):
    """Uses the names of the checkpoint unchanged."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def compare(a: NamedFiles, b: NamedFiles) -> list[dict[str, Any]]:
    """Return the difference of each tensor of two checkpoints: `relative` is |b - a| / |a|, `largest` max |b - a|."""
    rows: dict[str, dict[str, Any]] = {}
    for role in sorted(a.roles | b.roles, key=lambda name: (name != "policy", name)):
        a_shapes, b_shapes = a.shapes(role), b.shapes(role)
        common = []
        for name in sorted(set(a_shapes) | set(b_shapes)):
            note = None
            if name not in a_shapes or name not in b_shapes:
                note = f"only in {'b' if name not in a_shapes else 'a'}"
            elif a_shapes[name].size != b_shapes[name].size:
                note = f"{tuple(a_shapes[name].size)} became {tuple(b_shapes[name].size)}"
            else:
                common.append(name)
            rows[f"{role}/{name}"] = {"name": f"{role}/{name}", "relative": None, "largest": None, "note": note}
        for names in _batches(common, a_shapes):
            before, after = a.tensors(role, names), b.tensors(role, names)
            for name in names:
                delta = after[name].double() - before[name].double()
                norm = float(before[name].double().norm())
                rows[f"{role}/{name}"] |= {
                    "relative": float(delta.norm()) / max(norm, 1e-30),
                    "largest": float(delta.abs().max()) if delta.numel() else 0.0,
                }
    return list(rows.values())


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


def _bytes(entry: TensorStorageMetadata) -> int:
    """Return the size of a whole tensor in bytes."""
    return math.prod(entry.size) * entry.properties.dtype.itemsize
