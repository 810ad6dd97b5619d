"""The time in which no engine could generate, because all were starting, lost, or asleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pauses:
    """Adds up the seconds of blocks. Any thread may read the sum, also during a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = self._ended_s = 0.0

    @property
    def seconds(self) -> float:
        """The sum so far. Blocks that overlap count once."""
        with self._lock:
            return self._ended_s + (time.monotonic() - self._since if self._open else 0.0)

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count the seconds of the block."""
        with self._lock:
            if not self._open:
                self._since = time.monotonic()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._ended_s += time.monotonic() - self._since
