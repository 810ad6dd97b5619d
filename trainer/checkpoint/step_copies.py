"""Copies of the newest finished steps in shared memory: ranks that start again continue from there, not from the disk.

A copy is a checkpoint like any other, in a store of its own, whose ranks write their shards as they lie in memory. So
it is complete or does not count, and holds the same kinds of state.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.components import Component, models_component
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.manifest import Checkpoint
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.storage import LocalStorage, open_storage
from trainer.checkpoint.store import LocalStore, Ranks
from trainer.errors import UserError, format_size
from trainer.files.shared_memory import PREFIX, SHARED_MEMORY, PrivateDirectory
from trainer.process import time_limits

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

LOG = logging.getLogger(__name__)
_NOT_COPIED = ("config", "start_weights", "models", "huggingface", "run_files")
"""Components that stay as they are while the driver lives, and the models, which are copied in another format."""
_ALIGNMENT = 64
_Path = tuple[str | int, ...]


class RankFiles(ShardedFiles):
    """The shards of each rank below one directory, as they lie in memory: only the same ranks can read them."""

    def write(self, name: str, state: dict[str, Any], extra: dict[str, str], group: dist.ProcessGroup) -> list[dict]:
        """Write this rank's part of `state` below `{directory}/{name}`; returns the entries of the files."""
        import torch
        import torch.distributed as dist

        files, rank = open_storage(self.directory), dist.get_rank(group)
        tensors: dict[_Path, tuple[int, Any, Any]] = {}
        values: dict[_Path, Any] = {}
        with files.open_writer(f"{name}/rank_{rank}.bin") as stream:
            for path, value in _leaves(state):
                if not isinstance(value, torch.Tensor):
                    values[path] = value
                    continue
                local = _local(value).contiguous()
                tensors[path] = stream.tell(), local.dtype, tuple(local.shape)
                data = local.view(-1).view(torch.uint8).numpy()
                stream.write(data)
                stream.write(bytes(-data.nbytes % _ALIGNMENT))
        index = io.BytesIO()
        torch.save({"tensors": tensors, "values": values}, index)
        files.write(f"{name}/rank_{rank}.pt", index.getvalue())
        if rank == 0:
            for file, text in extra.items():
                files.write(f"{name}/{file}", text.encode())
        return [asdict(files.written[path]) for path in sorted(files.written)]

    def read(self, name: str, state: dict[str, Any], group: Any = None, optional: Sequence[str] = ()) -> None:
        """Fill the tensors and plain values of `state` in place with what this rank has written. Raises UserError: the
        rank has written a state with other parts."""
        import torch
        import torch.distributed as dist

        files, rank = open_storage(self.directory), dist.get_rank(group)
        index = torch.load(io.BytesIO(files.get(f"{name}/rank_{rank}.pt")), weights_only=True)
        tensors, values = index["tensors"], index["values"]
        found = dict(_leaves(state))
        if found.keys() != tensors.keys() | values.keys():
            raise UserError(f"{self.directory}/{name}: the copy of rank {rank} has other parts than its state")
        path = f"{self.directory}/{name}/rank_{rank}.bin"
        data = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)
        with torch.no_grad():
            for place, (start, dtype, shape) in tensors.items():
                local = _local(found[place])
                if (local.dtype, tuple(local.shape)) != (dtype, shape):
                    text = f"rank {rank} has copied {place} in another shape or dtype"
                    raise UserError(f"{self.directory}/{name}: {text}")
                local.copy_(data[start : start + local.nbytes].view(dtype).view(shape))
        for place, value in values.items():
            parent = reduce(getitem, place[:-1], state)
            parent[place[-1]] = value


def _leaves(state: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield the tensors and plain values in nested dictionaries and lists, with the keys and indices to each."""
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, (*path, key))
    else:
        yield path, state


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class StepCopies:
    """The copies of one run: of the newest step, and of the one before until the newest is complete.

    Forbidden: a copy while a save is under way, because the ranks copy their state for one of them at a time; copies of
    steps that the run has gone back behind (`forget`).

    Args:
        is_on: if not, nothing is copied.
    """

    def __init__(self, is_on: bool):
        self.is_on = is_on
        self._components: list[Component] = []
        self._directory: PrivateDirectory | None = None
        self._manager: CheckpointManager | None = None

    def open(self, components: Sequence[Component], ranks: Ranks, needed: int) -> None:
        """Make room for the copies, once.

        Args:
            components: those of a checkpoint.
            ranks: all on this machine.
            needed: bytes that two copies take.

        Raises:
            UserError: shared memory has less room.
        """
        if not self.is_on or self._manager is not None:
            return
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < needed:
            raise UserError(
                f"trainer.copy_steps=true: two copies need {format_size(needed)}, and {SHARED_MEMORY} has "
                f"{format_size(free)} free; make it larger, or set trainer.copy_steps=false"
            )
        kept = [one for one in components if one.name not in _NOT_COPIED]
        self._components = [*kept, models_component(ranks, RankFiles)]
        self._directory = PrivateDirectory(SHARED_MEMORY, PREFIX, 16)
        store = LocalStore(LocalStorage(self._directory.path))
        self._manager = CheckpointManager(store, Retention(newest=1), log_level=logging.DEBUG)

    def begin(self, step: int, description: dict[str, Any]) -> None:
        """Begin to copy the state after `step`. The copy before ends first."""
        self.wait()
        if self._manager is not None:
            self._manager.save(step, self._components, description)

    def wait(self) -> None:
        """Wait until no copy is under way. A copy that has failed is logged: only a lost rank would need it."""
        if self._manager is not None:
            self._manager.wait()
            for result in self._manager.results():
                if result.error is not None:
                    LOG.warning("step %d is not copied to %s: %s", result.step, SHARED_MEMORY, result.error)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete copy; None: there is none."""
        self.wait()
        if self._manager is None:
            return None
        self._manager.clean_up()
        try:
            return self._manager.latest()
        except UserError as error:
            LOG.warning("the copies of the last steps cannot be used: %s", error)
            return None

    def load(self, copy: Checkpoint) -> None:
        """Restore a copy."""
        assert self._manager is not None
        self._manager.load(copy, self._components)

    def forget(self) -> None:
        """Delete all copies: the run goes back behind them."""
        if self._manager is not None:
            for step in self._manager.store.steps():
                self._manager.store.delete(step)

    def close(self) -> None:
        """Delete all copies, and their directory."""
        if self._manager is not None and self._directory is not None:
            self._manager.wait(time_limits.SAVE_END_S)
            self._directory.close()
