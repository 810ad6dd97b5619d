"""Where a run's metrics go: `metrics.jsonl`, Weights & Biases, TensorBoard.

`metrics.jsonl` is the record that counts. A run that is killed and resumed continues it without a duplicate, missing or
torn line, and corrects the other two to agree with it. A file that somebody deletes or changes while the run appends to
it is written again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import secrets
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from trainer.config import LoggerConfig, with_new_metrics
from trainer.errors import UserError
from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import write_file
from trainer.files.documents import is_count, is_number, parse_object
from trainer.files.redaction import redact_command, redact_text
from trainer.metrics.samples import COLUMNS, Transcript

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CUT_FILE = "metrics.cut.jsonl"
PARENT_FILE = "metrics.parent.jsonl"
"""In the run directory of a fork: the metrics of its parent up to the fork, for the report."""


class Tracker:
    """Writes the metrics of each step.

    In a run directory that already has metrics, call `rewind` before the first `log`.
    """

    def __init__(
        self,
        run_dir: str,
        logger: LoggerConfig,
        config: dict[str, Any],
        run_id: str | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            run_dir: local directory; it is created if it is missing.
            config: the resolved config without secrets, for W&B.
            run_id: the W&B run to continue, from `state_dict`; None starts a new one.
            fence: raises when this process no longer holds the run directory.

        Raises:
            UserError: the config asks for W&B, and W&B refuses or does not answer.
        """
        os.makedirs(run_dir, exist_ok=True)
        self._run_dir = run_dir
        self._path = os.path.join(run_dir, METRICS_FILE)
        self._file = AppendedFile(self._path, fence)
        is_new = not os.path.exists(self._path) or os.path.getsize(self._path) == 0
        self._last_step: int | None = -1 if is_new else None
        self.first_step: int | None = None
        """The step of the first line; None: there is no line."""
        self._is_closed = False
        self._with_tensorboard = logger.tensorboard
        self._tensorboard: SummaryWriter | None = None
        self._run_id = run_id
        self._wandb: wandb.Run | None = None
        if logger.wandb.mode != "off":
            self._run_id = run_id or secrets.token_hex(4)
            self._wandb = _start_wandb(run_dir, logger, config, self._run_id)

    def log(
        self, step: int, metrics: Mapping[str, float], samples: Mapping[str, Sequence[Transcript]] | None = None
    ) -> None:
        """Record the metrics of a finished step (0: the validation before training). Steps must increase.

        Args:
            samples: episodes to read in W&B and TensorBoard, by the kind of data.

        NaN and infinity, which JSON does not have, become `null` in `metrics.jsonl`.

        Raises:
            OSError: the line could not be written completely, for example because the disk is full.
        """
        assert self._last_step is not None, f"{self._path} has lines of an earlier process: rewind first"
        assert step > self._last_step, f"step {step} is logged after step {self._last_step}"
        values = {name: _plain(metrics[name]) for name in sorted(metrics)}
        assert "step" not in values
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.append(json.dumps({"step": step, **finite}, allow_nan=False).encode() + b"\n")
        if self._with_tensorboard and self._tensorboard is None:
            # Not before `rewind`: events of earlier processes count up to the last kept step only.
            self._tensorboard = _open_tensorboard(self._run_dir, purge_step=self._last_step + 1)
        self._last_step = step
        self.first_step = step if self.first_step is None else self.first_step
        self._log_tensorboard(step, values, samples or {})
        self._log_wandb(step, values, samples or {})

    def rewind(self, step: int) -> None:
        """Remove the lines after `step` (-1: all lines), before the first `log`.

        The file is replaced atomically, without lines of later steps and without a torn last line. Removed lines
        are kept in `metrics.cut.jsonl`, except those that differ only in times from a line that is there already.
        TensorBoard gets a mark that hides the later events. W&B cannot remove steps: its later steps stay as they
        are and are not sent again. Steps that W&B had not received when the run was killed are sent now, so that in
        offline mode each `offline-run-…` directory is complete: sync the newest.

        Raises:
            UserError: a line other than the last is not a JSON object.
        """
        if self.first_step is not None:  # lines that this process has kept or logged
            self._file.check()
        rows = read_metrics(self._path)
        kept = [row for row in rows if row["step"] <= step]
        self._keep_cut([row for row in rows if row["step"] > step])
        self._file.rewrite(as_lines(kept).encode())
        self._last_step = step
        self.first_step = kept[0]["step"] if kept else None
        if self._wandb is not None and self._wandb.step > step + 1:
            LOG.warning("W&B has this run's steps before %d; they are not sent again", self._wandb.step)
        for row in kept:
            self._log_wandb(row["step"], {name: value for name, value in row.items() if name != "step"}, {})

    def _keep_cut(self, cut: list[dict[str, Any]]) -> None:
        path = os.path.join(self._run_dir, CUT_FILE)
        kept = read_metrics(path)
        seen = {_identity(row) for row in kept}
        new = [row for row in cut if _identity(row) not in seen]
        if new:
            write_file(path, as_lines([*kept, *new]))

    def flush(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not be there without the lines before it."""
        self._file.sync()

    def state_dict(self) -> dict[str, str | None]:
        """Return the `run_id` for the next Tracker. It is kept while W&B is off, too."""
        return {"wandb_run_id": self._run_id}

    def close(self, exit_code: int = 0) -> None:
        """Finish W&B (as failed if `exit_code` is not 0) and TensorBoard, and end their processes."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError, UserError):  # the run has ended, or reports itself why it cannot write
                self._file.check()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            import wandb

            self._wandb.finish(exit_code=exit_code)
            self._wandb = None
            wandb.teardown()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def _log_wandb(
        self, step: int, values: Mapping[str, float | None], samples: Mapping[str, Sequence[Transcript]]
    ) -> None:
        # `step` of a W&B run is the first step that it does not have. commit: send this step now, not together
        # with the next one.
        if self._wandb is not None and step >= self._wandb.step:
            import wandb

            tables = {
                f"samples/{kind}": wandb.Table(columns=list(COLUMNS), data=[list(one.row()) for one in transcripts])
                for kind, transcripts in samples.items()
            }
            self._wandb.log({**values, **tables}, step=step, commit=True)

    def _log_tensorboard(
        self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[Transcript]]
    ) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            for kind, transcripts in samples.items():
                blocks = "\n\n".join(f"{one.name}\n{one.block()}" for one in transcripts)
                # TensorBoard renders Markdown: indented text is shown as it is.
                self._tensorboard.add_text(f"samples/{kind}", textwrap.indent(blocks, "    "), step)
            self._tensorboard.flush()  # it would keep events for two minutes, and a kill would lose them


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Return the objects of a `metrics.jsonl` in file order. `null` becomes None.

    A torn last line (the machine went down) is left out. Without a file the list is empty.

    Raises:
        UserError: another line is not a JSON object with a `step`.
    """
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        lines = file.read().splitlines()
    rows = [_parse(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    for number, row in enumerate(rows, start=1):
        if row is None:
            raise UserError(f"{path}:{number} has no JSON object with a step; repair or remove the file")
    return rows


def as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as the content of a `metrics.jsonl`."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def values_of(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of a metric in lines of a `metrics.jsonl`, without those that were not finite."""
    return [row[name] for row in rows if row.get(name) is not None]


