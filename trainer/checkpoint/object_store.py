"""Checkpoints in a storage that does not rename. The put of a manifest over the job's reservation is the commit.

    global_step_N/manifest.json      the commit; its field `folder` names the folder of the files. Before: a reservation
    global_step_N/files-…/…          the files of a staging area or a checkpoint
    .steps.json                      the steps that may have a manifest
    .aside/…                         the manifest of an archived checkpoint
    .record/…                        pieces of the files of the run directory, which checkpoints share
    .lock                            the lock

Nothing is renamed, and no list of objects decides what is committed: an older list could hide the newest checkpoint, or
show a deleted one. A step is written to `.steps.json` before its manifest, so this object names every checkpoint.
Whether a step is committed is asked of its manifest alone.

A reservation is the name of a folder and nothing else, and counts as no manifest. A job reserves a step, looks at its
lock, and puts the manifest on the condition that its reservation is still there. A job that has taken over the lock
first replaces the reservations of others. Only then it decides what to delete: what another job has begun cannot be
committed any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import posixpath
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.checkpoint_files import FOLDER, MANIFEST, CheckpointFiles, files_at, step_in
from trainer.checkpoint.manifest import Fields
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.store import CheckpointStore
from trainer.files.documents import is_count, parse_object

_ARCHIVE, _PROBE, _STEPS = ".aside", ".probe-", ".steps.json"
_RESERVATION = re.compile(FOLDER.encode() + rb"[0-9a-f]{16}")  # see `_new_folder`
_RESERVATION_BYTES = len(FOLDER) + 16
_PARALLEL = 16


class ObjectStore(CheckpointStore):
    """Checkpoints below the root of a storage."""

    def __init__(self, storage: Storage):
        super().__init__(storage)
        self._begun: set[str] = set()
        self._open: set[str] = set()  # those of `_begun` that are still written
        self._uncertain: set[str] = set()

    def steps(self) -> list[int]:
        return [step for step, size in self._sizes().items() if size != _RESERVATION_BYTES]

    def begin(self, step: int) -> CheckpointFiles:
        folder = _new_folder()
        self._begun.add(folder)
        self._open.add(folder)
        return files_at(f"{self.path(step)}/{folder}")

    def commit(self, staging: CheckpointFiles, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        data = manifests.dump({**manifest, "folder": staging.folder})
        self._announce(step)
        etag = self._reserve(step, staging.folder)
        if etag is not None:
            before_commit()
            self._uncertain.add(staging.folder)  # a request that seems to have failed can still be done later
            committed = self.storage.put_if(_manifest(step), data, etag)
            self._uncertain.discard(staging.folder)
            if committed:
                self._open.discard(staging.folder)
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

    def abort(self, staging: CheckpointFiles) -> None:
        """Delete a staging area, unless its manifest may still appear."""
        self._open.discard(staging.folder)
        if staging.folder not in self._uncertain:
            staging.storage.delete_below("")

    def tombstone(self, step: int) -> str:
        name = posixpath.join(f"global_step_{step}", self._folder_in(_manifest(step)) or "")
        self.storage.delete(_manifest(step))
        return name

    def archive(self, step: int) -> str:
        name = f"{_ARCHIVE}/global_step_{step}-{secrets.token_hex(4)}.json"
        self.storage.put(name, self.storage.get(_manifest(step)))
        self.storage.delete(_manifest(step))
        return name

    def archived(self, step: int | None = None) -> list[str]:
        prefix = f"{_ARCHIVE}/" if step is None else f"{_ARCHIVE}/global_step_{step}-"
        return [name for name in self.storage.list(_ARCHIVE) if name.startswith(prefix)]

    def orphans(self) -> dict[str, str]:
        listed = self.storage.list()
        kept = {self._folder_in(name) for name in listed if name.startswith(f"{_ARCHIVE}/")}
        found = {name: "an interrupted test" for name in listed if name.startswith(_PROBE)}
        split = (name.split("/") for name in listed)
        for parent, folder in sorted({(parts[0], parts[1]) for parts in split if len(parts) > 2}):
            step = step_in(parent)
            is_staging = folder.startswith(FOLDER) and folder not in kept | self._open
            if step is not None and is_staging and self._folder_in(_manifest(step)) not in (folder, None):
                found[f"{parent}/{folder}"] = "an interrupted save or deletion"
        return found

    def remove(self, name: str) -> None:
        if name.startswith(f"{_ARCHIVE}/"):
            step = step_in(posixpath.basename(name).partition("-")[0])
            folder = self._folder_in(name)
            if folder and folder != self._folder_in(_manifest(step or 0)):
                self.storage.delete_below(f"global_step_{step}/{folder}")
        self.storage.delete_below(name)
        self.storage.delete(name)

    def probe(self, size: int = 64) -> None:
        key, data = f"{_PROBE}{secrets.token_hex(8)}", secrets.token_bytes(size)
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

        def size(step: int) -> int | None:
            with contextlib.suppress(FileNotFoundError):
                return self.storage.size(_manifest(step))
            return None

        listed = {step for step in map(step_in, self.storage.names()) if step is not None}
        steps = sorted(listed | self._announced()[0])
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return {step: size for step, size in zip(steps, pool.map(size, steps), strict=True) if size is not None}

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

    def _announced(self) -> tuple[set[int], str | None]:
        """Return the steps that may have a manifest, and the etag of the object that says so; None: there is none."""
        try:
            data, etag = self.storage.get_with_etag(_STEPS)
        except FileNotFoundError:
            return set(), None
        try:
            return set(parse_object(data, {"steps": [is_count]})["steps"]), etag
        except ValueError:  # damaged: the list of objects names the checkpoints, and the next save repairs this
            return set(), etag

    def _announce(self, step: int) -> None:
        """Write a step to `.steps.json`. The condition refuses a job that has lost its lock meanwhile."""
        known, etag = self._announced()
        if step in known:
            return
        data = json.dumps({"steps": sorted({*self._sizes(), step})}).encode()
        if not self.storage.put_if(_STEPS, data, etag):
            raise OSError(errno.EBUSY, f"{self.root}/{_STEPS}: another job writes here")


def _manifest(step: int) -> str:
    return f"global_step_{step}/{MANIFEST}"


def _new_folder() -> str:
    return f"{FOLDER}{secrets.token_hex(8)}"
