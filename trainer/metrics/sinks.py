"""Services and files that get metrics besides `metrics.jsonl`, and what each of them promises."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import os
import secrets
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from queue import Queue
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.documents import flatten
from trainer.files.hf_hub import first_line
from trainer.files.redaction import redact_command, redact_text
from trainer.import_utils import import_function, problem_of_method, user_code
from trainer.metrics.samples import COLUMNS, Transcript
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger(__name__)

KEY = "logger.services"
_LONGEST_NAME, _LONGEST_PARAM = 250, 500
_ALLOWED = frozenset("_-. /")
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_ID = "tracking_id"  # the entry of the config by which the run is found again

_METHODS = {"start": ("rows", "step"), "log": ("step", "values"), "samples": ("step", "samples"), "end": ("exit_code",)}
"""The methods of a sink, and what they get."""


Samples = Mapping[str, Sequence[Transcript]]  # episodes to read, by the kind of data
Rows = Sequence[Mapping[str, Any]]  # lines of `metrics.jsonl`. `null` is None.


class Sink(Protocol):
    """A service that gets the metrics of a run, and agrees with `metrics.jsonl` after a resume."""

    def start(self, rows: Rows, step: int) -> None:
        """Agree with the lines that the run has kept, up to `step` (-1: it begins): here, log all of them."""
        for row in rows:
            self.log(row["step"], {name: value for name, value in row.items() if name != "step"})

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take the metrics of a finished step. They may be NaN, infinite or, in lines of the run, None."""

    def samples(self, step: int, samples: Samples) -> None:
        """Take episodes to read, before the metrics of the step."""

    def end(self, exit_code: int) -> None:
        """Send what is left, and end. 0: the run has succeeded so far."""


def finite_values(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def group_of(logger: LoggerConfig, config: Mapping[str, Any]) -> str | None:
    """Return the name under which services show the runs of a sweep together; None: the run is not of a sweep."""
    run_name = config.get("trainer", {}).get("run_name")
    return run_name if logger.name != run_name else None


class OwnSink:
    """The `Sink` of an import path, whose exceptions name it. Raises UserError: the sink cannot be built."""

    def __init__(self, run_dir: str, path: str, config: Mapping[str, Any]) -> None:
        self._name = path
        self._sink: Sink = self._call(find_sink(path), run_dir, config)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._sink, method))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with user_code(f"{KEY}={self._name}: {{}}", has_place=True):
            return function(*args)


def find_sink(path: str) -> Callable[..., Sink]:
    """Import the class of a sink. Raises UserError: there is none, or it lacks a method, or calls of it would fail."""
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


@cache
def mlflow_name(metric: str) -> str:
    """Return the name of a metric in MLflow, which takes no other characters: `val/pass@4` is `val/pass_4`."""
    name = "".join(c if c.isascii() and c.isalnum() or c in _ALLOWED else "_" for c in metric)[:_LONGEST_NAME]
    return "/".join(part for part in name.split("/") if part not in ("", ".", "..")) or "_"


