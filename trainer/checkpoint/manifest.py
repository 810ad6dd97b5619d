"""One checkpoint: its files, and `manifest.json`, which has their hashes and makes them a checkpoint."""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import NoneType
from typing import IO, Any

import xxhash

from trainer import __version__
from trainer.checkpoint.storage import Storage, for_each, open_storage
from trainer.errors import UserError, one_line
from trainer.files.atomic_io import digest_bytes, digest_file, is_unrelated_to_content
from trainer.files.documents import ObjectShape, Shape, is_count, is_number, mismatch, parse_object

MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"  # a file in the directory of checkpoints, for people and tools
_STEP_DIRECTORY = re.compile(r"^global_step_(0|[1-9][0-9]{0,17})\Z")
FOLDER = "files-"
"""How the name of a folder begins that holds the files of a checkpoint in an object store."""
_READ_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20
Fields = dict[str, Any]  # the fields of a manifest, of which `files` has a dict for each `FileEntry`
FORMAT_VERSION = 2
VERIFY = ("hash", "unsharded", "size")
"""What a check of the files of a checkpoint compares: sizes and contents; the same, except contents of shards, which
ranks check when they load them (see `sharded.checked_shards`); sizes alone."""
_SHARD = re.compile(r"__([0-9]+)_[0-9]+\.distcp\Z")
_HASH = re.compile(r"[0-9a-f]{32}")
_HASHERS = min(16, os.cpu_count() or 1)
_PARALLEL = 4


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its path below the checkpoint, its size and its xxh3-128."""

    path: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class CheckpointFiles:
    """The files below the root of a storage. What this process has written is measured and hashed on its way."""

    storage: Storage
    written: dict[str, FileEntry] = field(default_factory=dict, compare=False)
    """The files that were written through this value, by path."""

    @property
    def path(self) -> str:
        """The path or URL of the files."""
        return self.storage.root

    @property
    def folder(self) -> str:
        """The name of the folder below the checkpoint that holds the files; empty: there is none."""
        name = posixpath.basename(self.path)
        return name if self.storage.disk is None and name.startswith(FOLDER) else ""

    def read(self, path: str) -> bytes:
        """Return the content of a file. No component of `path` may be a link."""
        return self.storage.get(path)

    def write(self, path: str, data: bytes) -> FileEntry:
        """Write a small file atomically and durably: after a crash it is complete or absent."""
        self.storage.put(path, data)
        self.written[path] = FileEntry(path, len(data), digest_bytes(data))
        return self.written[path]

    @contextlib.contextmanager
    def open_writer(self, path: str) -> Iterator[HashedStream]:
        """Write a large file, durable after the block, except for its name (see `sync`)."""
        with self.storage.open_writer(path) as stream:
            hashed = HashedStream(stream)
            yield hashed
        self.written[path] = FileEntry(path, hashed.tell(), hashed.digest())

    def upload(self, source: str, path: str) -> None:
        """Write the content of a file of this machine."""
        with open(source, "rb") as file, self.open_writer(path) as stream:
            while chunk := file.read(_CHUNK_BYTES):
                stream.write(chunk)

    def digest(self, path: str, copy: int | None = None) -> str:
        """Return the xxh3-128 of a file's content. `copy`: descriptor of a local file that gets the content."""
        if self.storage.disk is not None:
            return digest_file(self.storage.disk.path(path))
        digest, size = xxhash.xxh3_128(), self.storage.size(path)

        def fetch(start: int) -> None:
            data = self.storage.get_range(path, start, min(start + _READ_BYTES, size))
            digest.update(data) if copy is None else os.pwrite(copy, data, start)

        for_each(fetch, range(0, size, _READ_BYTES), 1 if copy is None else _PARALLEL)
        return digest.hexdigest() if copy is None else digest_file(f"/proc/self/fd/{copy}")

    def contains(self, path: str) -> bool:
        """Return whether `path` stays below the root, links included, and has its shortest form.

        A pipe or a device is not inside: reading it could take for ever.
        """
        if posixpath.normpath(path) != path or path.split("/")[0] in ("", ".", ".."):
            return False
        return self.storage.disk is None or self.storage.disk.contains(path)

    def sync(self, folder: str) -> None:
        """Make what was written to a folder durable. An object is durable when its put has been answered."""
        if self.storage.disk is not None:
            names = [posixpath.basename(path) for path in self.written if posixpath.dirname(path) == folder]
            self.storage.disk.sync(folder, names)

    def free_bytes(self) -> int | None:
        """Return the free space of the disk; None: the storage has no end."""
        return None if self.storage.disk is None else shutil.disk_usage(self.path).free


def step_in(path: str) -> int | None:
    """Return the step in the name of a checkpoint; None if the name does not belong to a checkpoint."""
    match = _STEP_DIRECTORY.match(posixpath.basename(path.rstrip("/")))
    return int(match[1]) if match else None


