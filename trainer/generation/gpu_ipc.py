"""Two processes on one GPU: a connection, and buffers that both see (CUDA IPC)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trainer.process import time_limits

_DEVICE_ARGUMENT = 6  # of torch's `rebuild_cuda_tensor`


class Connection:
    """A connection whose messages must come in time.

    Args:
        timeout_s: longest time to wait for a message.
    """

    def __init__(self, pipe: Pipe, timeout_s: float):
        self._pipe = pipe
        self._timeout_s = timeout_s

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            TimeoutError: none came in time.
            EOFError: the other process has ended.
        """
        if not self._pipe.poll(self._timeout_s):
            raise TimeoutError(f"no answer for {self._timeout_s:g} s while weights went between two processes on a GPU")
        return self._pipe.recv()


@contextmanager
def accept(token: str, device: str, timeout_s: float) -> Iterator[Connection]:
    """Wait for the other process on this process's GPU, which calls `connect`."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(_address(token, device))
        server.listen()
        server.settimeout(timeout_s)
        try:
            end, _ = server.accept()
        except TimeoutError:
            raise TimeoutError(f"no engine took weights on this GPU for {timeout_s:g} s") from None
    end.setblocking(True)
    with Pipe(end.detach()) as pipe:
        deliver_challenge(pipe, token.encode())
        answer_challenge(pipe, token.encode())
        yield Connection(pipe, timeout_s)


@contextmanager
def connect(token: str, device: str, timeout_s: float) -> Iterator[Connection]:
    """Connect to the other process on this process's GPU, which calls `accept` at about the same time."""
    end, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + timeout_s
    with contextlib.closing(end):
        while True:
            try:
                end.connect(_address(token, device))
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no rank offers weights on this GPU for {timeout_s:g} s") from None
                time.sleep(time_limits.IPC_RETRY_S)
        with Pipe(os.dup(end.fileno())) as pipe:
            answer_challenge(pipe, token.encode())
            deliver_challenge(pipe, token.encode())
            yield Connection(pipe, timeout_s)


def export_buffer(size: int, device: str) -> tuple[Tensor, bytes]:
    """Return a new buffer `(size,)` of uint8, and the handle with which another process on the GPU can import it."""
    if device == "cpu":
        buffer = torch.empty(size, dtype=torch.uint8).share_memory_()
    else:
        buffer = _outside_of_expandable_segments(size)
    return buffer, bytes(ForkingPickler.dumps(reduce_tensor(buffer)))


def import_buffer(handle: bytes, device: str) -> Tensor:
    """Return the buffer that the other process has exported."""
    rebuild, arguments = pickle.loads(handle)
    if device == "cuda":  # the same GPU may have another number here
        arguments = list(arguments)
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild(*arguments)


def collect(device: str) -> None:
    """Free the memory of buffers that no process uses any more.

    torch keeps a buffer that it has exported until the other process has let it go, and does not look by itself.
    """
    if device == "cuda":
        torch.cuda.ipc_collect()


def _address(token: str, device: str) -> str:
    """Return the address of the connection on this process's GPU, in Linux' abstract namespace: it leaves no file."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else device
    return "\0trainer-" + hashlib.sha256(f"{token} {gpu}".encode()).hexdigest()


def _outside_of_expandable_segments(size: int) -> Tensor:
    """Return a buffer in memory of its own: other processes open expandable segments slowly, if they may at all."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = settings.replace(" ", "")
    if "expandable_segments:True" not in settings:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    set_allocator = torch._C._accelerator_setAllocatorSettings  # torch has no public function for it
    set_allocator(settings.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    finally:
        set_allocator(settings)