class MLflow(Sink):
    """A run of MLflow (the arguments are those of `WandB`; it makes a run that it does not have).

    MLflow cannot remove steps, and keeps both values of a step that is sent twice. So a thread sends the steps in their
    order, and none that MLflow has already. If a request fails, the steps wait until the next step or start.

    Raises:
        UserError: MLflow refuses, or does not answer.
    """

    def __init__(self, run_dir: str, logger: LoggerConfig, config: Mapping[str, Any], run_id: str | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 7 take minutes, while nothing is sent
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath(run_dir)}/mlflow.db"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self.run_id = self._open(logger, config, run_id)
        except Exception as error:  # a database fails with errors of its driver
            # A server, which may have got credentials, is not quoted.
            text = type(error).__name__ if uri.startswith("http") else first_line(error)
            raise UserError(
                f"logger.services=[mlflow]: {text}; correct MLFLOW_TRACKING_URI, or leave the service out"
            ) from error
        self._queue: Queue[tuple[int, dict[str, float]] | None] = Queue()
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._queue.put((step, {mlflow_name(name): value for name, value in finite_values(values).items()}))

    def end(self, exit_code: int) -> None:
        self._queue.put(None)
        self._thread.join(time_limits.TRACKING_END_S)
        try:
            if self._thread.is_alive():
                raise TimeoutError("it does not answer")
            self._client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")
        except Exception as error:  # whatever the client raises: the metrics are in metrics.jsonl
            self._warn(error)

    def _send_all(self) -> None:
        """Send the steps of the queue until its end, on the thread."""
        from mlflow.entities import Metric

        waiting: deque[tuple[int, dict[str, float]]] = deque()
        last: int | None = None  # the last step that MLflow has; None: not known, it may have what it did not confirm
        is_over = False
        while not is_over:
            entry = self._queue.get()
            is_over = entry is None
            waiting.extend([] if entry is None else [entry])
            try:
                if last is None:
                    names = self._client.get_run(self.run_id).data.metrics
                    histories = (self._client.get_metric_history(self.run_id, name) for name in names)
                    last = max((metric.step for history in histories for metric in history), default=-1)
                while waiting:
                    step, values = waiting[0]
                    metrics = [Metric(name, value, int(1000 * time.time()), step) for name, value in values.items()]
                    if step > last and metrics:
                        self._client.log_batch(self.run_id, metrics)
                    last = max(last, waiting.popleft()[0])
            except Exception as error:  # whatever the client raises
                last = None
                self._warn(error)

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            problem = "MLflow lacks steps of this run: %s; the next step or start sends them"
            LOG.warning(problem, first_line(error))

    def _open(self, logger: LoggerConfig, config: Mapping[str, Any], run_id: str | None) -> str:
        """Open a run, with the parameters that it lacks. Return its id."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        run = None
        try:
            run = None if run_id is None else self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        if run is None or run.info.lifecycle_stage != "active":
            found = self._client.get_experiment_by_name(logger.project)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(logger.project)
            run = self._client.create_run(experiment, run_name=logger.name)
        self._client.update_run(run.info.run_id, status="RUNNING")
        params = {mlflow_name(key): str(value)[:_LONGEST_PARAM] for key, value in flatten(config).items()}
        lacking = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        self._client.log_batch(run.info.run_id, params=lacking)
        return run.info.run_id


class Trackio(Sink):
    """A run of Trackio (the arguments are those of `WandB`). Each start writes it again from `metrics.jsonl`. Its name
    gets the id if another run has the name.

    Raises:
        UserError: Trackio refuses, or the environment makes it write elsewhere than to this machine.
    """

    def __init__(self, run_dir: str, logger: LoggerConfig, config: Mapping[str, Any], run_id: str | None) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        self._logger, self._config, self._run = logger, {**config, _ID: self.run_id}, None
        self._group = group_of(logger, config)
        for name in _ELSEWHERE:
            if os.environ.get(name):
                raise UserError(
                    f"{name} is set: Trackio would send the metrics there, where each start of the run would add all "
                    "steps again; unset it (`trackio sync` copies a project to a Space), or leave "
                    "trackio out of logger.services"
                )

    def start(self, rows: Rows, step: int) -> None:
        self.end(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it would disturb the progress display
                self._run = self._begin()
        except Exception as error:
            raise UserError(
                f"logger.services=[trackio]: {first_line(error)}; correct that, or leave the service out"
            ) from error
        super().start(rows, step)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log(finite_values(values), step=step)  # type: ignore[attr-defined]

    def end(self, exit_code: int) -> None:
        if self._run is not None:
            import trackio

            self._run = None
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.finish()

    def _begin(self) -> Any:
        import trackio

        project, name = self._logger.project, self._logger.name
        with contextlib.suppress(ValueError):  # there is no such project yet
            for run in trackio.Api().runs(project):
                if (run.config or {}).get(_ID) == self.run_id:
                    run.delete()
                elif run.name == name:
                    name = f"{name}-{self.run_id}"
        options: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return trackio.init(project, name, self._group, config=self._config, resume="allow", **options)


SERVICES = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
"""Services with runs of their own, which a resume continues by their `run_id`."""