def files_at(path: str) -> CheckpointFiles:
    """Return the files of the checkpoint or staging area at a path or URL."""
    return CheckpointFiles(open_storage(path))


class HashedStream(io.RawIOBase):
    """A stream that hashes what is written to it. To close it does not close the stream below."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        self._hash.update(content)
        self._stream.write(content)
        self._written += len(content)
        return len(content)

    def tell(self) -> int:
        return self._written

    def digest(self) -> str:
        """Return the xxh3-128 of what has been written."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read."""

    path: str
    step: int
    manifest: dict[str, Any]

    @property
    def files(self) -> CheckpointFiles:
        """The files of the checkpoint."""
        return files_at(posixpath.join(self.path, self.manifest.get("folder", "")))

    @property
    def entries(self) -> list[FileEntry]:
        """The files that the manifest names."""
        return [FileEntry(entry["path"], entry["bytes"], entry["hash"]) for entry in self.manifest["files"]]

    @property
    def shards(self) -> dict[FileEntry, int]:
        """The files with tensors, and the number of the rank that has written each."""
        matches = {entry: _SHARD.match(posixpath.basename(entry.path)) for entry in self.entries}
        return {entry: int(match[1]) for entry, match in matches.items() if match is not None}


class CheckpointError(UserError):
    """A checkpoint cannot be used: it is damaged (`CorruptCheckpointError`), or may be whole (the others)."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged. The message names the damaged file.

    Only such a checkpoint may be skipped, so that an older one is used instead, or deleted.
    """


class UnreadableError(CheckpointError):
    """A file of a checkpoint cannot be read now, for a reason that says nothing about its content (no permission)."""


class OtherFormatError(CheckpointError):
    """Another version of this program has written the checkpoint."""


@contextlib.contextmanager
def reading(path: str, name: str) -> Iterator[None]:
    """Raise errors in the block as those of the file `name` of the checkpoint at `path`.

    Raises:
        CorruptCheckpointError: the file is missing, or a ValueError in the block says how it is damaged.
        UnreadableError: the file cannot be read.
        StoreError: the object store fails. This says nothing about the file.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if not is_unrelated_to_content(error):
            raise CorruptCheckpointError(f"{path}: {name} cannot be read ({error.strerror or error})") from error
        raise UnreadableError(f"{path}: {name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: {name} is damaged ({error})") from error


def dump(fields: Fields) -> bytes:
    """Return the bytes of a manifest. The field `self` is a hash of the other fields, so that damage is noticed."""
    files = sorted(fields["files"], key=lambda entry: entry["path"])
    paths = [entry["path"] for entry in files]
    assert len(set(paths)) == len(paths), f"written twice: {paths}"
    others = {name: value for name, value in fields.items() if name not in ("format_version", "files", "self")}
    body = {"format_version": FORMAT_VERSION, **others, "files": files}
    return json.dumps({**body, "self": digest_of(body)}, indent=2).encode()


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


LINEAGE: dict[Any, Shape] = {"forked_from": str, "step": is_count, "manifest": str}
"""The origin of a fork: a checkpoint, its step, and the hash of its manifest."""
CARRIED: dict[Any, Shape] = {
    str: [{"bytes": is_count, "hash": lambda value: isinstance(value, str) and _HASH.fullmatch(value)}]
}
"""The files of the run directory that a checkpoint carries: the pieces of each (see `CheckpointStore.piece`)."""

# Fields of every manifest.
_FIELDS: dict[Any, Shape] = {
    "step": is_count,
    "parts": [str],
    "saved_at": _is_time,
    "parent_step": (is_count, NoneType),
    "files": [{"path": _is_path, "bytes": is_count, "hash": str}],
}
# Fields that a run adds.
_RUN_FIELDS: dict[Any, Shape] = {
    "roles": [_is_path],
    "ranks": is_count,
    "replicas": is_count,
    "versions": {str: str},
    "config_digest": str,
    "score": (is_number, NoneType),
    "parent": (NoneType, LINEAGE),
}
# Fields that some checkpoints have.
_OTHER_FIELDS: dict[Any, Shape] = {
    "axes": {str: is_count},
    "score_metric": str,
    "score_mode": lambda mode: mode in ("max", "min"),
    "score_of_start": (is_number, NoneType),
    "metrics_from": (is_count, NoneType),
    "folder": lambda name: _is_path(name) and "/" not in name and name not in (".", ".."),
    "accepted": [str],
}
OPTIONAL_FIELDS = _RUN_FIELDS | _OTHER_FIELDS  # the shapes of the fields that a manifest may have


def _problem(manifest: dict[str, Any]) -> str | None:
    """Return a description of the first error in the fields of a manifest; None: they are correct."""
    shape = _FIELDS | {name: field for name, field in OPTIONAL_FIELDS.items() if name in manifest}
    if problem := mismatch(manifest, shape):
        return problem
    paths = [entry["path"] for entry in manifest["files"]]
    if not paths:
        return "it names no file"
    if len(set(paths)) < len(paths):
        return "it names a file twice"
    # Only a run has the part `config`, and a run reads these fields.
    return mismatch(manifest, _RUN_FIELDS) if "config" in manifest["parts"] else None


def read(path: str) -> Checkpoint:
    """Read the manifest of the checkpoint at `path`, and check its format, its fields and its hash.

    Raises:
        CorruptCheckpointError: the manifest is missing or damaged, or has other fields or another step.
        OtherFormatError: it has another format.
        UnreadableError: it cannot be read.
    """
    path = path.rstrip("/")
    with reading(path, MANIFEST):
        try:
            manifest = parse_object(files_at(path).read(MANIFEST), {"format_version": is_count})
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path}: not a checkpoint, it has no {MANIFEST}") from None
    if manifest["format_version"] != FORMAT_VERSION:
        other = one_line(str(manifest.get("trainer_version", "another version")))
        raise OtherFormatError(
            f"{path}: {other} of this program has written it in format {manifest['format_version']}, and {__version__} "
            f"reads format {FORMAT_VERSION}; install the version that wrote it, or move the checkpoint away"
        )
    if manifest.get("self") != digest_of({k: v for k, v in manifest.items() if k != "self"}):
        raise CorruptCheckpointError(f"{path}: {MANIFEST} is damaged (its content does not match its own hash)")
    if problem := _problem(manifest):
        raise CorruptCheckpointError(f"{path}: {MANIFEST} is damaged ({problem})")
    if step_in(path) not in (None, manifest["step"]):
        raise CorruptCheckpointError(f"{path}: {MANIFEST} belongs to step {manifest['step']}")
    return Checkpoint(path, manifest["step"], manifest)


def read_object(
    checkpoint: Checkpoint, name: str, shape: ObjectShape | None = None, missing_ok: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a checkpoint. `missing_ok`: return an empty object if the manifest
    does not name the file. CorruptCheckpointError: the file is missing, is not JSON, or does not have the `shape`."""
    if missing_ok and all(entry.path != name for entry in checkpoint.entries):
        return {}
    with reading(checkpoint.path, name):
        return parse_object(checkpoint.files.read(name), shape)


