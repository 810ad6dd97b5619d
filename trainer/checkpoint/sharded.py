"""Write and read one rank's share of a sharded state with DCP; the files are made durable and hashed."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manifest import files_at
from trainer.errors import UserError, format_size
from trainer.process.failpoints import failpoint

if TYPE_CHECKING:
    import torch.distributed as dist

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

        files, rank = files_at(self.directory), dist.get_rank(group)
        try:
            dcp.save(state, storage_writer=ShardWriter(files, name), process_group=group)
            failpoint("save:shards_written")
            if rank == 0:
                for file, text in extra.items():
                    files.write(f"{name}/{file}", text.encode())
            files.sync(name)
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

        No code in the files is executed.

        Args:
            optional: entries `part.entry` of `state` that are removed from it if the files do not have them.
        """
        import torch.distributed.checkpoint as dcp

        from trainer.checkpoint.tensors import SafePlanner, ShardReader

        reader = ShardReader(files_at(self.directory), name)
        try:
            for entry in optional:
                part, _, key = entry.partition(".")
                if key in state.get(part, {}) and entry not in reader.read_metadata().state_dict_metadata:
                    del state[part][key]
            dcp.load(state, storage_reader=reader, planner=SafePlanner(), process_group=group)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"{self.directory}/{name}: cannot be loaded: {cause}") from None

    def read_json(self, name: str, file: str) -> bytes:
        """Return the content of a small file below `{directory}/{name}`."""
        return files_at(self.directory).read(f"{name}/{file}")


def _size(value: Any) -> int:
    """Return the bytes of all tensors in a nested value; those of a DTensor on all ranks."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
