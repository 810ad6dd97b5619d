"""Services and files that get metrics besides `metrics.jsonl`: what each of them promises, W&B and TensorBoard."""

from __future__ import annotations

import inspect
import logging
import math
import os
import secrets
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.redaction import redact_command, redact_text
from trainer.import_utils import import_function, problem_of_method, user_code
from trainer.metrics.samples import COLUMNS, Transcript

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger(__name__)

KEY = "logger.services"

_METHODS = {"start": ("rows", "step"), "log": ("step", "values"), "samples": ("step", "samples"), "end": ("exit_code",)}
"""The methods of a sink, and what they get."""


Samples = Mapping[str, Sequence[Transcript]]
"""Episodes to read, by the kind of data."""
Rows = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`. `null` is None."""


class Sink(Protocol):
    """A service that gets the metrics of a run, and agrees with `metrics.jsonl` after a resume."""

    def start(self, rows: Rows, step: int) -> None:
        """Agree with the lines that the run has kept: here, log all of them.

        Args:
            rows: lines of `metrics.jsonl` up to `step`.
            step: the run continues with the next one. -1: it begins.
        """
        for row in rows:
            self.log(row["step"], {name: value for name, value in row.items() if name != "step"})

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take the metrics of a finished step. They may be NaN, infinite or, in lines of the run, None."""

    def samples(self, step: int, samples: Samples) -> None:
        """Take episodes to read, before the metrics of the step."""

    def end(self, exit_code: int) -> None:
        """Send what is left, and end. 0: the run has succeeded so far."""


def finite_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values without NaN, infinity and None."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def group_of(logger: LoggerConfig, config: Mapping[str, Any]) -> str | None:
    """Return the name under which services show the runs of a sweep together; None: the run is not of a sweep."""
    run_name = config.get("trainer", {}).get("run_name")
    return run_name if logger.name != run_name else None


class OwnSink(Sink):
    """A `Sink` around that of an import path, whose exceptions name it. UserError: the sink cannot be built."""

    def __init__(self, run_dir: str, path: str, config: Mapping[str, Any]) -> None:
        self._name = path
        self._sink: Sink = self._call(find_sink(path), run_dir, config)

    def start(self, rows: Rows, step: int) -> None:
        self._call(self._sink.start, rows, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(self._sink.log, step, values)

    def samples(self, step: int, samples: Samples) -> None:
        self._call(self._sink.samples, step, samples)

    def end(self, exit_code: int) -> None:
        self._call(self._sink.end, exit_code)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with user_code(f"{KEY}={self._name}: {{}}", has_place=True):
            return function(*args)


def find_sink(path: str) -> Callable[..., Sink]:
    """Import the class of a sink.

    Raises:
        UserError: there is none, or it lacks a method, or calls of it would fail.
    """
    kind = import_function(path, KEY)
    for name, arguments in _METHODS.items():
        problem = None
        if not callable(method := getattr(kind, name, None)):
            problem = f"has no method {name}; it needs start, log, samples and end"
        elif inspect.iscoroutinefunction(method):
            problem = f"{name} is async, and nothing awaits it; put what takes long on a thread"
        if problem := problem or problem_of_method(kind, name, arguments):
            raise UserError(f"{KEY}={path}: {problem}")
    try:
        inspect.signature(kind).bind("", {})
    except TypeError as error:
        raise UserError(f"{KEY}={path}: {error}; it gets run_dir and config") from error
    return kind


class TensorBoard(Sink):
    """Events in `{run_dir}/tensorboard`. A mark hides those of steps that a resumed run trains again."""

    def __init__(self, run_dir: str) -> None:
        self._directory = os.path.join(run_dir, "tensorboard")
        self._purge_step = 0
        self._writer: SummaryWriter | None = None

    def start(self, rows: Rows, step: int) -> None:
        self.end(0)
        self._purge_step = step + 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._open().add_scalar(name, value, step)
        self._open().flush()  # it would keep events for two minutes, and a kill would lose them

    def samples(self, step: int, samples: Samples) -> None:
        for kind, transcripts in samples.items():
            blocks = "\n\n".join(f"{one.name}\n{one.block()}" for one in transcripts)
            # TensorBoard renders Markdown: indented text is shown as it is.
            self._open().add_text(f"samples/{kind}", textwrap.indent(blocks, "    "), step)

    def end(self, exit_code: int) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Not before `start`: events of earlier processes count up to the last kept step only.
            self._writer = SummaryWriter(self._directory, purge_step=self._purge_step)
        return self._writer


class WandB(Sink):
    """A run of Weights & Biases.

    W&B cannot remove steps: those that it has of an earlier process stay as they are and are not sent again. Steps that
    it had not received are sent now, so that in offline mode each `offline-run-…` directory is complete: sync the
    newest.

    Args:
        config: the resolved config without secrets.
        run_id: the run to continue; None starts a new one.

    Raises:
        UserError: W&B refuses, or does not answer.
    """

    def __init__(self, run_dir: str, logger: LoggerConfig, config: dict[str, Any], run_id: str | None) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "offline":
            # W&B reports its own errors in offline mode, too. Without a network that takes ten seconds at each start.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        command = sys.argv  # W&B saves it
        # console: capturing stdout would disturb the progress display. quiet: no table of all metrics at the end.
        settings = wandb.Settings(console="off", quiet=True)
        try:
            sys.argv = redact_command(command)
            self._run = wandb.init(
                project=logger.project,
                name=logger.name,
                group=os.environ.get("WANDB_RUN_GROUP") or group_of(logger, config),
                id=self.run_id,
                # Offline there is no server that knows the run's steps: each process writes all of them.
                resume="allow" if mode == "online" else None,
                dir=run_dir,
                config=config,
                settings=settings,
            )
        except wandb.Error as error:
            # An answer to a request with the key is not repeated: it may hold the key.
            text = "no access" if isinstance(error, wandb.errors.CommError) else redact_text(str(error))
            raise UserError(f"logger.services=[wandb]: {text}; correct that, or set WANDB_MODE=offline") from error
        finally:
            sys.argv = command

    def start(self, rows: Rows, step: int) -> None:
        if self._run.step > step + 1:
            LOG.warning("W&B has this run's steps before %d; they are not sent again", self._run.step)
        super().start(rows, step)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        # `step` of a W&B run is the first step that it does not have. commit: send this step now.
        if step >= self._run.step:
            self._run.log(dict(values), step=step, commit=True)

    def samples(self, step: int, samples: Samples) -> None:
        if step >= self._run.step:
            import wandb

            for kind, transcripts in samples.items():
                table = wandb.Table(columns=list(COLUMNS), data=[list(one.row()) for one in transcripts])
                self._run.log({f"samples/{kind}": table}, step=step, commit=False)

    def end(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        wandb.teardown()
