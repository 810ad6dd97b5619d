"""Standard output and error: messages to the user, and streams whose failure never ends a program.

Modules log messages to the user with `LOG = logging.getLogger(__name__)`: `LOG.info(text)` prints the text unchanged,
`LOG.warning(text)` prints `WARNING: text`. In the driver, `log.txt` of the run directory receives all messages with
their times.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import logging
import os
import select
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

from trainer.errors import UserError, sentence_of
from trainer.files.appended import open_appended, write_all_or_nothing
from trainer.files.redaction import redact_text
from trainer.process.signals import open_standard_streams

_JOINERS = "\u200c\u200d"  # characters of the spelling of Persian and Indic words, and of emoji


def escape(text: str, lines: bool = True) -> str:
    """Return `text` with escapes for characters that control a terminal, change the text direction or are invisible.

    Names, texts of models and servers, and files of other people go through this before they are printed or logged. The
    colours of the progress display do not. Without `lines`, the text is one line: breaks and tabs are escaped, too.
    """
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    text = text.replace("\r\n", "\n") if lines else text

    def is_plain(i: int, c: str) -> bool:
        is_joiner = c in _JOINERS and i > 0 and not text[i - 1].isascii()
        return c.isprintable() or c in allowed or unicodedata.category(c) == "Zs" or is_joiner

    return "".join(c if is_plain(i, c) else c.encode("unicode_escape").decode() for i, c in enumerate(text))


def encodable(name: str) -> str:
    """Return a name with escapes for its half surrogates: bytes of a path that are not UTF-8, or given by user code."""
    return name.encode(errors="backslashreplace").decode()


def show(text: str, error: bool = False) -> None:
    """Print `text` on stdout, or on stderr, with control characters escaped (see `escape`)."""
    print(escape(text), file=sys.stderr if error else sys.stdout, flush=True)


class _Messages(logging.Handler):
    """Prints log records as lines of text."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.write: Callable[[str], object] = functools.partial(print, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = escape(redact_text(self.format(record)))
            self.write(text if record.levelno < logging.WARNING else f"{record.levelname}: {text}")
        except Exception:
            self.handleError(record)


_MESSAGES = _Messages()


class LogFile(logging.Handler):
    """Appends log records to a file, each line with its time.

    Lines wait in memory until `open`, because this process may write to the run directory only when it holds the lock.
    Lines that cannot be written, for example to a full disk, wait for the next one. Of very many, the last are kept.
    """

    _MAX_WAITING = 1000  # lines

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.is_used = False
        self._file: int | None = None
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
        """Append `text` without a buffer, so that a signal handler may call this and a kill loses nothing."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = escape(redact_text(text)).removesuffix("\n").split("\n") if text else []
        data = "".join(f"{now} {line}\n" for line in lines).encode(errors="backslashreplace")
        self.acquire()
        try:
            # A signal handler may interrupt this and write as well: what is taken here is not there twice.
            lines_to_write, self._waiting = [*self._waiting, data][-self._MAX_WAITING :], []
            if self._file is None or not self._is_written(b"".join(lines_to_write)):
                self._waiting = [*lines_to_write, *self._waiting][-self._MAX_WAITING :]
        finally:
            self.release()

    def _is_written(self, data: bytes) -> bool:
        """Append `data` to the file, and return whether that was possible."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            write_all_or_nothing(self._file, data)
            return True
        return False

    def open(self, path: str) -> None:
        """Write to the file at `path`, starting with the lines that wait; not if a file is open: the start of the run
        may have been recorded early."""
        if not self.is_used or self._file is not None:
            return
        with contextlib.suppress(OSError):
            self._file = open_appended(path)
            write_all_or_nothing(self._file, b"".join(self._waiting))
            self._waiting = []

    def close(self) -> None:
        """Write the lines that wait, or drop them if the disk is still full. Later lines wait for the next file."""
        if self._file is not None and self._waiting:
            self._is_written(b"".join(self._waiting))
        self._waiting = []
        if self._file is not None:
            os.close(self._file)
            self._file = None


