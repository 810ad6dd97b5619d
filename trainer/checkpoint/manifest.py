"""One checkpoint: its files, and `manifest.json`, which has their hashes and makes them a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Any

from trainer import __version__
from trainer.checkpoint.storage import FileEntry, Storage, for_each, open_storage
from trainer.errors import UserError, one_line
from trainer.files.atomic_io import digest_bytes, is_unrelated_to_content
from trainer.files.documents import ObjectShape, Shape, is_count, is_number, mismatch, parse_object

MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"  # a file in the directory of checkpoints, for people and tools
_STEP_DIRECTORY = re.compile(r"^global_step_(0|[1-9][0-9]{0,17})\Z")
FOLDER = "files-"  # begins the name of the folder that holds the files of a checkpoint in an object store
Fields = dict[str, Any]  # the fields of a manifest, of which `files` has a dict for each `FileEntry`
FORMAT_VERSION = 2
VERIFY = ("hash", "unsharded", "size")
"""What a check of the files of a checkpoint compares: sizes and contents; the same, except contents of shards, which
ranks check when they load them (see `sharded.checked_shards`); sizes alone."""
_SHARD = re.compile(r"__([0-9]+)_[0-9]+\.distcp\Z")
_HASH = re.compile(r"[0-9a-f]{32}")
_HASHERS = min(16, os.cpu_count() or 1)


def step_in(path: str) -> int | None:
    """Return the step in the name of a checkpoint; None if the name does not belong to a checkpoint."""
    match = _STEP_DIRECTORY.match(posixpath.basename(path.rstrip("/")))
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read."""

    path: str
    step: int
    manifest: dict[str, Any]

    @property
    def files(self) -> Storage:
        """The files of the checkpoint."""
        return open_storage(posixpath.join(self.path, self.manifest.get("folder", "")))

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
            manifest = parse_object(open_storage(path).get(MANIFEST), {"format_version": is_count})
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
    does not name the file. Raises CorruptCheckpointError: the file is missing, is not JSON, or does not have the
    `shape`."""
    if missing_ok and all(entry.path != name for entry in checkpoint.entries):
        return {}
    with reading(checkpoint.path, name):
        return parse_object(checkpoint.files.get(name), shape)


def verify(path: str, level: str = "hash") -> Checkpoint:
    """Read the manifest of the checkpoint at `path`, and check the files that it names. `level`: of `VERIFY`. Raises
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
                size = files.size(entry.path)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{path}: {entry.path} is missing") from None
        if size != entry.bytes:
            raise CorruptCheckpointError(f"{path}: {entry.path} has {size} bytes instead of {entry.bytes}")

    for_each(check_size, entries, _HASHERS)
    if level != "size":
        shards = checkpoint.shards if level == "unsharded" else ()
        for_each(partial(check_digest, checkpoint), [one for one in entries if one not in shards], _HASHERS)


def check_digest(checkpoint: Checkpoint, entry: FileEntry, copy: int | None = None) -> None:
    """Check the content of one file of a checkpoint (see `verify` and `Storage.digest`)."""
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
