"""What ranks do for each other if each node has a disk of its own: copies of shards, and reads of bytes elsewhere.

Every function is a collective over a group of ranks. The bytes go over gloo, from rank to rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from trainer.checkpoint.local_tier import LocalTier, is_shard
from trainer.checkpoint.manifest import FileEntry
from trainer.checkpoint.shard_io import ByteRange, RangeReader
from trainer.checkpoint.storage import LocalStorage
from trainer.files.atomic_io import digest_file
from trainer.process.failpoints import failpoint

_CHUNK_BYTES = 8 << 20
_RANGES_AT_ONCE = 8
_UNFINISHED = ".copying"


@dataclass(frozen=True)
class Transfer:
    """Bytes of a file that a rank sends to another one."""

    source: int
    target: int
    path: str
    start: int
    end: int


def replicate(directory: str, entries: Sequence[FileEntry], copies: int, group: Any) -> None:
    """Copy the shards that this rank wrote to the disks of the next `copies` nodes, at the same path, durably.

    A copy whose content differs from the entry is deleted. A copy that fails leaves a sentence in `LocalTier.problems`
    of the staging area on every node, and no file.
    """
    disk, staging = LocalTier(os.path.dirname(directory)), LocalStorage(directory)
    shards = [entry for entry in entries if is_shard(entry.path)]
    name = ""
    with contextlib.suppress(OSError):
        name = disk.name()
    known: list[tuple[str, list[FileEntry]]] = _gather((name, shards), group)
    transfers = plan_copies([name for name, _ in known], [shards for _, shards in known], copies)
    expected = {entry.path: entry for _, shards in known for entry in shards}
    problems: dict[str, str] = {}

    def read(transfer: Transfer, start: int, size: int) -> bytes:
        try:
            return staging.get_range(transfer.path, start, start + size)
        except OSError:
            return bytes(size)  # the hash tells the target

    def write(transfer: Transfer, start: int, data: memoryview) -> None:
        path = os.path.join(directory, transfer.path)
        if path in problems:
            return
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + _UNFINISHED, "r+b" if start else "wb") as file:
                file.seek(start)
                file.write(data)
            failpoint("copy:received")
            if start + len(data) == transfer.end:
                _complete(staging, expected[transfer.path])
        except OSError as error:
            problems[path] = f"{error.strerror or error} ({path} on {name})"
            with contextlib.suppress(OSError):
                os.remove(path + _UNFINISHED)

    exchange(transfers, group, read, write)
    everywhere = [problem for some in _gather(list(problems.values()), group) for problem in some]
    if everywhere:
        disk.note_problems(os.path.basename(directory), everywhere)


def plan_copies(nodes: Sequence[str], shards: Sequence[Sequence[FileEntry]], copies: int) -> list[Transfer]:
    """Return which rank sends which shard to which rank; no shard goes to its own node, or twice to one.

    Args:
        nodes: the node of each rank; empty: its disk fails.
        shards: the shards of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        if node:
            ranks.setdefault(node, []).append(rank)
    order = list(ranks)
    transfers = []
    for source, node in enumerate(nodes):
        if not node:
            continue
        index = ranks[node].index(source)
        for jump in range(1, min(copies, len(order) - 1) + 1):
            others = ranks[order[(order.index(node) + jump) % len(order)]]
            target = others[index % len(others)]
            transfers += [Transfer(source, target, shard.path, 0, shard.bytes) for shard in shards[source]]
    return transfers


def exchange(
    transfers: Sequence[Transfer],
    group: Any,
    read: Callable[[Transfer, int, int], bytes],
    write: Callable[[Transfer, int, memoryview], None],
) -> None:
    """Send the bytes of all transfers, in chunks, to bound the memory. Every rank gives the same list.

    Args:
        read: returns bytes of a transfer of which this rank is the source, by their start in the file and their number.
        write: takes bytes of a transfer of which this rank is the target, and their start in the file. The chunks of a
            transfer come in order.
    """
    rank = dist.get_rank(group)
    own = [(tag, one) for tag, one in enumerate(transfers) if rank in (one.source, one.target)]
    for offset in range(0, max((one.end - one.start for _, one in own), default=0), _CHUNK_BYTES):
        arriving, works = [], []
        for tag, one in own:
            start = one.start + offset
            size = min(_CHUNK_BYTES, one.end - start)
            if size <= 0:
                continue
            if rank == one.source:
                data = torch.frombuffer(bytearray(read(one, start, size)), dtype=torch.uint8)
                works.append((dist.isend(data, group=group, group_dst=one.target, tag=tag), data))
            else:
                data = torch.empty(size, dtype=torch.uint8)
                works.append((dist.irecv(data, group=group, group_src=one.source, tag=tag), data))
                arriving.append((one, start, data))
        for work, _ in works:
            work.wait()
        for one, start, data in arriving:
            write(one, start, memoryview(data.numpy()))


