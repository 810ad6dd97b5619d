"""Read DCP's files safely: no code in a checkpoint is executed while it loads."""

from __future__ import annotations

import io
import pickle
import posixpath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, ReadItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.errors import UserError
from trainer.files.documents import is_count


class SafeReader(FileSystemReader):
    """Reads `.metadata` with an unpickler that only knows the classes that DCP stores there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = load_metadata(file)
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads plain values as `weights_only`, because DCP's own planner would execute code in them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        from torch.distributed.checkpoint._nested_dict import set_element

        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded


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

    def __init__(self, file: Any):
        super().__init__(file)
        self._given: dict[Any, dict[str, Any]] = {member: dict(vars(member)) for member in _MEM_FORMAT_ENCODING}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # the first releases of Python 3.11 pickle a member of an enum in this way
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise UserError(f".metadata names {module}.{name}, which no checkpoint needs; it was not executed")
        found = super().find_class(module, name)
        if isinstance(found, type):
            self._given.setdefault(found, dict(vars(found)))
        elif not is_dtype:
            return lambda *args: found(*args)  # a wrapper, because a pickle can set attributes of the object
        return found

    def load(self) -> Any:
        """Return the unpickled object.

        Raises:
            UserError: the pickle changed a class or a member of an enum; the change is undone.
        """
        changed = []
        try:
            return super().load()
        finally:
            for owner, before in self._given.items():
                different = {name for name, value in vars(owner).items() if before.get(name) is not value}
                for name in different - {"__slotnames__"}:  # another thread that pickles may add this attribute
                    changed.append(f"{getattr(owner, '__name__', owner)}.{name}")
                    setattr(owner, name, before[name]) if name in before else delattr(owner, name)
            if changed:
                raise UserError(f".metadata sets {changed[0]}, which no checkpoint needs; the change was undone")


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
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise UserError(f".metadata is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not _is_description(metadata):
        raise UserError(".metadata does not describe a sharded state")
    for info in metadata.storage_data.values():
        if posixpath.basename(info.relative_path) != info.relative_path:
            raise UserError(f".metadata names the file {info.relative_path!r}, which is not beside it")
    return metadata


def _is_description(metadata: Metadata) -> bool:
    """Return whether all fields have the types that DCP gives them, because a pickle can set any value."""
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    return (
        isinstance(metadata.storage_meta, StorageMeta)
        and isinstance(entries, dict)
        and all(isinstance(name, str) and _is_entry(entry) for name, entry in entries.items())
        and isinstance(stored, dict)
        and all(isinstance(index, MetadataIndex) and _is_stored(info) for index, info in stored.items())
    )


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.size, torch.Size)
        and min(entry.size, default=0) >= 0
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.properties.dtype, torch.dtype)
    )


def _is_stored(info: Any) -> bool:
    return (
        isinstance(info, _StorageInfo)
        and isinstance(info.relative_path, str)
        and is_count(info.offset)
        and is_count(info.length)
    )
