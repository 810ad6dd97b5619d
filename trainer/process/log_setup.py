"""Standard output and error: messages to the user, and streams that never end a program.

Modules tell the user something with `LOG = logging.getLogger(__name__)`: `LOG.info(text)` prints the text as it is,
`LOG.warning(text)` prints `WARNING: text`. In the driver, `log.txt` of the run directory gets all of it with times.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import select
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

from trainer.errors import UserError, sentence_of
from trainer.files.appended import open_appended
from trainer.files.redaction import hide_known

_CHUNK = 1 << 20
_JOINERS = "\u200c\u200d"
"""Parts of the spelling of Persian and Indic words, and of emoji."""


def escape(text: str, lines: bool = True) -> str:
    """Return `text` with the characters escaped that control a terminal, change the direction of text or are not seen.

    Names, texts of models and servers, and files that others have written go through this before they are printed or
    logged. The colours of the display do not: they are no part of a text.

    Args:
        lines: keep line breaks and tabs. False: the text is one line.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    text = text.replace("\r\n", "\n") if lines else text

    def is_plain(i: int, c: str) -> bool:
        is_joiner = c in _JOINERS and i > 0 and not text[i - 1].isascii()
        return c.isprintable() or c in kept or unicodedata.category(c) == "Zs" or is_joiner

    return "".join(c if is_plain(i, c) else c.encode("unicode_escape").decode() for i, c in enumerate(text))


def show(text: str, error: bool = False) -> None:
    """Print `text` on stdout, or on stderr, with what could control the terminal escaped (see `escape`)."""
    print(escape(text), file=sys.stderr if error else sys.stdout, flush=True)


class _Messages(logging.Handler):
    """Prints log records as lines of text."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.write = _print

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = escape(hide_known(self.format(record)))
            self.write(text if record.levelno < logging.WARNING else f"{record.levelname}: {text}")
        except Exception:
            self.handleError(record)


def _print(text: str) -> None:
    print(text, flush=True)


_MESSAGES = _Messages()


class LogFile(logging.Handler):
    """Appends log records to a file, each line with its time. What cannot be written is dropped.

    Lines wait in memory until `open`, because this process may write to the run directory only when it holds the lock.
    """

    _LONGEST_WAIT = 1000  # lines

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.is_used = False
        self._file: int | None = None
        self._path = ""
        self._waiting: list[bytes] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.WARNING:
                origin = "" if record.name.split(".")[0] == "trainer" else f"{record.name}: "
                text = f"{record.levelname}: {origin}{text}"
            self.write(text)
        except Exception:
            self.handleError(record)

    def write(self, text: str) -> None:
        """Append `text`. Without a buffer, so that a signal handler may call it, and a kill loses nothing."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = escape(hide_known(text)).removesuffix("\n").split("\n") if text else []
        data = "".join(f"{now} {line}\n" for line in lines).encode(errors="backslashreplace")
        self.acquire()
        try:
            if self._file is None:
                self._waiting = [*self._waiting, data][-self._LONGEST_WAIT :]
            else:
                with contextlib.suppress(OSError):
                    self._follow()
                    os.write(self._file, data)
        finally:
            self.release()

    def _follow(self) -> None:
        """Open the file again if it was moved, deleted or replaced. The lines of a deleted file are written again."""
        assert self._file is not None
        own = os.fstat(self._file)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), own):
                return
        before, self._file = self._file, open_appended(self._path)
        if own.st_nlink == 0 and os.fstat(self._file).st_size == 0:
            offset = 0
            while chunk := os.pread(before, _CHUNK, offset):
                offset += os.write(self._file, chunk)
        os.close(before)

    def open(self, path: str) -> None:
        """Write to the file at `path`, beginning with the lines that wait.

        Does nothing if a file is open: a run inside of another one writes to the log of the outer one.
        """
        if not self.is_used or self._file is not None:
            return
        with contextlib.suppress(OSError):
            self._file, self._path = open_appended(path), path
            os.write(self._file, b"".join(self._waiting))
        self._waiting = []

    def close(self) -> None:
        """Close the file, and drop the lines that wait. Later lines wait for the next file."""
        self._waiting = []
        if self._file is not None:
            os.close(self._file)
            self._file = None


LOG_FILE = LogFile()


class _LibraryWarnings(logging.Handler):
    """Writes what libraries warn of to `LOG_FILE`, and to stderr, as Python does while there is no handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        LOG_FILE.emit(record)
        if logging.getLogger().handlers == [self]:
            assert logging.lastResort is not None
            text = escape(logging.lastResort.format(record))
            shown = {"msg": text, "args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            logging.lastResort.handle(logging.makeLogRecord({**vars(record), **shown}))


@contextlib.contextmanager
def logging_to_file() -> Iterator[None]:
    """Let `LOG_FILE` get the messages of this process, and the warnings of libraries, while the block runs."""
    LOG_FILE.is_used = True
    handlers = {logging.getLogger("trainer"): LOG_FILE, logging.getLogger(): _LibraryWarnings()}
    for logger, handler in handlers.items():
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, handler in handlers.items():
            logger.removeHandler(handler)
        LOG_FILE.close()
        LOG_FILE.is_used = False


def show_messages() -> None:
    """Print what modules of `trainer` log, and nothing of what libraries log. Every process calls this as it starts.

    Progress bars of libraries would fill a log file with halves of lines, and disturb ours on a terminal: they are off,
    unless a variable of the user turns them on.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it, too
    os.environ.setdefault("TQDM_DISABLE", "1")
    logger = logging.getLogger("trainer")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_MESSAGES)


@contextlib.contextmanager
def messages_to(write: Callable[[str], None]) -> Iterator[None]:
    """Hand messages to `write`, line by line, while the block runs."""
    before, _MESSAGES.write = _MESSAGES.write, write
    try:
        yield
    finally:
        _MESSAGES.write = before


def guard_output() -> None:
    """Let stdout and stderr take any text, and drop what cannot be written (disk full, reader gone, terminal closed).

    Characters that the encoding does not have are escaped. Every process calls this before it prints: entry points,
    actors, reward processes. The flush at the end of the interpreter cannot fail either; if it did, the exit status
    would be 120. A stream that was replaced, for example by a test, stays as it is.
    """
    for standard in range(3):  # if one is closed, the next file that is opened would get its number and its output
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


def run_tool(
    parser: argparse.ArgumentParser, tool: Callable[[argparse.Namespace], object], argv: list[str] | None = None
) -> int:
    """Parse the command line and call a tool that prints its result.

    Returns the exit status: 0, or 2 after printing what is wrong with the input.
    """
    guard_output()
    try:
        tool(parser.parse_args(argv))
    except (UserError, OSError) as error:
        show(f"error: {sentence_of(error)}", error=True)
        return 2
    return 0


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
    # There is no byte buffer between the two: a signal handler that prints could not enter it a second time.
    file = _LenientFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=line_buffering)


class _LenientFile(io.FileIO):
    """A file whose writes never fail. Data that cannot be written is dropped; for stdout, stderr says so once, unless
    its reader has closed the pipe."""

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
            is_closed_pipe = error.errno == errno.EPIPE  # as in `trainer checkpoint show RUN | head`
            if self.fileno() == 1 and not self._warned and not is_closed_pipe:
                self._warned = True
                with contextlib.suppress(OSError):
                    os.write(2, f"WARNING: stdout cannot be written ({error.strerror}); text is lost\n".encode())
        return len(data)
