"""The tensors of a checkpoint: DCP's reader and writer for any storage, and what needs no ranks.

Each rank writes one file, and reads the ranges of bytes that it needs. No code in a checkpoint is executed while it
loads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import pickle
import posixpath
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter, ReadItem
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner

from trainer.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    CorruptCheckpointError,
    FileEntry,
    reading,
)
from trainer.checkpoint.sharded import HELD
from trainer.checkpoint.storage import Storage, for_each
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import Shape, parse_object
from trainer.files.hf_hub import first_line
from trainer.models.weight_deltas import bits_of

_PARALLEL = 16
_HEAD_BYTES = 2048  # of a saved tensor; its values begin before
_ENTRY = b"PK\3\4"
_Buffer = bytearray | memoryview


class _FileSystem(FileSystem):
    """What DCP needs of a file system. It writes `.metadata` under another name and renames it: here it is put once."""

    def __init__(self, files: Storage):
        self._files = files
        self._unnamed: dict[str, bytes] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        name = str(path)
        if name.endswith(".tmp"):
            buffer = io.BytesIO()
            yield buffer
            self._unnamed[name] = buffer.getvalue()
        else:
            with self._files.open_writer(name) as stream:
                yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self._files.write(str(new_path), self._unnamed.pop(str(path)))

    def mkdir(self, path: str | os.PathLike) -> None:
        pass

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # a staging area is new


class ShardWriter(FileSystemWriter):
    """DCP's writer of one file a rank to a folder of `files`, which makes it durable."""

    def __init__(self, files: Storage, folder: str):
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self.fs, self.path = _FileSystem(files), folder  # type: ignore[assignment]


class ShardReader:
    """Reads from a folder of `files` the bytes of the tensors that this rank needs, straight into their places."""

    def __init__(self, files: Storage, folder: str):
        self.metadata = load_metadata(io.BytesIO(files.get(f"{folder}/.metadata")))
        self._files, self._folder = files, folder
        self._opened: dict[str, int | None] = {}

    def fill(self, state: dict[str, Any], planner: LoadPlanner | None = None) -> None:
        """Fill the tensors of `state` in place, and replace its plain values. No code in the files is executed."""
        planner, disk = planner or SafePlanner(), self._files.disk
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        items = planner.create_local_plan().items
        with contextlib.ExitStack() as opened:
            for name in {self.metadata.storage_data[item.storage_index].relative_path for item in items}:
                key = f"{self._folder}/{name}"
                self._opened[name] = handle = HELD.get(f"{self._files.root}/{key}")
                if handle is None and disk is not None:
                    self._opened[name] = opened.enter_context(open(disk.path(key), "rb", buffering=0)).fileno()
            parallel = _PARALLEL if None in self._opened.values() else min(torch.get_num_threads(), _PARALLEL)
            for_each(partial(self._load, planner), items, parallel)

    def _load(self, planner: LoadPlanner, item: ReadItem) -> None:
        info = self.metadata.storage_data[item.storage_index]
        read = self._reader(info)
        if item.type == LoadItemType.BYTE_IO:
            return planner.load_bytes(item, io.BytesIO(read(0, bytearray(info.length))))
        dtype, size, stride, position = read_head(bytes(read(0, bytearray(min(_HEAD_BYTES, info.length)))))
        lengths, offsets = tuple(item.lengths), tuple(item.storage_offsets)
        if len(size) != len(lengths) or any(o + n > whole for o, n, whole in zip(offsets, lengths, size, strict=True)):
            raise UserError(f"{info.relative_path} has a tensor of the shape {size}, and another is expected")
        if 0 in lengths:
            return None
        target = planner.resolve_tensor(item).detach()
        view, is_dense = target, torch.empty_strided(lengths, stride, device="meta").is_contiguous()
        is_alike = target.device.type == "cpu" and (target.dtype, target.shape) == (dtype, lengths)
        if not (is_dense and is_alike and target.is_contiguous()):
            count = 1 + sum((length - 1) * step for length, step in zip(lengths, stride, strict=True))
            view = torch.empty(count, dtype=dtype)
        first = sum(offset * step for offset, step in zip(offsets, stride, strict=True))
        read(position + first * dtype.itemsize, memoryview(bits_of(view.view(-1).view(torch.uint8))))
        if view is not target:
            target.copy_(view.as_strided(lengths, stride))
        return None

    def _reader(self, info: _StorageInfo) -> Callable[[int, _Buffer], _Buffer]:
        """Return a function that fills a buffer with the bytes of a stored item from a place on, and returns it."""
        name, handle = info.relative_path, self._opened[info.relative_path]
        data = b""
        if handle is None:  # one request to a store, which costs more than the rest of the item
            data = self._files.get_range(f"{self._folder}/{name}", info.offset, info.offset + info.length)

        def read(start: int, buffer: _Buffer) -> _Buffer:
            view, place = memoryview(buffer), info.offset + start
            if not 0 <= start <= info.length - len(view):
                raise UserError(f"{name} has fewer bytes for a tensor than its shape needs")
            if handle is None:
                view[:] = data[start : start + len(view)]
                return buffer
            while len(view):
                if (count := os.preadv(handle, [view], place)) == 0:
                    raise OSError(errno.EIO, f"{name} ends after {place} bytes")
                view, place = view[count:], place + count
            return buffer

        return read


