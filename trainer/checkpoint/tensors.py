"""The tensors of a checkpoint: DCP's reader and writer for any storage, and what needs no ranks.

Each rank writes one file, and reads the ranges of bytes that it needs. No code in a checkpoint is executed while it
loads.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import posixpath
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, ReadItem
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from trainer.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    CheckpointFiles,
    CorruptCheckpointError,
    FileEntry,
    reading,
)
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import Shape, parse_object
from trainer.files.hf_hub import first_line
from trainer.models.export_weights import in_groups

_PARALLEL = 16
_BATCH_BYTES = 512 << 20


class _FileSystem(FileSystemBase):
    """What DCP needs of a file system. It writes `.metadata` under another name and renames it: here it is put once."""

    def __init__(self, files: CheckpointFiles):
        self._files = files
        self._unnamed: dict[str, bytes] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        name = str(path)
        if mode == "rb":
            yield io.BytesIO()  # `ShardReader` fetches what is read
        elif name.endswith(".tmp"):
            buffer = io.BytesIO()
            yield buffer
            self._unnamed[name] = buffer.getvalue()
        else:
            with self._files.open_writer(name) as stream:
                yield stream

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return posixpath.join(str(path), suffix)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self._files.write(str(new_path), self._unnamed.pop(str(path)))

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # a staging area is new

    def rm_file(self, path: str | os.PathLike) -> None:
        raise NotImplementedError


class ShardWriter(FileSystemWriter):
    """DCP's writer of one file a rank to a folder of `files`, which makes it durable."""

    def __init__(self, files: CheckpointFiles, folder: str):
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self.fs, self.path = _FileSystem(files), folder  # type: ignore[assignment]


class ShardReader(FileSystemReader):
    """Reads from a folder of `files` the bytes of the tensors that this rank needs, several ranges at a time."""

    def __init__(self, files: CheckpointFiles, folder: str):
        super().__init__(folder)
        self.fs, self.path = _FileSystem(files), folder  # type: ignore[assignment]
        self._files = files
        self._fetched: dict[tuple[str, int], bytes] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = load_metadata(io.BytesIO(self._files.read(f"{self.path}/.metadata")))
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            sizes = {n: self.storage_data[item.storage_index].length for n, item in enumerate(plan.items)}
            for numbers in in_groups(sizes, _BATCH_BYTES):  # which bounds the memory
                items = [plan.items[number] for number in numbers]
                stored = (self.storage_data[item.storage_index] for item in items)
                places = {(info.relative_path, info.offset): info.length for info in stored}
                self._fetched = dict(zip(places, pool.map(self._fetch, places.items()), strict=True))
                super().read_data(LoadPlan(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fetch(self, place: tuple[tuple[str, int], int]) -> bytes:
        (name, start), length = place
        return self._files.storage.get_range(f"{self.path}/{name}", start, start + length)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        return io.BytesIO(self._fetched[sinfo.relative_path, sinfo.offset])


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
    """Read DCP's description of the shards without executing code in the file.

    Raises:
        UserError: the file is not a description of shards, names a class that is not allowed, or names a file outside
            of its directory.
    """
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
        reader = ShardReader(self.checkpoint.files, role)
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


def _bytes(entry: TensorStorageMetadata) -> int:
    """Return the size of a whole tensor in bytes."""
    return math.prod(entry.size) * entry.properties.dtype.itemsize
