"""A stream of requests to the engines, and of their completions."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, Self

from trainer.generation.engine import Completion, Request


class StreamAborted(RuntimeError):
    """The requests of a stream were dropped before all were complete. Its reader must not read on."""


class Streams(Protocol):
    """What completes the requests of streams: the dispatcher."""

    def submit(self, stream: RequestStream, requests: Mapping[int, Request]) -> None: ...

    def next_chunk(self, stream: RequestStream) -> dict[int, Completion] | None: ...

    def drop(self, stream: RequestStream) -> None: ...


class RequestStream:
    """Requests that are submitted at any time, and their completions. A context manager, and an iterator.

    Any thread may call `submit`, `finish` and `wake`. One thread at a time reads: it iterates, and gets chunks of
    completions by the keys of their requests, as engines complete them.

    Args:
        lock: of all streams. It guards the fields.
        block: ends with the stream.
        is_open: further requests may be submitted.
    """

    def __init__(self, streams: Streams, lock: threading.RLock, block: ExitStack, is_open: bool):
        self._streams = streams
        self._block = block
        self.ready = threading.Condition(lock)
        """Its reader waits for it."""
        self.is_open = is_open
        self.is_woken = False
        self.idle_s = math.inf
        """After so many seconds without a completion, the reader gets an empty chunk."""
        self.numbers: set[int] = set()
        """Numbers of the requests that are not complete."""
        self.left: set[int] = set()
        """Those of them whose completions are wanted."""
        self.complete: dict[int, Completion] = {}
        """Completions that the reader has not got."""
        self.failure: BaseException | None = None
        """What the reader gets instead of the rest."""

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Begin to generate requests.

        Args:
            requests: by keys of the caller's choice. The key of a request whose completion was read may come again.

        Raises:
            BaseException: the failure that has ended the stream.
        """
        self._streams.submit(self, requests)

    def finish(self) -> None:
        """Note that no further requests follow. The iteration ends when all are complete."""
        with self.ready:
            self.is_open = False
            self.ready.notify()

    def wake(self) -> None:
        """Let the reader get a chunk within a moment, an empty one if nothing is complete."""
        with self.ready:
            self.is_woken = True
            self.ready.notify()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, and no completion waits for the reader."""
        with self.ready:
            return not (self.left or self.complete)

    def __iter__(self) -> Iterator[dict[int, Completion]]:
        return self

    def __next__(self) -> dict[int, Completion]:
        """Wait until something is complete, and return it.

        Raises:
            StreamAborted: the requests were dropped.
            BaseException: whatever has failed, on this thread or on that of the reader of another stream.
        """
        chunk = self._streams.next_chunk(self)
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Drop the requests that are not complete. Nobody may read or submit after that."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._streams.drop(self)
        self._block.__exit__(*exception)
