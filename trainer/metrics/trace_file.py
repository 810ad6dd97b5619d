"""The timeline of a run: `{run_dir}/trace.json`, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

It is a JSON array of Chrome trace events, one a line, without the closing bracket, which the format leaves optional.
Every start of the run adds to it. A kill can leave an incomplete last line, which the next start removes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.appended import cut_torn_line
from trainer.files.atomic_io import naming
from trainer.process.signals import SIGNALS
from trainer.process.tracing import DRIVER, MAIN, TRACER, Span

LOG = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
_FLUSH_S = 1.0
_BEGIN = b"[\n"


class Timeline:
    """Writes the spans of a run, while `fence` does not raise. If it cannot write, it says so once and ends. Runs may
    nest: the spans of an inner run go to its own file, if it has one."""

    def __init__(
        self,
        run_dir: str,
        config: LoggerConfig,
        fence: Callable[[], None] = lambda: None,
        most_bytes: int = 256 << 20,
    ):
        self._path = os.path.join(run_dir, TRACE_FILE)
        self._most_bytes = most_bytes
        self._epoch = time.time() - time.monotonic()
        self._named: set[tuple[str, str]] = set()  # processes and rows that the file has names for
        self._free_from: dict[tuple[str, str], list[float]] = {}  # of rows whose spans may overlap
        self._is_begun = False
        self._is_wanted = config.trace
        self._fence = fence
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self) -> Timeline:
        if self._is_wanted:
            TRACER.is_on = True
            self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
            with SIGNALS.blocked():
                self._thread.start()
        return self

    def flush(self) -> None:
        with self._lock:
            if self._thread is None or not (spans := TRACER.take()):
                return
            try:
                self._fence()
                self.write(spans)
            except (UserError, OSError) as error:
                TRACER.is_on = False
                self._ending.set()
                if not isinstance(error, UserError):  # else another job has taken the run, as other code reports
                    LOG.warning("logger.trace: %s; the timeline ends here, and training continues", error)

    def close(self) -> None:
        """Write the last spans."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self.flush()
            self._thread = None
            TRACER.is_on = False

    def _run(self) -> None:
        while not self._ending.wait(_FLUSH_S):
            self.flush()

    def write(self, spans: Sequence[Span]) -> None:
        """Append spans, unless the file is larger than `most_bytes`. Raises OSError: it is, or cannot be written."""
        with naming(self._path):
            if not self._is_begun:
                cut_torn_line(self._path)
            size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
            if size > self._most_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if size == 0:  # also if somebody has deleted it
                self._named.clear()
            data = self._lines(spans)
            with open(self._path, "ab") as file:
                file.write(data if size else _BEGIN + data)
            self._is_begun = True

    def _row_of(self, span: Span) -> str:
        """Return the row of a span. Of a row whose spans may overlap, the first one where the span has room."""
        if not span.row.endswith("*"):
            return span.row
        name, free_from = span.row[:-1], self._free_from.setdefault((span.process, span.row), [])
        number = next((i for i, end in enumerate(free_from) if end <= span.start), len(free_from))
        free_from[number:] = [span.end, *free_from[number + 1 :]]
        return f"{name} {number + 1}" if number else name

    def _lines(self, spans: Sequence[Span]) -> bytes:
        events: list[dict[str, object]] = []
        if not self._is_begun:
            mark = {"name": f"start on {socket.gethostname()}", "ph": "i", "s": "g"}
            place = {"pid": _number(DRIVER), "tid": _number(DRIVER, MAIN)}
            events.append({**mark, "ts": self._microseconds(min(span.start for span in spans)), **place})
        for span in spans:
            process, row = span.process or DRIVER, self._row_of(span)
            place = {"pid": _number(process), "tid": _number(process, row)}
            for kind, key, name in (("process_name", "", process), ("thread_name", row, row)):
                if (process, key) not in self._named:
                    self._named.add((process, key))
                    events.append({"name": kind, "ph": "M", **place, "args": {"name": name}})
            start, end = self._microseconds(span.start), self._microseconds(span.end)
            details = {"args": dict(span.details)} if span.details else {}
            events.append({"name": span.name, "ph": "X", "ts": start, "dur": end - start, **place, **details})
        return b"".join(json.dumps(event).encode() + b",\n" for event in events)

    def _microseconds(self, seconds: float) -> int:
        return int(1e6 * (seconds + self._epoch))


def _number(*names: str) -> int:
    """Return the number of a process or a row, the same in every start of the run."""
    return zlib.crc32("\0".join(names).encode()) & 0x7FFFFFFF
