"""A rank's share of a save: a thread copies it to host memory and writes it while the rank continues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trainer.failpoints import failpoint
from trainer.parallel.mesh import SideGroup

LOG = logging.getLogger(__name__)


class StateFiles(Protocol):
    """Writes and reads sharded states (see `trainer.checkpoint.sharded.ShardedFiles`)."""

    def write(self, name: str, state: dict[str, Any], extra: dict[str, str], group: Any) -> list[dict]: ...
    def read(self, name: str, state: dict[str, Any], group: Any = None, optional: Sequence[str] = ()) -> None: ...
    def read_json(self, name: str, file: str) -> bytes: ...


class BackgroundSaver:
    """Runs at most one save at a time. It keeps one copy of this rank's shards in host memory for the next save.

    Args:
        group: a group without other users, so that the writers can communicate while the ranks train.
        device: device of the state; a state on `cuda` is copied to pinned memory.
    """

    def __init__(self, group: SideGroup, device: str):
        cuda = device == "cuda"
        self._group = group
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )
        self._device = torch.cuda.current_device() if cuda else None
        self._thread: threading.Thread | None = None
        self._reserving: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._entries: list[dict] = []
        self._problem: str | None = None
        self._blocked = 0.0

    def reserve(self, states: dict[str, dict[str, Any]]) -> None:
        """Take the host memory of later saves of `states` on a thread, so that the first save need not wait for it.

        To pin memory for the copies of a GPU takes many times as long as the copies. The tensors must not change until
        `wait_until_staged` returns. Does nothing if it has been called before.
        """
        if self._reserving is None:
            self._staged.clear()
            self._reserving = threading.Thread(target=self._reserve, args=(states,), daemon=True)
            self._reserving.start()

    def begin(self, states: dict[str, dict[str, Any]], extras: dict[str, dict[str, str]], files: StateFiles) -> None:
        """Start a save. The tensors in `states` must not change until `wait_until_staged` returns.

        Args:
            states: tensors of this rank and plain values, by name.
            extras: small files that rank 0 adds to each state, by name.
        """
        assert self._thread is None, "finish the save before beginning another"
        self.wait_until_staged()  # a thread may still reserve memory
        self._entries, self._problem = [], None
        self._staged.clear()
        self._thread = threading.Thread(target=self._run, args=(states, extras, files), daemon=True)
        self._thread.start()

    def wait_until_staged(self) -> None:
        """Wait until the tensors given to `begin` are copied and may change."""
        if not self._staged.is_set():
            started = time.monotonic()
            self._staged.wait()
            self._blocked += time.monotonic() - started

    def finish(self) -> list[dict]:
        """Wait for the save; returns the files that this rank wrote (`FileEntry` as dicts).

        Raises:
            OSError: some rank could not stage or write; all ranks raise it.
        """
        assert self._thread is not None, "begin a save first"
        self._thread.join()
        self._thread = None
        if self._problem is not None:
            raise OSError(self._problem)
        return self._entries

    def take_blocked(self) -> float:
        """Return the seconds that this rank has waited for staging since the last call."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked

    def _reserve(self, states: dict[str, dict[str, Any]]) -> None:
        try:
            self._stage(states)
        except Exception as error:  # a save will fail in the same way, and say so on all ranks
            LOG.info("rank %d could not reserve memory for saves: %s", self._group.rank, error)
        finally:
            self._staged.set()

    def _stage(self, states: dict[str, dict[str, Any]]) -> dict[str, Any]:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # each thread has its own current device
        return {name: self._stager.stage(state) for name, state in states.items()}

    def _run(self, states: dict[str, dict[str, Any]], extras: dict[str, dict[str, str]], files: StateFiles) -> None:
        try:
            try:
                failpoint("save:staging")
                staged = self._stage(states)
            except Exception as error:
                staged = {}
                self._agree(f"rank {self._group.rank} could not copy its state: {error}")
            else:
                self._agree(None)
            finally:
                self._staged.set()
            for name in states:
                if self._problem is not None:
                    return
                failpoint("save:staged")
                try:
                    self._entries += files.write(name, staged[name], extras[name], self._group.handle)
                except Exception as error:
                    self._agree(str(error) or repr(error))
                else:
                    self._agree(None)
        except Exception as error:  # a rank is dead; its own error ends the job and gives the reason
            self._problem = f"the ranks could not agree on the save: {error}"

    def _agree(self, problem: str | None) -> None:
        """Share the failure of one rank with all ranks, so that none waits for a file that will never exist."""
        self._problem = next((p for p in self._group.gather(problem) if p is not None), None)