class SafePlanner(DefaultLoadPlanner):
    """Loads plain values as `weights_only`, because DCP's own planner would execute code in them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        from torch.distributed.checkpoint._nested_dict import set_element

        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded


# ---------------------------------------------------------------------------------------------------
# `.metadata`, a pickle

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Looks up allowed names only. No allowed name has a dot, so attributes of allowed objects are out of reach."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # the first releases of Python 3.11 pickle a member of an enum in this way
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise UserError(f".metadata names {module}.{name}, which no checkpoint needs; it was not executed")
        return super().find_class(module, name)


def _enum_member(*args: Any) -> Any:
    """Return `getattr(*args)` if that is a member of the one enum that DCP stores."""
    match args:
        case (enum, str(name)) if enum is _MEM_FORMAT_ENCODING and name in enum.__members__:
            return enum.__members__[name]
    raise UserError(".metadata calls builtins.getattr, which no checkpoint needs; it was not executed")


def load_metadata(file: Any) -> Metadata:
    """Read DCP's description of the shards without executing code in the file. Raises UserError: the file is not a
    description of shards, names a class that is not allowed, or names a file outside of its directory."""
    try:
        metadata = _MetadataUnpickler(file).load()
        for info in metadata.storage_data.values():
            if posixpath.basename(info.relative_path) != info.relative_path:
                raise UserError(f".metadata names the file {info.relative_path!r}, which is not beside it")
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception, and hold anything
        raise UserError(f".metadata is damaged ({type(error).__name__}: {error})") from error
    return metadata


# ---------------------------------------------------------------------------------------------------
# The head of a tensor that `torch.save` has written: a zip archive without compression


class _HeadUnpickler(pickle.Unpickler):
    """Reads what `torch.save` says of one tensor, and makes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return lambda dtype, offset, size, stride, *_: (dtype, offset, size, stride)
            case "torch._utils", "_rebuild_tensor_v3":  # of types that have no class of storages
                return lambda _, offset, size, stride, grad, hooks, dtype, *__: (dtype, offset, size, stride)
            case "collections", "OrderedDict":
                return OrderedDict
            case ("torch", _) | ("torch.storage", "UntypedStorage"):
                found = vars(torch).get(name, torch.UntypedStorage)
                return found if isinstance(found, torch.dtype) else getattr(found, "_dtype", torch.uint8)
        raise UserError(f"a tensor names {module}.{name}, which no checkpoint needs; it was not executed")

    def persistent_load(self, found: Any) -> Any:
        return found[1]


def read_head(head: bytes) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """Read the beginning of a tensor that `torch.save` has written, without executing code in it.

    Returns:
        its dtype, size and stride, and where its first value is in the archive, in bytes.

    Raises:
        UserError: it is not such a beginning, or names what is not allowed.
    """
    try:
        last = head.index(b"/data/0")
        (dtype, offset, size, stride), order = _described(head[: head.rindex(_ENTRY, 0, last)])
        if order != sys.byteorder:
            raise UserError("a tensor was saved on a machine with another order of bytes")
        return dtype, size, stride, _data_at(head, head.rindex(_ENTRY, 0, last)) + offset * dtype.itemsize
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception, and hold anything
        raise UserError(f"a tensor is damaged ({type(error).__name__}: {error})") from error


@lru_cache(maxsize=256)  # many tensors have the same shape
def _described(entries: bytes) -> tuple[Any, str]:
    """Return what the first entries of an archive say of its tensor, and its order of bytes."""
    stream = io.BytesIO(entries)
    stream.seek(_data_at(entries, 0))
    found = _HeadUnpickler(stream).load()
    order = _data_at(entries, entries.rindex(_ENTRY, 0, entries.index(b"/byteorder", stream.tell())))
    return found, "little" if entries.startswith(b"little", order) else "big"


def _data_at(head: bytes, entry: int) -> int:
    """Return where the content of the entry of a zip archive begins that begins at `entry`."""
    if not head.startswith(_ENTRY, entry):
        raise ValueError("no entry of an archive")
    name, extra = struct.unpack_from("<HH", head, entry + 26)
    return entry + 30 + name + extra


# ---------------------------------------------------------------------------------------------------
# Without ranks, a bounded number of bytes at a time


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

    def read(self, path: str) -> bytes:
        """Return the content of a small file. Raises CorruptCheckpointError: the content is not the saved content, or
        `path` contains a link."""
        with reading(self.path, path):
            data = self.checkpoint.files.get(path)
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
        if unnamed := sorted(files - self.entries.keys()):
            problem = f"needs {unnamed[0]}, which {MANIFEST} does not name"
            raise CorruptCheckpointError(f"{self.path}: {role}/.metadata {problem}")
        found = metadata.state_dict_metadata.items()
        tensors = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
        available = sum(self.entries[file].bytes for file in files)
        for name, entry in tensors.items():
            if math.prod(entry.size) * entry.properties.dtype.itemsize > available:
                problem = f"is damaged ({name} is larger than its files)"
                raise CorruptCheckpointError(f"{self.path}: {role}/.metadata {problem}")
        return tensors

    def tensors(self, role: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors of a role, assembled from the shards of all ranks."""
        known = self.shapes(role)
        wanted = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
        try:
            ShardReader(self.checkpoint.files, role).fill(wanted, SafePlanner(flatten_state_dict=False))
        except Exception as error:
            with reading(self.path, role):
                if isinstance(error, OSError):
                    raise
            raise CorruptCheckpointError(f"{self.path}/{role}: cannot be loaded: {first_line(error)}") from None
        return wanted
