"""Checkpoints in an object store. The put of a manifest in the place of the job's own claim is the commit.

    global_step_N/manifest.json      the commit; its field `folder` names the folder of the files. Before: a claim
    global_step_N/files-…/…          the files of a draft or a checkpoint
    .steps.json                      the steps that may have a manifest
    .aside/…                         the manifest of a checkpoint that was set aside
    .record/…                        pieces of the files of the run directory, which checkpoints share
    .lock                            the lock

Nothing is renamed, and no list of objects decides what is committed: an older list could hide the newest checkpoint, or
show a deleted one. A step is written to `.steps.json` before its manifest, so this object names every checkpoint.
Whether a step is committed is asked of its manifest alone.

A claim is the name of a folder and nothing else, and counts as no manifest. A job claims a step, looks at its lock, and
puts the manifest on the condition that its claim is still there. A job that has taken over the lock first replaces the
claims of others. Only then it decides what to delete: what another job has begun cannot be committed any more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import posixpath
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import xxhash

from trainer.checkpoint.bucket import Bucket, bucket_of
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.names import HINT, MANIFEST, step_in
from trainer.checkpoint.one_tier import OneTier
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import is_count, parse_object

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader, StorageWriter

_FILES, _ASIDE, _RECORD, _PROBE, _STEPS = "files-", ".aside", ".record", ".probe-", ".steps.json"
_CLAIM = re.compile(_FILES.encode() + rb"[0-9a-f]{16}")  # see `_new_folder`
_CLAIM_BYTES = len(_FILES) + 16
_PARALLEL = 16
_READ_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class ObjectFiles:
    """The objects below a URL. What this process has written is measured and hashed on its way."""

    path: str
    written: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Size and hash of the objects that were written through this value, by path."""
    copies: int = 0
    """The number of other nodes that get copies: none, because a store keeps its own."""

    @property
    def folder(self) -> str:
        """The name of the folder below the checkpoint that holds the files; empty: none."""
        name = posixpath.basename(self.path)
        return name if name.startswith(_FILES) else ""

    @property
    def bucket(self) -> Bucket:
        """The objects of this kind of store."""
        return bucket_of(self.path.partition("://")[0])

    def place(self, path: str = "") -> str:
        """Return the path of an object as the bucket takes it."""
        return posixpath.join(self.path.partition("://")[2], path).rstrip("/")

    def read(self, path: str) -> bytes:
        """Return the content of an object.

        Raises:
            OSError: it is missing, or cannot be read.
        """
        return self.bucket.read(self.place(path))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to before `end`."""
        data = self.bucket.read(self.place(path), start, end)
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{path} ends after {start + len(data)} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Put an object, whole or not at all."""
        self.bucket.write(self.place(path), data)
        self.written[path] = (len(data), digest_bytes(data))

    @contextlib.contextmanager
    def stream(self, path: str) -> Iterator[HashedStream]:
        """Write a large object in parts."""
        with self.bucket.open_for_writing(self.place(path)) as stream:
            hashed = HashedStream(stream)
            yield hashed
        self.written[path] = (hashed.tell(), hashed.digest())

    def upload(self, source: str, path: str) -> None:
        """Put a file of this machine."""
        with open(source, "rb") as file, self.stream(path) as stream:
            while chunk := file.read(_CHUNK_BYTES):
                stream.write(chunk)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects in bytes, by path. The store may answer with an older state."""
        root = f"{self.place()}/"
        return {path.removeprefix(root): size for path, size in sorted(self.bucket.list(self.place()).items())}

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return self.written[path][0] if path in self.written else self.bucket.size(self.place(path))

    def digest(self, path: str) -> str:
        """Return the xxh3-128 of an object's content."""
        if path in self.written:
            return self.written[path][1]
        digest, size = xxhash.xxh3_128(), self.size(path)
        for start in range(0, size, _READ_BYTES):
            digest.update(self.read_range(path, start, min(start + _READ_BYTES, size)))
        return digest.hexdigest()

    def contains(self, path: str) -> bool:
        """Return whether `path` has its shortest form, and stays below the URL."""
        return posixpath.normpath(path) == path and not path.startswith(("/", "../")) and path not in (".", "..")

    def own(self, folder: str, rank: int) -> list[str]:
        """Return the names of the objects in a folder that this process has written."""
        return sorted(posixpath.basename(path) for path in self.written if posixpath.dirname(path) == folder)

    def sync(self, folder: str, names: list[str]) -> None:
        """Do nothing: an object is durable when its put has been answered."""

    def space(self) -> None:
        """Return nothing: an object store has no end."""

    def reader(self, folder: str) -> StorageReader:
        """Return DCP's reader of the shards in a folder. It executes no code in the shards."""
        from trainer.checkpoint.object_shards import ObjectReader

        return ObjectReader(self, folder)

    def writer(self, folder: str) -> StorageWriter:
        """Return DCP's writer of shards to a folder."""
        from trainer.checkpoint.object_shards import ObjectWriter

        return ObjectWriter(self, folder)