def _identity(row: Mapping[str, Any]) -> str:
    """Return a line without its times: the same for a step that was trained again with the same result."""
    return json.dumps({name: row[name] for name in sorted(row) if not name.startswith(("time/", "perf/"))})


def first_step(path: str) -> int | None:
    """Return the step of the first line of a `metrics.jsonl`; None if it has no line."""
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        row = _parse(file.readline())
    return None if row is None else row["step"]


def check_lines(path: str, first: int | None, last: int) -> None:
    """Check that a `metrics.jsonl` has one line for each step from `first` to `last`, the checkpoint's.

    Args:
        first: None if the checkpoint does not name it; then it is that of the first line.

    Raises:
        UserError: a line is missing or duplicated.
    """
    counts = Counter(row["step"] for row in read_metrics(path))
    if first is None:
        first = min(counts, default=last + 1)
        if first > last:
            LOG.warning(
                "%s has no line up to step %d, and the checkpoint does not name the first line: all metrics of the run "
                "until then are lost",
                path,
                last,
            )
    wanted = range(first, last + 1)
    doubled = sorted(step for step, count in counts.items() if count > 1 and step <= last)
    missing = next((step for step in wanted if step not in counts), None)  # the first: `last` may be any number
    if doubled or missing is not None:
        if missing is None or doubled and doubled[0] < missing:
            what = f"has more than one line for step {doubled[0]}"
        else:
            what = f"has no line for step {missing}"
        raise UserError(
            f"{path}: {what}, which this run has logged once; restore the file, or fork the checkpoint into another "
            "trainer.run_name with trainer.resume_mode=from_path"
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        return with_new_metrics(parse_object(line, {"step": is_count, str: (is_number, NoneType)}))
    except ValueError:
        return None


def _plain(value: float) -> float:
    """Return a number of NumPy or torch as a number of Python. Integers stay integers."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _open_tensorboard(run_dir: str, purge_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.path.join(run_dir, "tensorboard"), purge_step=purge_step)


def _start_wandb(run_dir: str, logger: LoggerConfig, config: dict[str, Any], run_id: str) -> wandb.Run:
    if logger.wandb.mode == "offline":
        # W&B reports its own errors in offline mode, too. Without a network that takes ten seconds at each start.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    command = sys.argv  # W&B saves it
    try:
        sys.argv = redact_command(command)
        return wandb.init(
            **vars(logger.wandb),
            id=run_id,
            # Offline there is no server that knows the run's steps: each process writes all of them (see `rewind`).
            resume="allow" if logger.wandb.mode == "online" else None,
            dir=run_dir,
            config=config,
            settings=wandb.Settings(
                console="off",  # capturing stdout would disturb the progress display
                quiet=True,  # no table of all metrics at the end
            ),
        )
    except wandb.Error as error:
        mode = logger.wandb.mode
        raise UserError(
            f"logger.wandb.mode={mode}: {redact_text(str(error))}; correct that, or choose offline or off"
        ) from error
    finally:
        sys.argv = command
