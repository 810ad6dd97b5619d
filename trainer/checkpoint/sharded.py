"""Write, check and read one rank's share of a sharded state with DCP; the files are made durable and hashed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.lock import machine_name
from trainer.checkpoint.manifest import Checkpoint, FileEntry, check_digest
from trainer.checkpoint.storage import for_each, open_storage
from trainer.checkpoint.store import Ranks
from trainer.errors import UserError, format_size
from trainer.process.failpoints import failpoint
from trainer.process.machine_limits import available_bytes

if TYPE_CHECKING:
    import torch.distributed as dist

HELD: dict[str, int] = {}
"""Shards of an object store that this machine has downloaded: descriptors of this process by URL."""

# DCP takes seconds to import. The functions import it, because the driver uses this module without writing.


@dataclass(frozen=True)
class ShardedFiles:
    """The sharded states below one checkpoint directory. It is plain data, so that it can be sent to the ranks."""

    directory: str

    def write(self, name: str, state: dict[str, Any], extra: dict[str, str], group: dist.ProcessGroup) -> list[dict]:
        """Write this rank's part of `state` below `{directory}/{name}`. A collective over `group`.

        Args:
            state: tensors and DTensors in host memory, and plain values.
            extra: small files that rank 0 adds, by name.

        Returns:
            the entries (`FileEntry` as dicts) of the files that this rank wrote, durable and hashed.

        Raises:
            OSError: a rank could not write. Every rank raises the same error.
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from trainer.checkpoint.tensors import ShardWriter

        files, rank = open_storage(self.directory), dist.get_rank(group)
        try:
            dcp.save(state, storage_writer=ShardWriter(files, name), process_group=group)
            failpoint("save:shards_written")
            if rank == 0:
                for file, text in extra.items():
                    files.write(f"{name}/{file}", text.encode())
            files.sync_written(name)
        except dcp.CheckpointException as error:  # a BaseException, so `except Exception` would not catch it
            failed, (cause, _) = next(iter(error.failures.items()))
            free, needed = files.free_bytes(), _size(state)
            is_full = free is not None and free < max(1 << 20, needed // 1000)
            room = "" if free is None else f" ({format_size(free)} are free)"  # torch's own message does not say it
            remedy = "delete what is not needed, or keep fewer checkpoints (trainer.max_ckpts_to_keep)"
            full = f"the disk is full: {format_size(needed)} are needed; {remedy}"
            reason = full if is_full else f"{cause}{room}"
            text = f"rank {failed} could not write {name}: {reason}"
            raise OSError(*([errno.ENOSPC] if is_full else []), text) from None
        return [asdict(files.written[path]) for path in sorted(files.written)]

    def read(
        self,
        name: str,
        state: dict[str, Any],
        group: dist.ProcessGroup | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        """Fill the tensors of `state` in place, with any sharding, from `{directory}/{name}`.

        No code in the files is executed. `optional`: entries `part.entry` of `state` that are removed from it if the
        files do not have them."""
        import torch.distributed as dist

        from trainer.checkpoint.tensors import ShardReader

        problems: list[str | None] = [None]
        try:
            reader = ShardReader(open_storage(self.directory), name)
            for entry in optional:
                part, _, key = entry.partition(".")
                if key in state.get(part, {}) and entry not in reader.metadata.state_dict_metadata:
                    del state[part][key]
            reader.fill(state)
        except Exception as error:
            problems = [str(error) or type(error).__name__]
        if dist.is_initialized():  # no rank may wait for one that has failed
            mine, problems = problems[0], [None] * dist.get_world_size(group)
            dist.all_gather_object(problems, mine, group)
        if (problem := next(filter(None, problems), None)) is not None:
            raise UserError(f"{self.directory}/{name}: cannot be loaded: {problem}")

    def read_json(self, name: str, file: str) -> bytes:
        """Return the content of a small file below `{directory}/{name}`."""
        return open_storage(self.directory).get(f"{name}/{file}")


@dataclass(frozen=True)
class ShardCheck:
    """Checks the shards of a checkpoint in the processes of the ranks. It is plain data, so that it can be sent."""

    checkpoint: Checkpoint

    def run(self) -> tuple[UserError | None, dict[str, tuple[str, str]]]:
        """Read the shards that are this rank's part, once, and compare their hashes with the manifest.

        From an object store they are downloaded into memory, if there is enough, so that no rank downloads them again.
        Returns the first problem; and the machine and path of each shard in memory, by its URL."""
        import torch
        import torch.distributed as dist

        self.release()  # what a load that failed has left
        rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        files, shards = self.checkpoint.files, self.checkpoint.shards
        free, needed = available_bytes(), 2 * sum(entry.bytes for entry in shards)
        keeps = files.disk is None and hasattr(os, "memfd_create") and (free is None or free > needed)

        def check(entry: FileEntry) -> None:
            copy = os.memfd_create("shard") if keeps else None
            if copy is not None:
                HELD[f"{files.root}/{entry.path}"] = copy
            check_digest(self.checkpoint, entry, copy)

        try:
            parallel = min(torch.get_num_threads(), 4)
            for_each(check, [entry for entry, writer in shards.items() if writer % count == rank], parallel)
        except UserError as error:
            self.release()
            return error, {}
        return None, {url: (machine_name(), f"/proc/{os.getpid()}/fd/{copy}") for url, copy in HELD.items()}

    def share(self, places: Mapping[str, tuple[str, str]]) -> None:
        """Open the shards that processes of this machine have in memory."""
        for url, (machine, path) in places.items():
            if url not in HELD and machine == machine_name():
                with contextlib.suppress(OSError):  # another user's; this rank downloads what it needs
                    HELD[url] = os.open(path, os.O_RDONLY)

    def release(self) -> None:
        """Give the memory of the shards back."""
        while HELD:
            os.close(HELD.popitem()[1])


@contextlib.contextmanager
def checked_shards(checkpoint: Checkpoint, ranks: Ranks) -> Iterator[None]:
    """Let the ranks check the shards of a checkpoint, each its part, before the block loads them. Raises
    CorruptCheckpointError: one does not have the content that was saved. Raises UserError: one cannot be read."""
    check = ShardCheck(checkpoint)
    answers = ranks.ask(None, check, "run") if checkpoint.shards else {}
    problems = [problem for problem, _ in answers.values() if problem is not None]
    places = {url: place for _, found in answers.values() for url, place in found.items()}
    if not problems:
        if places:
            ranks.ask(None, check, "share", places)
        yield
    if places:
        ranks.ask(None, check, "release")
    if problems:
        raise problems[0]


def _size(value: Any) -> int:
    """Return the bytes of all tensors in a nested value; those of a DTensor on all ranks."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