def find_replicas(folder: str, group: Any) -> dict[str, list[int]] | None:
    """Return the ranks that see each file of a folder; None: all ranks see the same files."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if not name.endswith(_UNFINISHED))
    known: list[list[str]] = _gather(names, group)
    if all(seen == names for seen in known):
        return None
    return {name: [rank for rank, seen in enumerate(known) if name in seen] for seen in known for name in seen}


class ReplicaReader(RangeReader):
    """Reads the bytes that this rank needs: its own node's from the disk, others from the ranks that see them.

    Args:
        replicas: the ranks that see each file of the folder.
    """

    def __init__(self, disk: LocalStorage, folder: str, replicas: dict[str, list[int]], group: Any):
        super().__init__(disk, folder)
        self._replicas = replicas
        self._group = group
        self._rank = dist.get_rank(group)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        own, others = [], []
        for one in self.ranges(plan.items):
            (own if self._rank in self._replicas.get(one.name, ()) else others).append(one)
        missing = sorted({one.name for one in others if one.name not in self._replicas})
        lost: list[str] = sorted({name for names in _gather(missing, self._group) for name in names})
        if lost:
            raise FileNotFoundError(f"no node has {', '.join(lost)}")
        self._take_from_others(others, planner)
        for one in own:
            self.fill(one, self.fetch(one), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _take_from_others(self, wanted: list[ByteRange], planner: LoadPlanner) -> None:
        """Place the bytes of files that other ranks see. Every rank calls it, and reads for the others."""
        rounds = max(_gather(-(-len(wanted) // _RANGES_AT_ONCE), self._group))
        for first in range(0, rounds * _RANGES_AT_ONCE, _RANGES_AT_ONCE):
            batch = wanted[first : first + _RANGES_AT_ONCE]
            asked = [Transfer(self._source(one), self._rank, one.name, one.start, one.end) for one in batch]
            transfers = [transfer for some in _gather(asked, self._group) for transfer in some]
            taken = {transfer: bytearray(transfer.end - transfer.start) for transfer in asked}
            problems: list[str] = []

            def read(transfer: Transfer, start: int, size: int, problems: list[str] = problems) -> bytes:
                try:
                    return self._storage.get_range(f"{self.path}/{transfer.path}", start, start + size)
                except OSError as error:
                    problems.append(f"{self.path}/{transfer.path}: {error.strerror or error}")
                    return bytes(size)

            def write(
                transfer: Transfer, start: int, data: memoryview, taken: dict[Transfer, bytearray] = taken
            ) -> None:
                offset = start - transfer.start
                taken[transfer][offset : offset + len(data)] = data

            exchange(transfers, self._group, read, write)
            if all_problems := [problem for some in _gather(problems, self._group) for problem in some]:
                raise OSError(all_problems[0])
            for one, transfer in zip(batch, asked, strict=True):
                self.fill(one, bytes(taken[transfer]), planner)

    def _source(self, wanted: ByteRange) -> int:
        replicas = self._replicas[wanted.name]
        return replicas[self._rank % len(replicas)]


def _complete(disk: LocalStorage, entry: FileEntry) -> None:
    """Give a copy its name, if its content is that of the entry."""
    unfinished = entry.path + _UNFINISHED
    folder, name = os.path.split(unfinished)
    disk.sync(folder, [name])
    if (disk.size(unfinished), digest_file(disk.path(unfinished))) != (entry.bytes, entry.hash):
        raise OSError("the copy does not have the content that was saved")
    os.rename(disk.path(unfinished), disk.path(entry.path))
    disk.sync(folder, [])


def _gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
