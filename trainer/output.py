"""Standard output and error that never end a program: neither by a text nor by where the text goes."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO


def guard_output() -> None:
    """Let stdout and stderr take any text, and drop what cannot be written (disk full, reader gone, terminal closed).

    Characters that the encoding lacks are escaped. Every process calls this before it prints: entry points, actors,
    reward processes. The flush at the end of the interpreter cannot fail either, which would make the status 120.
    A stream that somebody has replaced (a test, say) stays as it is.
    """
    for standard in range(3):  # if one is closed, the next file opened would get its number, and what is printed
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # it was closed when this process started
        encoding, line_buffering = "utf-8", True
    else:
        try:
            if stream.fileno() != descriptor or isinstance(stream.buffer, _LenientFile):
                return stream
        except (OSError, AttributeError):  # a stream in memory
            return stream
        encoding, line_buffering = stream.encoding, stream.line_buffering or stream.write_through
        with contextlib.suppress(OSError):
            stream.flush()
    # Without a buffer of bytes between the two, which a signal handler that prints could not enter a second time.
    file = _LenientFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=line_buffering)


class _LenientFile(io.FileIO):
    """A file whose writes take everything. Data that cannot be written is dropped; for stdout, stderr says so once."""

    _warned = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(data)
        try:
            while left:
                written = super().write(left)
                if written is None:  # a non-blocking file that is full
                    select.select([], [self], [])
                else:
                    left = left[written:]
        except OSError as error:
            if self.fileno() == 1 and not self._warned:
                self._warned = True
                with contextlib.suppress(OSError):
                    os.write(2, f"WARNING: stdout cannot be written ({error.strerror}); text is lost\n".encode())
        return len(data)
