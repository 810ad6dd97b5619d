"""The checkpoints of one run in one storage.

A save writes to a staging area, which no reader sees, and `commit` turns it into a checkpoint. There are two ways to
commit: a disk renames the directory of the staging area (`LocalStore`); any other storage puts the manifest last, on
the condition that this job's reservation is there (`ObjectStore`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import secrets
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import NAME, RunLock
from trainer.checkpoint.manifest import FOLDER, LATEST, MANIFEST, Fields, step_in
from trainer.checkpoint.storage import JOURNAL, LocalStorage, Storage, for_each, open_storage
from trainer.errors import UserError, one_line
from trainer.files.atomic_io import drop_from_page_cache
from trainer.files.documents import parse_object
from trainer.files.uris import absolute, is_url, store_spec
from trainer.process.failpoints import failpoint

_STAGING, _TOMBSTONE, _ARCHIVED, _PROBE, _RECORD = ".writing-", ".deleting-", ".aside-", ".probe-", ".record"
_ASIDE = ".aside"
BOOKKEEPING = (".lock", _RECORD, JOURNAL)  # what a store keeps for itself: names, by their beginning
_RESERVATION = re.compile(FOLDER.encode() + rb"[0-9a-f]{16}")  # see `_new_folder`
_RESERVATION_BYTES = len(FOLDER) + 16
_PARALLEL = 16
_INTERRUPTED = {_STAGING: "an interrupted save", _TOMBSTONE: "an interrupted deletion", _PROBE: "an interrupted test"}


def open_store(root: str) -> CheckpointStore:
    """Return the store in the directory, or at the URL, `root`."""
    storage = open_storage(root)
    return ObjectStore(storage) if storage.disk is None else LocalStore(storage.disk)


class CheckpointStore:
    """The checkpoints of one run. Every method raises OSError if the storage fails."""

    def __init__(self, storage: Storage):
        self.storage = storage
        self.root = storage.root
        self.keeps_record = storage.disk is None
        """Whether checkpoints hold the files of the run directory, because the disk of the driver may be lost."""
        self.tiers: list[CheckpointStore] = [self]  # the stores that this one consists of

    def locks(self, lease_s: float, name: str, remedy: str) -> list[RunLock]:
        """Return the locks of the storage, not yet taken."""
        return [RunLock(self.root, lease_s, name, remedy)]

    def path(self, step: int) -> str:
        """Return the path or URL of the checkpoint of a step, which need not exist."""
        return f"{self.root}/{_name(step)}"

    def write_latest(self, step: int) -> None:
        """Write the newest step to a file for people and tools. This project never reads it."""
        self.storage.put(LATEST, f"{step}\n".encode())

    def delete(self, step: int) -> None:
        """Delete a checkpoint, atomically at first, so that a kill cannot leave one that is half deleted."""
        orphan = self.tombstone(step)
        failpoint("save:deleting")
        self.remove(orphan)

    # ---------------------------------------------------------------------------------------------------
    # What each way to commit does for itself

    def steps(self) -> list[int]:
        """Return the steps that are committed, ascending."""
        raise NotImplementedError

    def begin(self, step: int) -> Storage:
        """Return an empty staging area. A random token in its name keeps it apart from every other."""
        raise NotImplementedError

    def commit(self, staging: Storage, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        """Turn a staging area into the checkpoint of a step.

        Args:
            manifest: its fields (see `trainer.checkpoint.manifest.dump`).
            before_commit: called immediately before the commit. If it raises, nothing is committed.
        """
        raise NotImplementedError

    def abort(self, staging: Storage) -> None:
        """Delete a staging area."""
        raise NotImplementedError

    def tombstone(self, step: int) -> str:
        """Take a checkpoint out of service atomically; returns the name of its remains, for `remove`."""
        raise NotImplementedError

    def archive(self, step: int) -> str:
        """Take a checkpoint out of service and keep it; returns its new name."""
        raise NotImplementedError

    def archived(self, step: int | None = None) -> list[str]:
        """Return the names of archived checkpoints of this step (None: of any step)."""
        raise NotImplementedError

    def orphans(self) -> dict[str, str]:
        """Return the names of what interrupted operations have left, and the kind of each."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Delete what `orphans`, `tombstone` or `archived` names."""
        raise NotImplementedError

    def fence(self) -> None:
        """Let no other job commit what it has begun. The caller must hold the lock."""
        raise NotImplementedError

    def probe(self) -> None:
        """Test the operations of a save with a small file, which is read back. Raises OSError: an operation failed."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------
    # The carried record: pieces of the files of the run directory, by their content, which checkpoints share

    def keep_piece(self, name: str, data: bytes) -> None:
        try:
            self.storage.size(f"{_RECORD}/{name}")
        except FileNotFoundError:
            self.storage.put(f"{_RECORD}/{name}", data)

    def piece(self, name: str) -> bytes:
        return self.storage.get(f"{_RECORD}/{name}")

    def pieces(self) -> list[str]:
        return [name for name in self.storage.names(_RECORD) if not name.endswith(".tmp")]

    def remove_pieces(self, names: Collection[str]) -> None:
        for_each(lambda name: self.storage.delete(f"{_RECORD}/{name}"), names)

    # ---------------------------------------------------------------------------------------------------
    # What only a store of two tiers does for itself: in another, a commit is the end of a save

    def locations(self, step: int) -> list[str]:
        """Return where the checkpoint of a step may be, the nearest first."""
        return [self.path(step)]

    def start_uploads(self, fence: Callable[[], None]) -> None:
        """Begin to upload what is not uploaded. `fence` raises if this process has lost one of its locks."""

    def not_yet_uploaded(self) -> set[int]:
        """Return the steps that must stay until a newer one is uploaded."""
        return set()

    def finish_uploads(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, or for `timeout_s`, and end the uploads."""


