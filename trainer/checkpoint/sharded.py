"""How one rank writes and reads its share of a sharded state: DCP, made durable and hashed."""

from __future__ import annotations

import os
import posixpath
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manifest import FileEntry
from trainer.durable import digest_file, sync_directory, sync_file, write_file
from trainer.errors import UserError
from trainer.failpoints import failpoint

if TYPE_CHECKING:
    import torch.distributed as dist

# DCP takes seconds to import. The driver only names the files that the ranks write, so it does without.


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
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        base = posixpath.join(self.directory, name)
        rank = dist.get_rank(group)
        written = []
        try:
            writer = dcp.FileSystemWriter(base, single_file_per_rank=True, sync_files=True)
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
        import torch.distributed.checkpoint as dcp

        from trainer.checkpoint.safe_dcp import SafePlanner, SafeReader

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
