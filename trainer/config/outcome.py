"""How a job ends: its exit status, and what the user reads."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import traceback
from typing import NoReturn

import psutil

from trainer.errors import (
    DivergedError,
    NonFiniteError,
    NonRetryableError,
    NotSavedError,
    UserError,
    WorkerError,
    describe_with_place,
    is_disk_unwritable,
    is_out_of_memory,
    one_line,
    sentence_of,
)
from trainer.files.redaction import redact_text
from trainer.process.log_setup import LOG_FILE, show
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Stopped
from trainer.process.startup import STARTED

_ODD_FILES = (errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EINVAL, errno.ELOOP)
"""Errors of a path at which something else is than a file of its kind."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    """Exit status: 0 done, 2 the user must change something, 3 the run itself is at fault, 1 any other error, 75
    stopped early."""
    text: str = ""
    """One sentence."""
    trace: str = ""
    """In place of the sentence: the traceback of an unexpected error."""

    @property
    def shown(self) -> str:
        """Return the text for the user and the log, without secrets."""
        return redact_text(
            self.trace or (f"error: {self.text}" if self.text and self.status != EXIT_STATUS else self.text)
        )

    def show(self) -> None:
        """Print and log the text: on stdout if the run stopped on request, else on stderr."""
        if self.shown:
            show(self.shown, error=self.status != EXIT_STATUS)
            LOG_FILE.write(self.shown)

    def exit(self) -> NoReturn:
        """Exit with the status."""
        sys.stdout.flush()
        sys.stderr.flush()
        SIGNALS.end_watch()
        _end_started()
        # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
        os._exit(self.status)


def _end_started() -> None:
    """Kill the processes that modules of the user have started when they were imported, and theirs."""
    for process in STARTED:
        with contextlib.suppress(psutil.Error):
            for one in (*process.children(recursive=True), process):
                one.kill()


class JobEnded(BaseException):
    """Ends a sweep with an outcome. Not an `Exception`: Hydra would print a line of its own about it."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome


def outcome_of(error: BaseException) -> Outcome:
    """Return how a job ended that has raised `error`."""
    if isinstance(error, JobEnded):
        return error.outcome
    stop = error if isinstance(error, (Stopped, KeyboardInterrupt)) else SIGNALS.stop_behind(error)
    if stop is not None:
        return Outcome(EXIT_STATUS, str(stop) or "stopped by an interrupt; the last checkpoint is unchanged")
    if isinstance(error, SystemExit):
        return Outcome(error.code if isinstance(error.code, int) else int(error.code is not None))
    if isinstance(error, NonRetryableError):
        is_told = isinstance(error, DivergedError) or isinstance(error.__cause__, (WorkerError, NonFiniteError))
        return Outcome(3, str(error), "" if is_told else _trace_of(error, str(error)))
    if isinstance(error, (WorkerError, NonFiniteError, NotSavedError)):
        return Outcome(1, str(error))
    if isinstance(error, UserError):
        return Outcome(2, str(error))
    if isinstance(error, Exception) and is_out_of_memory(error):
        return Outcome(
            1,
            f"the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
        )
    if isinstance(error, OSError) and is_disk_unwritable(error):
        return Outcome(
            1,
            f"{error.filename or 'a file of the run'}: cannot be written ({error.strerror}); free space on the disk, "
            f"or repair it, and then {CONTINUES}",
        )
    if isinstance(error, OSError) and error.filename and error.errno in _ODD_FILES:
        return Outcome(2, sentence_of(error))
    return Outcome(1, trace=_trace_of(error, describe_with_place(error)))


def _trace_of(error: BaseException, sentence: str) -> str:
    """Return the traceback, and in the last line what a reader of the log's end needs."""
    return f"{''.join(traceback.format_exception(error)).rstrip()}\nerror: {sentence}"