class LocalStore(CheckpointStore):
    """Checkpoints as directories. The rename of a staging area to `global_step_N` is its commit.

    .writing-…     a staging area, of a save that is under way or was killed
    .deleting-…    a tombstone: a checkpoint that is out of service and not removed yet
    .aside-…       an archived checkpoint, because the run went back to an older one
    """

    def __init__(self, disk: LocalStorage):
        super().__init__(disk)
        self._disk = disk
        self._tried: dict[int, bytes] = {}  # the manifests of the commits that this process has tried

    def steps(self) -> list[int]:
        return sorted(step for step in map(step_in, self.storage.names()) if step is not None)

    def begin(self, step: int) -> Storage:
        staging = LocalStorage(self._disk.path(f"{_STAGING}{_name(step)}-{secrets.token_hex(4)}"))
        os.makedirs(staging.root)
        return staging

    def commit(self, staging: Storage, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        data = manifests.dump(manifest)
        if os.path.exists(self.path(step)):
            if self.storage.get(f"{_name(step)}/{MANIFEST}") != self._tried.get(step):
                raise OSError(errno.EEXIST, f"{self.path(step)} has been committed by another job")
            self._disk.sync("", [])
            self.abort(staging)  # an earlier try, which seemed to have failed, is the checkpoint
            return
        name = os.path.basename(staging.root)
        self._disk.sync(name)
        staging.write(MANIFEST, data)
        before_commit()
        self._tried[step] = data
        self._disk.rename(name, _name(step))

    def abort(self, staging: Storage) -> None:
        staging.delete_below("")

    def tombstone(self, step: int, prefix: str = _TOMBSTONE) -> str:
        name = f"{prefix}{_name(step)}-{secrets.token_hex(4)}"
        self._disk.rename(_name(step), name)
        return name

    def archive(self, step: int) -> str:
        return self.tombstone(step, _ARCHIVED)

    def archived(self, step: int | None = None) -> list[str]:
        prefix = _ARCHIVED if step is None else f"{_ARCHIVED}{_name(step)}-"
        return [name for name in self.storage.names() if name.startswith(prefix)]

    def orphans(self) -> dict[str, str]:
        return {
            name: kind
            for name in self.storage.names()
            for prefix, kind in _INTERRUPTED.items()
            if name.startswith(prefix)
        }

    def remove(self, name: str) -> None:
        if name.startswith(_STAGING):  # the job that has begun it may be about to commit it
            name, staging = _TOMBSTONE + name.removeprefix(_STAGING), name
            os.rename(self._disk.path(staging), self._disk.path(name))
        path = self._disk.path(name)
        if os.path.isdir(path) and not os.path.islink(path):
            self.storage.delete_below(name)
        else:
            os.remove(path)

    def fence(self) -> None:
        """Do nothing: a staging area that is removed loses its name first, so no other job can commit it any more."""

    def probe(self) -> None:
        name, data = f"{_PROBE}{secrets.token_hex(4)}", secrets.token_bytes(64)
        renamed = f"{name}-renamed"
        try:
            self.storage.put(f"{name}/file", data)
            self._disk.sync(name)
            self._disk.rename(name, renamed)
            drop_from_page_cache(self._disk.path(f"{renamed}/file"))  # so that the next read comes from the disk
            if self.storage.get(f"{renamed}/file") != data:
                raise OSError(errno.EIO, "a file is not read back as it was written")
        finally:
            for left in (name, renamed):
                with contextlib.suppress(OSError):
                    self.storage.delete_below(left)


class ObjectStore(CheckpointStore):
    """Checkpoints in a storage that does not rename. The put of a manifest over the job's reservation is the commit.

    global_step_N/manifest.json      the commit; its field `folder` names the folder of the files. Before: a reservation
    global_step_N/files-…/…          the files of a staging area or a checkpoint
    .aside/…                         the manifest of an archived checkpoint

    A reservation is the name of a folder and nothing else, and counts as no manifest. A job reserves a step, looks at
    its lock, and puts the manifest on the condition that its reservation is still there. A job that has taken over the
    lock first replaces the reservations of others. Only then it decides what to delete: what another job has begun
    cannot be committed any more.
    """

    def __init__(self, storage: Storage):
        super().__init__(storage)
        self._begun: set[str] = set()
        self._open: set[str] = set()  # those of `_begun` that are still written
        self._uncertain: set[str] = set()

    def steps(self) -> list[int]:
        return [step for step, size in self._sizes().items() if size != _RESERVATION_BYTES]

    def begin(self, step: int) -> Storage:
        folder = _new_folder()
        self._begun.add(folder)
        self._open.add(folder)
        return open_storage(f"{self.path(step)}/{folder}")

    def commit(self, staging: Storage, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        folder = posixpath.basename(staging.root)
        data = manifests.dump({**manifest, "folder": folder})
        etag = self._reserve(step, folder)
        if etag is not None:
            before_commit()
            self._uncertain.add(folder)  # a request that seems to have failed can still be done later
            committed = self.storage.put_if(_manifest(step), data, etag)
            self._uncertain.discard(folder)
            if committed:
                self._open.discard(folder)
                return
        if self._folder_in(_manifest(step)) not in self._begun:
            raise OSError(errno.EEXIST, f"{self.path(step)}: another job writes here")
        self.abort(staging)  # an earlier try, which seemed to have failed, is the checkpoint

    def fence(self) -> None:
        for step, size in self._sizes().items():
            if size == _RESERVATION_BYTES:
                content, etag = self.storage.get_with_etag(_manifest(step))
                if _RESERVATION.fullmatch(content) and content.decode() not in self._open:
                    self.storage.put_if(_manifest(step), _new_folder().encode(), etag)

    def abort(self, staging: Storage) -> None:
        """Delete a staging area, unless its manifest may still appear."""
        folder = posixpath.basename(staging.root)
        self._open.discard(folder)
        if folder not in self._uncertain:
            staging.delete_below("")

    def tombstone(self, step: int) -> str:
        name = posixpath.join(f"global_step_{step}", self._folder_in(_manifest(step)) or "")
        self.storage.delete(_manifest(step))
        return name

    def archive(self, step: int) -> str:
        name = f"{_ASIDE}/global_step_{step}-{secrets.token_hex(4)}.json"
        self.storage.put(name, self.storage.get(_manifest(step)))
        self.storage.delete(_manifest(step))
        return name

    def archived(self, step: int | None = None) -> list[str]:
        prefix = f"{_ASIDE}/" if step is None else f"{_ASIDE}/global_step_{step}-"
        return [name for name in self.storage.list(_ASIDE) if name.startswith(prefix)]

    def orphans(self) -> dict[str, str]:
        listed = self.storage.list()
        kept = {self._folder_in(name) for name in listed if name.startswith(f"{_ASIDE}/")}
        found = {name: "an interrupted test" for name in listed if name.startswith(_PROBE)}
        split = (name.split("/") for name in listed)
        for parent, folder in sorted({(parts[0], parts[1]) for parts in split if len(parts) > 2}):
            step = step_in(parent)
            is_staging = folder.startswith(FOLDER) and folder not in kept | self._open
            if step is not None and is_staging and self._folder_in(_manifest(step)) not in (folder, None):
                found[f"{parent}/{folder}"] = "an interrupted save or deletion"
        return found

    def remove(self, name: str) -> None:
        if name.startswith(f"{_ASIDE}/"):
            step = step_in(posixpath.basename(name).partition("-")[0])
            folder = self._folder_in(name)
            if folder and folder != self._folder_in(_manifest(step or 0)):
                self.storage.delete_below(f"global_step_{step}/{folder}")
        self.storage.delete_below(name)
        self.storage.delete(name)

    def probe(self) -> None:
        key, data = f"{_PROBE}{secrets.token_hex(8)}", secrets.token_bytes(64)
        try:
            if not self.storage.put_if(key, data, None) or self.storage.get(key) != data:
                raise OSError(errno.EIO, "an object is not read back as it was written")
            if self.storage.put_if(key, data + b"again", None):
                raise OSError(
                    errno.EOPNOTSUPP, "the object store overwrites an object although the request says If-None-Match: *"
                )
        finally:
            with contextlib.suppress(OSError):
                self.storage.delete(key)

    # ---------------------------------------------------------------------------------------------------

    def _sizes(self) -> dict[int, int]:
        """Return the sizes of all manifests and reservations by step, ascending."""
        sizes: dict[int, int] = {}

        def look(step: int) -> None:
            with contextlib.suppress(FileNotFoundError):
                sizes[step] = self.storage.size(_manifest(step))

        for_each(look, [step for step in map(step_in, self.storage.names()) if step is not None], _PARALLEL)
        return dict(sorted(sizes.items()))

    def _reserve(self, step: int, folder: str) -> str | None:
        """Reserve a step, also over another reservation; returns its etag. None: another job has committed."""
        key, reservation = _manifest(step), folder.encode()
        if not self.storage.put_if(key, reservation, None):
            content, etag = self.storage.get_with_etag(key)
            if not _RESERVATION.fullmatch(content) or not self.storage.put_if(key, reservation, etag):
                return None
        content, etag = self.storage.get_with_etag(key)
        return etag if content == reservation else None

    def _folder_in(self, name: str) -> str | None:
        """Return the folder that a manifest names; empty: there is no manifest; None: it is damaged."""
        try:
            content = self.storage.get(name)
            return "" if _RESERVATION.fullmatch(content) else str(parse_object(content)["folder"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError):
            return None


def _manifest(step: int) -> str:
    return f"global_step_{step}/{MANIFEST}"


def _new_folder() -> str:
    return f"{FOLDER}{secrets.token_hex(8)}"


def _name(step: int) -> str:
    return f"global_step_{step}"


# ---------------------------------------------------------------------------------------------------
# Access of ranks to the storage of the checkpoints


class Ranks(Protocol):
    """What checkpoints need of the ranks, which hold the models (see `trainer.learner.train_workers`)."""

    @property
    def saved_roles(self) -> list[str]: ...

    def begin_save(self, files: Any) -> Callable[[], list[dict]]: ...

    def load(self, role: str, files: Any, kinds: Collection[str], steps_added: int = 0) -> None: ...

    def ask(self, numbers: Collection[int] | None, value: Any, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` of a copy of `value` on these ranks (None: on all), and return their answers by number.

        Any thread may ask, while the ranks do other things.
        """
        ...


@dataclass(frozen=True)
class StorageProbe:
    """Looks at the storage of the checkpoints from the machine of a rank. It is plain data, so that it can be sent."""

    root: str

    def take(self, variables: Mapping[str, str], identity: Collection[str]) -> None:
        """Set variables that this machine has not set itself, but none that names a file that it does not have.

        A machine that has a variable of `identity` keeps its own (see `StoreSpec.identity`).
        """
        own = identity if any(name in os.environ for name in identity) else ()
        for name, value in variables.items():
            if name not in own and (not os.path.isabs(value) or os.path.exists(value)):
                os.environ.setdefault(name, value)
        if (config := sys.modules.get("fsspec.config")) is not None:  # it has read its variables already
            config.set_conf_env(config.conf)

    def problem(self, driver: str, lock: bytes) -> tuple[str, str]:
        """Return the name of this machine, and why checkpoints cannot be written from it; empty if they can. `driver`:
        the name of the driver's machine. `lock`: the content of the lock that the driver holds there."""
        host, problem = socket.gethostname(), ""
        if host == driver:
            return host, ""
        if (storage := open_storage(self.root)).disk is not None:
            problem = "it is not the directory of the driver"
            with contextlib.suppress(OSError):
                problem = "" if storage.get(NAME) == lock else problem
            return host, problem
        try:
            open_store(self.root).probe()
        except (OSError, UserError) as error:
            problem = one_line(str(error))
        return host, problem


def give_access(roots: Collection[str | None], ranks: Ranks) -> None:
    """Let ranks use the credentials of the driver for the object stores that these roots are in.

    They go from process to process: unlike the environment of an actor, Ray does not show them. Ranks on the driver's
    own machine need them, too: on a cluster that was there before, they have the environment of `ray start`.
    """
    urls = [root for root in roots if root and is_url(root)]
    stores = {store: url for url in urls if (store := store_spec(url))}
    for store, root in stores.items():
        beginnings = tuple(name for name in store.variables if name.endswith("_"))
        variables = {
            name: value for name, value in os.environ.items() if name in store.variables or name.startswith(beginnings)
        }
        ranks.ask(None, StorageProbe(root), "take", variables, store.identity)


def check_access(key: str, root: str, ranks: Ranks) -> None:
    """Check that checkpoints can be written from all machines with ranks. This process must hold the lock of `root`.
    `key`: the config key that names `root`. Raises UserError: from some they cannot."""
    probe = StorageProbe(absolute(root))  # ranks on other machines have another working directory
    storage, lock = open_storage(root), b""
    if is_disk := storage.disk is not None:
        with contextlib.suppress(FileNotFoundError):
            lock = storage.get(NAME)
    answers = ranks.ask(None, probe, "problem", socket.gethostname(), lock).values()
    if failed := {host: problem for host, problem in sorted(answers) if problem}:
        remedy = "mount it on all of them" if is_disk else "give every machine with ranks access to the store"
        hosts, reason = ", ".join(failed), next(iter(failed.values()))
        raise UserError(f"{key}={root}: ranks on {hosts} cannot write checkpoints there ({reason}); {remedy}")