def verify(path: str, level: str = "hash") -> Checkpoint:
    """Read the manifest of the checkpoint at `path`, and check the files that it names. `level`: of `VERIFY`.
    CorruptCheckpointError: names the first file that is missing, is outside of the checkpoint, or differs."""
    checkpoint = read(path)
    check_files(checkpoint, level)
    return checkpoint


def check_files(checkpoint: Checkpoint, level: str) -> None:
    """Check the files of a checkpoint against its manifest (see `verify`)."""
    assert level in VERIFY, level
    path, entries, files = checkpoint.path, checkpoint.entries, checkpoint.files
    folder = checkpoint.manifest.get("folder", "")
    for entry in entries:
        if not files.contains(entry.path):
            raise CorruptCheckpointError(
                f"{path}: {MANIFEST} names {entry.path!r}, which is not inside the checkpoint, or is no file"
            )

    def check_size(entry: FileEntry) -> None:
        with reading(path, posixpath.join(folder, entry.path)):
            try:
                size = files.storage.size(entry.path)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{path}: {entry.path} is missing") from None
        if size != entry.bytes:
            raise CorruptCheckpointError(f"{path}: {entry.path} has {size} bytes instead of {entry.bytes}")

    for_each(check_size, entries, _HASHERS)
    if level != "size":
        shards = checkpoint.shards if level == "unsharded" else ()
        for_each(partial(check_digest, checkpoint), [one for one in entries if one not in shards], _HASHERS)


def check_digest(checkpoint: Checkpoint, entry: FileEntry, copy: int | None = None) -> None:
    """Check the content of one file of a checkpoint (see `verify` and `CheckpointFiles.digest`)."""
    try:
        with reading(checkpoint.path, posixpath.join(checkpoint.manifest.get("folder", ""), entry.path)):
            digest = checkpoint.files.digest(entry.path, copy)
    except CorruptCheckpointError as error:
        digest = f"unreadable: {getattr(error.__cause__, 'strerror', None)}"
    if digest != entry.hash:
        raise CorruptCheckpointError(
            f"{checkpoint.path}: {entry.path} does not have the content that was saved (its hash is {digest} instead "
            f"of {entry.hash})"
        )


def digest_of(body: Fields) -> str:
    """Return a hash of the fields of a document, which the document itself holds as `self`."""
    return digest_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
