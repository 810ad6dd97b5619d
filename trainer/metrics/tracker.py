"""Where a run's metrics go: `metrics.jsonl`, and services such as Weights & Biases (`trainer.metrics.sinks`).

`metrics.jsonl` is the record that counts. A run that is killed and resumed continues it without a duplicate, missing or
torn line, and corrects the others to agree with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import NoneType
from typing import Any

from pydantic_core import from_json

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import open_regular, write_file
from trainer.files.documents import is_count, is_number, parse_object
from trainer.files.hf_hub import first_line
from trainer.metrics.sinks import SERVICES, OwnSink, Samples, Sink, TensorBoard

LOG = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_BEGIN = re.compile(rb'\{"step": (\d{1,18})[,}]')  # how a line begins that this package has written
_NUMBERS = frozenset((int, float, NoneType))
_LINES_AT_ONCE = 1000


class Tracker:
    """Writes the metrics of each step. Where a run directory has metrics, `rewind` comes before the first `log`."""

    def __init__(
        self,
        run_dir: str,
        logger: LoggerConfig,
        config: dict[str, Any],
        run_ids: Mapping[str, str | None] | None = None,
        fence: Callable[[], None] = lambda: None,
        server: Sink | None = None,
        restarted: bool = False,
    ) -> None:
        """Args:
            config: the resolved config without secrets, for services.
            run_ids: the runs of services to continue, from `state_dict` of this run's checkpoint.
            fence: raises when this process no longer holds the run directory.
            restarted: whether the run has begun in this process, perhaps without a line.

        Raises:
            UserError: the run begins, and the config asks for a service that refuses or does not answer.
        """
        os.makedirs(run_dir, exist_ok=True)
        self._path = os.path.join(run_dir, METRICS_FILE)
        self._fence = fence
        self._file = AppendedFile(self._path, fence)
        is_new = not os.path.exists(self._path) or os.path.getsize(self._path) == 0
        self._last_step: int | None = -1 if is_new else None
        self._is_first_start = is_new and not restarted
        self.first_step: int | None = None  # the step of the first line; None: there is no line
        self._is_closed = False
        self._run_ids: dict[str, str | None] = {"wandb_run_id": None, **(run_ids or {})}
        self._sinks: list[Sink] = [] if server is None else [server]
        if "tensorboard" in logger.services:
            self._sinks.append(TensorBoard(run_dir))
        for sink in logger.sinks:
            with self._left_out_if_it_fails():
                self._sinks.append(OwnSink(run_dir, sink, config))
        for name, service in SERVICES.items():
            if name in logger.services:
                with self._left_out_if_it_fails():
                    opened = service(run_dir, logger, config, self._run_ids.get(f"{name}_run_id"))
                    self._run_ids[f"{name}_run_id"] = opened.run_id
                    self._sinks.append(opened)

    @contextlib.contextmanager
    def _left_out_if_it_fails(self) -> Iterator[None]:
        """Let a service that fails end a run at its first start alone: `metrics.jsonl` has all metrics."""
        try:
            yield
        except UserError as problem:
            if self._is_first_start:
                raise
            LOG.warning("%s. The run goes on without; its next start sends the steps", problem)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None = None) -> None:
        """Record the metrics of a finished step (0: the validation before training), and episodes to read. Steps must
        increase.

        NaN and infinity, which JSON does not have, become `null` in `metrics.jsonl`. While the disk is full, lines wait
        in memory (see `AppendedFile`), and `flush` raises.

        Raises:
            OSError: the line could not be written for another reason.
        """
        assert self._last_step is not None, f"{self._path} has lines of an earlier process: rewind first"
        assert step > self._last_step, f"step {step} is logged after step {self._last_step}"
        assert "step" not in metrics
        plain = {name: int(v) if isinstance(v, numbers.Integral) else float(v) for name, v in metrics.items()}
        values = dict(sorted(plain.items()))
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.append(as_lines([{"step": step, **finite}]).encode())
        self._last_step = step
        self.first_step = step if self.first_step is None else self.first_step
        for sink in list(self._sinks):
            try:
                if samples:
                    sink.samples(step, samples)
                sink.log(step, values)
            except Exception as error:  # whatever the client of a service raises must not end the run
                self._sinks.remove(sink)  # it gets no more steps from this process
                problem = "%s gets no more steps (%s); %s has them all"
                LOG.warning(problem, type(sink).__name__, first_line(error), METRICS_FILE)

    def rewind(self, step: int) -> None:
        """Remove the lines after `step` (-1: all lines), before the first `log`.

        A kill leaves the file as it was, or without lines of later steps and without a torn last line.
        Sinks agree with the lines that are kept, as far as they can (see `Sink.start`).

        Raises:
            UserError: a line other than the last is not a JSON object.
        """
        if self.first_step is not None:  # lines that this process has kept or logged
            self._file.sync()
        lines = MetricsLines(self._path)
        kept = [one for one in lines.steps if one <= step]
        if kept and kept == list(lines.steps[: len(kept)]):
            self._file.cut(lines.starts[len(kept)])
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self._path}.tmp")  # a kill may have left it
        else:  # a file that somebody has changed, or an empty one
            write_file(self._path, as_lines(row for row in lines if row["step"] <= step), self._fence)
        self._last_step = step
        self.first_step = kept[0] if kept else None
        rows = MetricsLines(self._path)
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            with self._left_out_if_it_fails():
                sink.start(rows, step)
                self._sinks.append(sink)

    def flush(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not be there without the lines before it."""
        self._file.sync()

    def state_dict(self) -> dict[str, str | None]:
        """Return the `run_ids` for the next Tracker. They are kept while a service is off, too."""
        return dict(self._run_ids)

    def close(self, exit_code: int = 0) -> None:
        """Finish the runs of services (as failed if `exit_code` is not 0), and end their processes."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError, UserError):  # the run has ended, or reports itself why it cannot write
                self._file.sync()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.end(exit_code)
            except Exception as error:  # see `log`
                LOG.warning("%s has not been closed (%s)", type(sink).__name__, first_line(error))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)


class MetricsLines(Sequence[dict[str, Any]]):
    """The objects of a `metrics.jsonl` in file order, each decoded when it is read: a long run has millions of numbers.

    `null` becomes None. A torn last line (the machine went down) is left out. Without a file there are none.

    Raises:
        UserError: another line is not a JSON object with a `step` and numbers. If it begins as one, the code that reads
            it gets the error.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.steps = array("q")  # the step of each line
        self.starts = array("q", [0])  # the offset of each line, and the one after the last
        last = b""
        with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
            for line in file:
                if last:
                    begin = _BEGIN.match(last)
                    self.steps.append(int(begin[1]) if begin else self._decode(len(self), last)["step"])
                    self.starts.append(self.starts[-1] + len(last))
                last = line
        with contextlib.suppress(ValueError):
            self.steps.append(_parse(last)["step"])
            self.starts.append(self.starts[-1] + len(last))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return next(self._rows([chosen])) if isinstance(chosen, int) else list(self._rows(chosen))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._rows(range(len(self)))

    def after(self, step: int) -> list[dict[str, Any]]:
        return list(self._rows([index for index, one in enumerate(self.steps) if one > step]))

    def having(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield the rows with a metric whose name begins with `prefix`."""
        if not prefix.startswith("val/"):
            return self._rows(self._find(prefix))
        return (row for row in self._rows(self._validated) if any(name.startswith(prefix) for name in row))

    def thinned(self, most: int, steps: Collection[int] = ()) -> list[dict[str, Any]]:
        """Return about `most` rows, evenly spread, the last one and those of `steps`. As many others with a validation
        have that alone."""
        whole = {index for index, step in enumerate(self.steps) if step in steps or index == len(self) - 1}
        whole.update(range(0, len(self), -(-len(self) // most) or 1))
        chosen = sorted(whole.union(self._validated[:: -(-len(self._validated) // most) or 1]))
        return [
            row if index in whole else {name: row[name] for name in row if name.startswith(("step", "val/"))}
            for index, row in zip(chosen, self._rows(chosen), strict=True)
        ]

    @cached_property
    def _validated(self) -> list[int]:
        """The indices of lines with a validation."""
        return list(self._find("val/"))

    def _find(self, prefix: str) -> Iterator[int]:
        """Yield the indices of lines with a metric whose name begins with `prefix`."""
        text = json.dumps(prefix)[:-1].encode()  # the only texts of a line are the names
        with open_regular(self._path) if len(self) else contextlib.nullcontext() as file:
            for first in range(0, len(self), _LINES_AT_ONCE):
                begin, end = self.starts[first], self.starts[min(first + _LINES_AT_ONCE, len(self))]
                block = file.read(end - begin)
                place = block.find(text)
                while place >= 0:
                    index = bisect_right(self.starts, begin + place, first) - 1
                    yield index
                    place = block.find(text, self.starts[index + 1] - begin)

    def _rows(self, indices: Iterable[int]) -> Iterator[dict[str, Any]]:
        with open_regular(self._path) if len(self) else contextlib.nullcontext() as file:
            following = 0
            for index in indices:
                if index != following:
                    file.seek(self.starts[index])
                following = index + 1
                yield self._decode(index, file.read(self.starts[following] - self.starts[index]))

    def _decode(self, index: int, line: bytes) -> dict[str, Any]:
        try:
            return _parse(line)
        except ValueError as error:
            raise UserError(
                f"{self._path}:{index + 1} has no JSON object with a step and numbers ({first_line(error)}); repair or "
                "remove the file"
            ) from error


def read_metrics(path: str) -> list[dict[str, Any]]:
    return list(MetricsLines(path))


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def check_lines(path: str, first: int | None, last: int) -> None:
    """Raise a `UserError` unless each step from `first` (None: there is none) to `last` has one line."""
    lines = MetricsLines(path)
    for _ in lines:  # a damaged line is refused before anything starts
        pass
    counts = Counter(lines.steps)
    steps = range(last + 1 if first is None else first, last + 1)
    wrong = next((step for step in steps if counts[step] != 1), None)  # the first: `last` may be any number
    if wrong is not None:
        raise UserError(
            f"{path}: has {'more than one' if counts[wrong] else 'no'} line for step {wrong}, which this run has "
            "logged once; restore the file, or fork the checkpoint into another trainer.run_name with "
            "trainer.resume_mode=from_path"
        )


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = from_json(line, allow_inf_nan=False)
        is_plain = type(row) is dict and is_count(row.get("step")) and _NUMBERS.issuperset(map(type, row.values()))
        if is_plain and math.hypot(*filter(None, row.values())) < 2**63:  # none of them is as large
            return row
    except (ValueError, OverflowError):
        pass
    return parse_object(line, {"step": is_count, str: (is_number, NoneType)})