LOG_FILE = LogFile()


class _LibraryWarnings(logging.Handler):
    """Writes the warnings of libraries to `LOG_FILE` and to stderr, as Python does without a handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        LOG_FILE.emit(record)
        if logging.getLogger().handlers == [self]:
            assert logging.lastResort is not None
            text = escape(redact_text(logging.lastResort.format(record)))
            shown = {"msg": text, "args": None, "exc_info": None, "exc_text": None, "stack_info": None}
            logging.lastResort.handle(logging.makeLogRecord({**vars(record), **shown}))


@contextlib.contextmanager
def logging_to_file() -> Iterator[None]:
    """Write the messages of this process and the warnings of libraries to `LOG_FILE` while the block runs."""
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
    """Print the messages of `trainer` modules, but not those of libraries. Every process calls this at its start.

    Progress bars of libraries would fill a log file with incomplete lines and disturb ours on a terminal. They are off
    unless the user turns them on with an environment variable.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it, too
    os.environ.setdefault("TQDM_DISABLE", "1")
    logger = logging.getLogger("trainer")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_MESSAGES)


@contextlib.contextmanager
def showing_messages() -> Iterator[None]:
    """Do what `show_messages` does while the block runs: the program around it has a log of its own."""
    logger = logging.getLogger("trainer")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    show_messages()
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@contextlib.contextmanager
def messages_to(write: Callable[[str], None]) -> Iterator[None]:
    """Pass messages to `write`, line by line, while the block runs."""
    previous, _MESSAGES.write = _MESSAGES.write, write
    try:
        yield
    finally:
        _MESSAGES.write = previous


def guard_output() -> None:
    """Make writes to stdout and stderr never fail. Drop text that cannot be written (disk full, pipe closed).

    Characters that the encoding lacks are escaped. Every process calls this before it prints: entry points, actors,
    reward processes. The flush at the exit of the interpreter cannot fail either; otherwise the exit status would be
    120. A stream that has been replaced, for example by a test, is left unchanged.
    """
    open_standard_streams()
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


class ToolParser(argparse.ArgumentParser):
    """A parser of a command line that raises a UserError of one sentence, instead of printing a usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` shows the arguments")


def run_tool(
    parser: ToolParser,
    tool: Callable[[argparse.Namespace], int | None],
    argv: list[str] | None = None,
    status_of: Callable[[Exception], int] = lambda error: 2,
) -> int:
    """Parse the command line and call a tool that prints its result.

    Returns the exit status: that of the tool (None: 0), or `status_of` an error, after printing the error.
    """
    guard_output()
    try:
        return tool(parser.parse_args(argv)) or 0
    except (UserError, OSError) as error:
        show(f"error: {escape(sentence_of(error), lines=False)}", error=True)
        return status_of(error)


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
    # No byte buffer between the two, because a signal handler that prints could not enter the buffer a second time.
    file = _LenientFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=line_buffering)


class _LenientFile(io.FileIO):
    """A file whose writes never fail. Data that cannot be written is dropped. For stdout, a warning on stderr reports
    this once, unless the reader has closed the pipe."""

    _warned = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        remaining = memoryview(data)
        try:
            while remaining:
                written = super().write(remaining)
                if written is None:  # a non-blocking file that is full
                    select.select([], [self], [])
                else:
                    remaining = remaining[written:]
        except OSError as error:
            is_closed_pipe = error.errno == errno.EPIPE  # as in `trainer checkpoint ls RUN | head`
            if self.fileno() == 1 and not self._warned and not is_closed_pipe:
                self._warned = True
                with contextlib.suppress(OSError):
                    os.write(2, f"WARNING: stdout is not writable ({error.strerror}); text is lost\n".encode())
        return len(data)
