"""The disks of the nodes on which ranks run, as the driver reaches them: through one rank of each node.

A checkpoint of several nodes is a directory of the same name on each of them. Every directory has the manifest and all
small files. The shards are where their ranks wrote them, and where copies were put. The directory is renamed on the
other nodes first, and last on the disk of the driver: this rename is the commit. `Checkpoint.nodes` says which shards
each disk had then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.checkpoint_files import CheckpointFiles, step_in
from trainer.checkpoint.local_tier import LocalTier, is_shard
from trainer.checkpoint.manifest import Checkpoint, Fields, FileEntry
from trainer.checkpoint.store import LocalStore
from trainer.errors import UserError, one_line
from trainer.process import time_limits

LOG = logging.getLogger(__name__)


class AskedRanks(Protocol):
    """The ranks of a run."""

    def ask(self, numbers: Collection[int] | None, value: Any, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` of a copy of `value` on these ranks (None: on all), and return their answers by number.

        Any thread may ask, while the ranks do other things.
        """
        ...


class NodeDisks:
    """The disks of the other nodes than the driver's.

    Args:
        local: the store on the disk of the driver.
        ranks: they are connected.

    Raises:
        UserError: a node cannot write to its directory.
    """

    def __init__(self, local: LocalStore, ranks: AskedRanks):
        self._local = local
        self._ranks = ranks
        self._disk = LocalTier(local.root)
        self.own = self._disk.name()
        """The name of the driver's disk."""
        try:
            names: dict[int, str] = ranks.ask(None, self._disk, "name")
            self._others = {name: number for number, name in sorted(names.items(), reverse=True) if name != self.own}
            self._ask_all("clean_up")
        except OSError as error:
            raise UserError(
                f"trainer.ckpt_cache_dir={local.root}: a node cannot keep checkpoints there "
                f"({one_line(str(error))}); every node with ranks needs this directory"
            ) from error
        self.with_ranks = set(names.values())
        """The names of the disks on whose nodes ranks run."""
        self._copied_pieces: set[str] = set()

    @property
    def are_several(self) -> bool:
        """Whether a rank has another disk than the driver."""
        return bool(self._others)

    def commit(
        self, staging: CheckpointFiles, step: int, manifest: Fields, before_commit: Callable[[], None]
    ) -> list[str]:
        """Commit a staging area: on the other nodes, and then on the disk of the driver.

        Returns:
            sentences about copies that could not be made.

        Raises:
            OSError: a file is on no disk, or a node cannot commit.
        """
        folder = os.path.basename(staging.path)
        entries = [FileEntry(**entry) for entry in manifest["files"]]
        sizes = {self.own: staging.storage.list(), **self._ask_all("sizes", folder)}
        for entry in entries:
            if not any(held.get(entry.path) == entry.bytes for held in sizes.values()):
                raise OSError(errno.ENOENT, f"{entry.path} is on the disk of no node", staging.path)
        problems = [sentence for some in self._ask_all("problems", folder).values() for sentence in some]
        problems += self._disk.problems(folder)
        for name, number in self._others.items():
            missing = [e.path for e in entries if not is_shard(e.path) and e.path not in sizes[self.own]]
            found = self._ranks.ask([number], self._disk, "read", folder, [p for p in missing if p in sizes[name]])
            for path, data in found[number].items():
                staging.write(path, data)
                sizes[self.own][path] = len(data)
        small = {entry.path: staging.read(entry.path) for entry in entries if not is_shard(entry.path)}
        shards = [entry for entry in entries if is_shard(entry.path)]
        nodes = {
            name: [entry.path for entry in shards if held.get(entry.path) == entry.bytes]
            for name, held in sizes.items()
        }
        manifest = {**manifest, "nodes": nodes}
        new = [name for name in self._local.pieces() if name not in self._copied_pieces]
        self._ask_all("keep", folder, small, {name: self._local.piece(name) for name in new})
        self._ask_all("commit", folder, step, manifest)
        self._local.commit(staging, step, manifest, before_commit)
        self._copied_pieces.update(new)
        self.reconcile()
        return sorted(set(problems))

    def missing(self, checkpoint: Checkpoint, level: str) -> list[str]:
        """Return the files of a checkpoint that no rank can read, because no disk of the living nodes has them.

        Every node checks its own files. Then each gets the small files that it lacks.
        """
        digest = checkpoint.manifest["self"]
        found: dict[str, list[str]] = self._ask_all("scrub", checkpoint.step, digest, level)
        own = self._disk.scrub(checkpoint.step, digest, level)
        readable = {path for paths in found.values() for path in paths}
        readable.update(path for path in own if self.own in self.with_ranks or not is_shard(path))
        missing = [entry.path for entry in checkpoint.entries if entry.path not in readable]
        if not missing:
            small = [entry.path for entry in checkpoint.entries if not is_shard(entry.path)]
            content = {path: checkpoint.files.read(path) for path in [*small, manifests.MANIFEST]}
            for name, number in self._others.items():
                lacking = {p: data for p, data in content.items() if p not in found[name]}
                folder = os.path.basename(checkpoint.path)
                self._ranks.ask([number], self._disk, "keep", folder, lacking, {})
        return missing

    def reconcile(self) -> None:
        """Let the other nodes delete the checkpoints and pieces that the disk of the driver does not have."""
        local = self._local
        names = [name for name in local.storage.names() if step_in(name) is not None or name in local.archived()]
        with self._failures_logged():
            self._ask_all("reconcile", names, local.pieces())

    def rename(self, name: str, new: str) -> None:
        """Rename a checkpoint on the other nodes."""
        with self._failures_logged():
            self._ask_all("rename", name, new)

    def abort(self, staging: CheckpointFiles) -> None:
        """Delete a staging area on the other nodes."""
        with self._failures_logged():
            self._ask_all("remove", os.path.basename(staging.path))

    def upload(self, checkpoint: Checkpoint, url: str, paths: Collection[str]) -> dict[str, FileEntry]:
        """Let the nodes copy these files to the staging area at `url`; returns them by path.

        Raises:
            OSError: a file is on no disk that lives, a disk fails, or the store does.
        """
        chosen: dict[int, list[str]] = {}
        for path in paths:
            number = next((n for name, n in self._others.items() if path in checkpoint.nodes.get(name, ())), None)
            if number is None:
                raise FileNotFoundError(errno.ENOENT, "no node that lives has it", path)
            chosen.setdefault(number, []).append(path)
        keys = {
            number: self._ranks.ask([number], self._disk, "begin_upload", checkpoint.step, url, some)[number]
            for number, some in chosen.items()
        }
        written: dict[str, FileEntry] = {}
        while keys:
            for number, key in list(keys.items()):
                done = self._ranks.ask([number], self._disk, "uploaded", key)[number]
                if done is not None:
                    written |= done
                    del keys[number]
            time.sleep(time_limits.POLL_INTERVAL_S if keys else 0)
        return written

    def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of `LocalTier` on each of the other nodes; returns the answers by the name of the disk."""
        if not self._others:
            return {}
        answers = self._ranks.ask(list(self._others.values()), self._disk, method, *args)
        return {name: answers[number] for name, number in self._others.items()}

    @contextlib.contextmanager
    def _failures_logged(self):
        """Log a failure in the block: what a node keeps too long is deleted after the next commit."""
        try:
            yield
        except Exception as error:  # ranks may have died meanwhile
            LOG.warning("a node did not delete what it no longer needs: %s", one_line(str(error)))