class HashedStream(io.RawIOBase):
    """A stream that hashes what is written to it. To close it does not close the stream below."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._hash.update(data)
        self._stream.write(data)
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def digest(self) -> str:
        """Return the xxh3-128 of what has been written."""
        return self._hash.hexdigest()


class ObjectStore(OneTier):
    """Checkpoints below the URL `root`. Every method raises OSError if the store fails."""

    keeps_record = True

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self._files = ObjectFiles(self.root)
        self._begun: set[str] = set()
        self._open: set[str] = set()  # those of `_begun` that are still written
        self._uncertain: set[str] = set()

    @property
    def _bucket(self) -> Bucket:
        return self._files.bucket

    def exists(self) -> bool:
        """Return whether the place exists: a prefix always does."""
        return True

    def lock(self, timeout_s: float, name: str, remedy: str) -> RunLock:
        """Return the lock of the place, not yet taken."""
        from trainer.checkpoint.object_lock import ObjectLock

        return ObjectLock(self._files, timeout_s, name, remedy)

    def names(self) -> list[str]:
        """Return the names of objects and folders directly below the root, as the store lists them."""
        return self._bucket.names(self._files.place())

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, ascending."""
        return [step for step, size in self._sizes().items() if size != _CLAIM_BYTES]

    def path(self, step: int) -> str:
        """Return the URL of the checkpoint of a step, which need not exist."""
        return f"{self.root}/global_step_{step}"

    def begin(self, step: int) -> ObjectFiles:
        """Return an empty draft. A random token in its name keeps it apart from every other."""
        folder = _new_folder()
        self._begun.add(folder)
        self._open.add(folder)
        return ObjectFiles(f"{self.path(step)}/{folder}")

    def publish(self, draft: ObjectFiles, step: int, manifest: bytes, before_commit: Callable[[], None]) -> None:
        """Commit a draft by putting its manifest in the place of a claim.

        Args:
            before_commit: called immediately before the commit. If it raises, nothing is committed.
        """
        self._announce(step)
        tag = self._claim(step, draft.folder)
        if tag is not None:
            before_commit()
            self._uncertain.add(draft.folder)  # a request that seems to have failed can still be done later
            committed = self._bucket.replace(self._manifest(step), manifest, tag)
            self._uncertain.discard(draft.folder)
            if committed:
                self._open.discard(draft.folder)
                return
        if self._folder(step) not in self._begun:
            raise OSError(errno.EEXIST, f"{self.path(step)}: another job writes here")
        self.discard(draft)  # an earlier try, which seemed to have failed, is the checkpoint

    def revoke(self) -> None:
        """Let no other job commit what it has begun. The caller must hold the lock."""
        for step, size in self._sizes().items():
            if size == _CLAIM_BYTES:
                content, tag = self._bucket.read_tagged(self._manifest(step))
                if _CLAIM.fullmatch(content) and content.decode() not in self._open:
                    self._bucket.replace(self._manifest(step), _new_folder().encode(), tag)

    def discard(self, draft: ObjectFiles) -> None:
        """Delete a draft, unless its manifest may still appear."""
        self._open.discard(draft.folder)
        if draft.folder not in self._uncertain:
            self._delete_below(draft.place())

    def withdraw(self, step: int) -> str:
        """Take a checkpoint out of service by deleting its manifest; returns the name of its remains, for `remove`."""
        name = posixpath.join(f"global_step_{step}", self._folder(step) or "")
        self._bucket.delete(self._manifest(step))
        return name

    def set_aside(self, step: int) -> str:
        """Take a checkpoint out of service and keep it; returns its new name."""
        name = f"{_ASIDE}/global_step_{step}-{secrets.token_hex(4)}.json"
        self._bucket.write(self._files.place(name), self._bucket.read(self._manifest(step)))
        self._bucket.delete(self._manifest(step))
        return name

    def asides(self, step: int | None = None) -> list[str]:
        """Return the names of checkpoints of this step (None: of any step) that were set aside."""
        listed = ObjectFiles(f"{self.root}/{_ASIDE}").sizes()
        return [f"{_ASIDE}/{name}" for name in listed if step is None or name.startswith(f"global_step_{step}-")]

    def leftovers(self) -> dict[str, str]:
        """Return the names of the leftovers of interrupted operations, and the kind of each."""
        listed = self._files.sizes()
        kept = {self._folder_in(name) for name in listed if name.startswith(f"{_ASIDE}/")}
        found = {name: "an interrupted test" for name in listed if name.startswith(_PROBE)}
        for parent, folder in sorted(
            {
                (parts[0], parts[1])
                for parts in (name.split("/") for name in listed)
                if len(parts) > 2 and step_in(parts[0]) is not None
            }
        ):
            step = step_in(parent)
            assert step is not None
            is_draft = folder.startswith(_FILES) and folder not in kept | self._open
            if is_draft and self._folder(step) not in (folder, None):
                found[f"{parent}/{folder}"] = "an interrupted save or deletion"
        return found

    def remove(self, name: str) -> None:
        """Delete what `leftovers`, `withdraw` or `asides` names."""
        if name.startswith(f"{_ASIDE}/"):
            step = step_in(posixpath.basename(name).partition("-")[0])
            folder = self._folder_in(name)
            if folder and folder != self._folder(step or 0):
                self._delete_below(self._files.place(f"global_step_{step}/{folder}"))
        self._delete_below(self._files.place(name))
        self._bucket.delete(self._files.place(name))

    def hint(self, step: int) -> None:
        """Write the newest step to an object for people and tools. This project never reads it."""
        self._files.write(HINT, f"{step}\n".encode())

    def probe(self, size: int = 64) -> None:
        """Test the operations of a save: put an object on a condition, read it back, delete it.

        Raises:
            OSError: an operation failed, or the store does not know conditions.
        """
        place, data = self._files.place(f"{_PROBE}{secrets.token_hex(8)}"), secrets.token_bytes(size)
        try:
            if not self._bucket.create(place, data) or self._bucket.read(place) != data:
                raise OSError(errno.EIO, "an object is not read back as it was written")
            if self._bucket.create(place, data + b"again"):
                raise OSError(
                    errno.EOPNOTSUPP, "the object store overwrites an object although the request says If-None-Match: *"
                )
        finally:
            with contextlib.suppress(OSError):
                self._bucket.delete(place)

    def keep_piece(self, name: str, data: bytes) -> None:
        """Keep a piece of a file of the run directory; the name says its content."""
        if not self._bucket.exists(self._files.place(f"{_RECORD}/{name}")):
            self._files.write(f"{_RECORD}/{name}", data)

    def piece(self, name: str) -> bytes:
        """Return a piece that was kept."""
        return self._files.read(f"{_RECORD}/{name}")

    def pieces(self) -> list[str]:
        """Return the names of the pieces that are kept, as the store lists them."""
        return self._bucket.names(self._files.place(_RECORD))

    def remove_pieces(self, names: Collection[str]) -> None:
        """Delete pieces."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(lambda name: self._bucket.delete(self._files.place(f"{_RECORD}/{name}")), names):
                pass

    # ---------------------------------------------------------------------------------------------------

    def _manifest(self, step: int) -> str:
        return self._files.place(f"global_step_{step}/{MANIFEST}")

    def _folder(self, step: int) -> str | None:
        """Return the folder that the manifest of a step names; empty: there is no manifest; None: it is damaged."""
        return self._folder_in(f"global_step_{step}/{MANIFEST}")

    def _sizes(self) -> dict[int, int]:
        """Return the sizes of all manifests and claims by step, ascending."""

        def size(step: int) -> int | None:
            with contextlib.suppress(FileNotFoundError):
                return self._bucket.size(self._manifest(step))
            return None

        listed = {step for step in map(step_in, self.names()) if step is not None}
        steps = sorted(listed | self._announced()[0])
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return {step: size for step, size in zip(steps, pool.map(size, steps), strict=True) if size is not None}

    def _claim(self, step: int, folder: str) -> str | None:
        """Claim a step, in the place of another claim; returns the tag of the claim. None: it has not become ours."""
        place, claim = self._manifest(step), folder.encode()
        if not self._bucket.create(place, claim):
            content, tag = self._bucket.read_tagged(place)
            if not _CLAIM.fullmatch(content) or not self._bucket.replace(place, claim, tag):
                return None
        content, tag = self._bucket.read_tagged(place)
        return tag if content == claim else None

    def _folder_in(self, name: str) -> str | None:
        try:
            content = self._files.read(name)
            return "" if _CLAIM.fullmatch(content) else str(parse_object(content)["folder"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError):
            return None

    def _announced(self) -> tuple[set[int], str | None]:
        """Return the steps that may have a manifest, and the tag of the object that says so; None: there is none."""
        try:
            data, tag = self._bucket.read_tagged(self._files.place(_STEPS))
        except FileNotFoundError:
            return set(), None
        try:
            return set(parse_object(data, {"steps": [is_count]})["steps"]), tag
        except ValueError:  # damaged: the list of objects names the checkpoints, and the next save repairs this
            return set(), tag

    def _announce(self, step: int) -> None:
        """Write a step to `.steps.json`. The condition refuses a job that has lost its lock meanwhile."""
        known, tag = self._announced()
        if step in known:
            return
        data = json.dumps({"steps": sorted({*self._sizes(), step})}).encode()
        place = self._files.place(_STEPS)
        done = self._bucket.create(place, data) if tag is None else self._bucket.replace(place, data, tag)
        if not done:
            raise OSError(errno.EBUSY, f"{self.root}/{_STEPS}: another job writes here")

    def _delete_below(self, place: str) -> None:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(self._bucket.delete, self._bucket.list(place)):
                pass


def _new_folder() -> str:
    return f"{_FILES}{secrets.token_hex(8)}"
