"""A rank's share of a save: a thread copies it to host memory and writes it while the rank continues."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from trainer.errors import is_disk_unwritable, text_of
from trainer.parallel.mesh import SideGroup
from trainer.process.failpoints import failpoint
from trainer.process.tracing import TRACER
from trainer.workers.host_memory import HostCopy, HostMemory, storages_of

_SAVES = "saves"  # the row of the timeline


class AsyncSaver:
    """Runs at most one save at a time. It copies this rank's shards to host memory first (see `HostMemory`).
    Construction is a collective. `device`: device of the state; a state on `cuda` is copied to pinned memory, on a
    stream of its own."""

    def __init__(self, device: str):
        self._group = SideGroup()
        self._gpu = torch.cuda.current_device() if device == "cuda" else None
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._memory: dict[str, HostMemory] = {}
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._entries: list[dict] = []
        self._problem: OSError | None = None
        self._blocked = 0.0

    def memory(self, role: str) -> HostMemory:
        return self._memory.setdefault(role, HostMemory(self._gpu))

    def more_memory(self) -> HostMemory:
        return HostMemory(self._gpu)

    def begin(self, states: dict[str, dict[str, Any]], extras: dict[str, dict[str, str]], files: Any) -> None:
        """Start a save. The tensors in `states` must not change until `wait_until_staged` returns.

        Args:
            states: tensors of this rank and plain values, by name. Those of the role's offloaded tensors may be away.
            extras: small files that rank 0 adds to each state, by name.
            files: writes the states (`trainer.checkpoint.sharded.ShardedFiles`).
        """
        assert self._thread is None, "finish the save before beginning another"
        # On this thread, because offloaded tensors may be on their way back when the other begins.
        held = {name: self.memory(name).hold_freed(storages_of(state)) for name, state in states.items()}
        copies = {name: copy for name, copy in held.items() if copy is not None}
        self._entries, self._problem = [], None
        self._staged.clear()
        # The copies wait for the kernels that have been queued, and for no others.
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._thread = threading.Thread(target=self._run, args=(states, extras, files, copies, ready), daemon=True)
        self._thread.start()

    def wait_until_staged(self) -> None:
        """Wait until the tensors given to `begin` are copied."""
        if not self._staged.is_set():
            with self._blocks("wait for the copy of the save"):
                self._staged.wait()

    def wait_until_written(self) -> bool:
        """Wait until no save uses host memory; returns whether one did."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return False
        with self._blocks("wait for the save"):
            thread.join()
        return True

    @contextmanager
    def _blocks(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        with TRACER.span(name):
            yield
        self._blocked += time.monotonic() - started

    def finish(self) -> list[dict]:
        """Wait for the save; return the files that this rank wrote (`FileEntry` as dicts). Raises OSError: some rank
        could not stage or write; all ranks raise it."""
        assert self._thread is not None, "begin a save first"
        self._thread.join()
        self._thread = None
        if self._problem is not None:
            raise self._problem
        return self._entries

    def pop_stall_seconds(self) -> float:
        """Return the seconds that this rank has waited for saves since the last call."""
        blocked, self._blocked = self._blocked, 0.0
        return blocked

    def _stage(
        self, states: dict[str, dict[str, Any]], copies: dict[str, HostCopy], ready: torch.cuda.Event | None
    ) -> None:
        """Copy the states; of those in `copies`, what these lack. Adds copies that are held for the caller."""
        offloaded, memory = set(copies), self._memory
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # each thread has its own current device
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                for name, state in states.items():
                    if name in offloaded:
                        copies[name] = copies[name].with_more(storages_of(state))
                    else:
                        copies[name] = memory[name].hold(memory[name].copy(storages_of(state)))
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException:
            for name in copies.keys() - offloaded:
                memory[name].forget()
            raise

    def _run(
        self,
        states: dict[str, dict[str, Any]],
        extras: dict[str, dict[str, str]],
        files: Any,
        copies: dict[str, HostCopy],
        ready: torch.cuda.Event | None,
    ) -> None:
        staged: dict[str, dict[str, Any]] = {}
        try:
            try:
                failpoint("save:staging")
                with TRACER.span("copy", _SAVES):
                    self._stage(states, copies, ready)
                staged = {name: copy.state(states[name]) for name, copy in copies.items()}
            except Exception as error:
                self._agree(OSError(f"rank {self._group.rank} could not copy its state: {error}"))
            else:
                self._agree(None)
            finally:
                self._staged.set()
            for name in states:
                if self._problem is not None:
                    return
                failpoint("save:staged")
                try:
                    with TRACER.span(f"write {name}", _SAVES):
                        self._entries += files.write(name, staged[name], extras[name], self._group.handle)
                except Exception as error:
                    number = [errno.ENOSPC] if is_disk_unwritable(error) else []
                    self._agree(OSError(*number, text_of(error)))  # no other process may know the type of `error`
                else:
                    self._agree(None)
        except Exception as error:  # a rank is dead; its own error ends the job and gives the reason
            self._problem = OSError(f"the ranks could not agree on the save: {error}")
        finally:
            for name, copy in copies.items():
                self._memory[name].release(copy)

    def _agree(self, problem: OSError | None) -> None:
        """Share the failure of one rank with all ranks, so that none waits for a file that will never exist."""
        self._problem = next((p for p in self._group.gather(problem) if p is not None), None)
