"""How one rank writes and reads its share of a sharded state: DCP, made durable, hashed and safe to load."""

from __future__ import annotations

import io
import os
import pickle
import posixpath
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, ReadItem
from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.manifest import FileEntry
from trainer.durable import digest_file, sync_directory, sync_file, write_file
from trainer.errors import UserError
from trainer.failpoints import failpoint


@dataclass(frozen=True)
class ShardedFiles:
    """The sharded states below one checkpoint directory. Plain data: it travels to the ranks."""

    directory: str

    def write(self, name: str, state: dict[str, Any], extra: dict[str, str], group: dist.ProcessGroup) -> list[dict]:
        """Write this rank's part of `state` below `{directory}/{name}`. A collective over `group`.

        Args:
            state: tensors and DTensors in host memory, and plain values.
            extra: small files that rank 0 adds, by name.

        Returns:
            the entries (`FileEntry` as dicts) of the files that this rank wrote, durable and hashed.

        Raises:
            OSError: a rank could not write; the same on every rank.
        """
        base = posixpath.join(self.directory, name)
        rank = dist.get_rank(group)
        written = []
        try:
            writer = FileSystemWriter(base, single_file_per_rank=True, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=group)
            failpoint("save:shards_written")
            if rank == 0:
                for file, text in extra.items():
                    write_file(posixpath.join(base, file), text)
            own = (f"__{rank}_", ".metadata") if rank == 0 else (f"__{rank}_",)
            written = [file for file in sorted(os.listdir(base)) if file.startswith(own)]
            written += list(extra) if rank == 0 else []
            for file in written:
                sync_file(posixpath.join(base, file))
            sync_directory(base)
        except dcp.CheckpointException as error:  # a BaseException: nothing else catches it
            failed, (cause, _) = next(iter(error.failures.items()))
            # torch's own message about a full disk does not say that it is full.
            free = shutil.disk_usage(self.directory).free / 1e9
            raise OSError(f"rank {failed} could not write {name}: {cause} ({free:.2f} GB are free)") from None
        entries = []
        for file in written:
            path = posixpath.join(base, file)
            entry = FileEntry(posixpath.join(name, file), os.path.getsize(path), digest_file(path))
            entries.append(asdict(entry))
        return entries

    def read(self, name: str, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Fill the tensors of `state`, in place and whatever their sharding, from `{directory}/{name}`.

        Executes nothing that the files hold.
        """
        base = posixpath.join(self.directory, name)
        try:
            dcp.load(state, storage_reader=SafeReader(base), planner=SafePlanner(), process_group=group)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"{base}: cannot be loaded: {cause}") from None

    def read_json(self, name: str, file: str) -> bytes:
        """The content of a small file below `{directory}/{name}`."""
        with open(posixpath.join(self.directory, name, file), "rb") as handle:
            return handle.read()


class SafeReader(FileSystemReader):
    """Reads `.metadata` with an unpickler that knows nothing but what DCP puts there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = load_metadata(file)
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads plain values as `weights_only`; DCP's own planner would execute what they hold."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        from torch.distributed.checkpoint._nested_dict import set_element

        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                 "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise UserError(f".metadata names {module}.{name}, which no checkpoint needs; it was not executed")
        return super().find_class(module, name)


def load_metadata(file: Any) -> Metadata:
    """DCP's description of the shards, read without executing anything that the file holds.

    Raises:
        UserError: it is no such description, names anything else, or leads out of its directory.
    """
    try:
        metadata = _MetadataUnpickler(file).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f".metadata is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
        raise UserError(".metadata does not describe a sharded state")
    for info in metadata.storage_data.values():
        if posixpath.basename(str(info.relative_path)) != str(info.relative_path):
            raise UserError(f".metadata names the file {info.relative_path!r}, which is not beside it")
    return metadata
