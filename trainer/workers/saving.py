"""A rank's share of a save: copied to host memory and written on a thread, while the rank goes on."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trainer.failpoints import failpoint
from trainer.parallel.mesh import SideGroup


class StateFiles(Protocol):
    """Where sharded states are written and read (see `trainer.checkpoint.sharded.ShardedFiles`)."""

    def write(self, name: str, state: dict[str, Any], extra: dict[str, str], group: Any) -> list[dict]: ...
    def read(self, name: str, state: dict[str, Any], group: Any = None) -> None: ...
    def read_json(self, name: str, file: str) -> bytes: ...


class BackgroundSaver:
    """At most one save at a time. Host memory taken: one copy of this rank's shards, kept for the next save.

    Args:
        group: a group that nothing else uses, so that the writers can talk to each other while the ranks train.
        device: of the state; from `cuda` it is copied to pinned memory.
    """

    def __init__(self, group: SideGroup, device: str):
        cuda = device == "cuda"
        self._group = group
        self._stager = DefaultStager(StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda,
        ))  # fmt: skip
        self._device = torch.cuda.current_device() if cuda else None
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._entries: list[dict] = []
        self._problem: str | None = None
        self._blocked = 0.0

    def begin(self, states: dict[str, dict[str, Any]], extras: dict[str, dict[str, str]], files: StateFiles) -> None:
        """Start a save. The tensors in `states` must not change until `wait_until_staged` returns.

        Args:
            states: by name, tensors of this rank and plain values.
            extras: small files that rank 0 writes beside them, by name.
        """
        assert self._thread is None, "finish the save before beginning another"
        self._entries, self._problem = [], None
        self._staged.clear()
        self._thread = threading.Thread(target=self._run, args=(states, extras, files), daemon=True)
        self._thread.start()

    def wait_until_staged(self) -> None:
        """Until the tensors given to `begin` are copied and may change."""
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
        """Seconds that this rank has waited for staging since this was last asked."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked

    def _run(self, states: dict[str, dict[str, Any]], extras: dict[str, dict[str, str]], files: StateFiles) -> None:
        try:
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)  # of this thread
                failpoint("save:staging")
                staged = {name: self._stager.stage(state) for name, state in states.items()}
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
        except Exception as error:  # a rank is gone: its death ends the job, and says why
            self._problem = f"the ranks could not agree on the save: {error}"

    def _agree(self, problem: str | None) -> None:
        """One rank's failure is everybody's, before any of them waits for a file that never comes."""
        self._problem = next((p for p in self._group.gather(problem) if p is not None), None)
