"""Where a tracker sends metrics besides `metrics.jsonl`: what each of them promises, W&B and TensorBoard."""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.redaction import redact_command, redact_text
from trainer.metrics.samples import COLUMNS, Transcript

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger(__name__)

Samples = Mapping[str, Sequence[Transcript]]
"""Episodes to read, by the kind of data."""


TIMED = ("time/", "perf/")
"""Beginnings of the metrics that differ when a step is trained again with the same result."""


class Sink(Protocol):
    """A place for metrics that agrees with `metrics.jsonl` after a resume."""

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Agree with the lines that the run has kept.

        Args:
            rows: lines of `metrics.jsonl` up to `step`. `null` is None.
            step: the run goes on with the next one. -1: it starts anew.
        """

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """Take the metrics of a finished step. They may be NaN or infinite."""

    def close(self, exit_code: int) -> None:
        """Send what is left, and end. 0: the run has succeeded so far."""


class Service(Sink, Protocol):
    """A sink outside of the run directory, with runs of its own."""

    run_id: str
    """The run that a resume continues. It may become another one."""


def steps_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Return the step and the values of each line of a `metrics.jsonl`."""
    return ((row["step"], {name: value for name, value in row.items() if name != "step"}) for row in rows)


def finite_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values without NaN, infinity and None."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


class TensorBoard:
    """Events in `{run_dir}/tensorboard`. A mark hides those of steps that a resumed run trains again."""

    def __init__(self, run_dir: str) -> None:
        self._directory = os.path.join(run_dir, "tensorboard")
        self._purge_step = 0
        self._writer: SummaryWriter | None = None

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self.close(0)
        self._purge_step = step + 1

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Not before `begin`: events of earlier processes count up to the last kept step only.
            self._writer = SummaryWriter(self._directory, purge_step=self._purge_step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for kind, transcripts in samples.items():
            blocks = "\n\n".join(f"{one.name}\n{one.block()}" for one in transcripts)
            # TensorBoard renders Markdown: indented text is shown as it is.
            self._writer.add_text(f"samples/{kind}", textwrap.indent(blocks, "    "), step)
        self._writer.flush()  # it would keep events for two minutes, and a kill would lose them

    def close(self, exit_code: int) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
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
        self._run = self._start(run_dir, logger, config)

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if self._run.step > step + 1:
            LOG.warning("W&B has this run's steps before %d; they are not sent again", self._run.step)
        for kept_step, values in steps_of(rows):
            self.log(kept_step, values, {})

    def log(self, step: int, values: Mapping[str, float | None], samples: Samples) -> None:
        # `step` of a W&B run is the first step that it does not have. commit: send this step now, not together
        # with the next one.
        if step >= self._run.step:
            import wandb

            tables = {
                f"samples/{kind}": wandb.Table(columns=list(COLUMNS), data=[list(one.row()) for one in transcripts])
                for kind, transcripts in samples.items()
            }
            self._run.log({**values, **tables}, step=step, commit=True)

    def close(self, exit_code: int) -> None:
        import wandb

        self._run.finish(exit_code=exit_code)
        wandb.teardown()

    def _start(self, run_dir: str, logger: LoggerConfig, config: dict[str, Any]) -> Any:
        if logger.wandb.mode == "offline":
            # W&B reports its own errors in offline mode, too. Without a network that takes ten seconds at each start.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        command = sys.argv  # W&B saves it
        try:
            sys.argv = redact_command(command)
            return wandb.init(
                **vars(logger.wandb),
                id=self.run_id,
                # Offline there is no server that knows the run's steps: each process writes all of them.
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
            # An answer to a request with the key is not repeated: it may hold the key.
            text = "no access" if isinstance(error, wandb.errors.CommError) else redact_text(str(error))
            raise UserError(f"logger.wandb.mode={mode}: {text}; correct that, or choose offline or off") from error
        finally:
            sys.argv = command
