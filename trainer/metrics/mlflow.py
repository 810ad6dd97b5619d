"""Metrics in MLflow: a tracking server, or a database file in the run directory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from queue import Queue
from typing import Any

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.documents import flatten
from trainer.files.hf_hub import first_line
from trainer.metrics.sinks import Sink, finite_values
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

LOG = logging.getLogger(__name__)
_LONGEST_NAME, _LONGEST_PARAM = 250, 500
_ALLOWED = frozenset("_-. /")


@cache
def legal_name(metric: str) -> str:
    """Return the name of a metric in MLflow, which takes no other characters: `val/pass@4` is `val/pass_4`."""
    name = "".join(c if c.isascii() and c.isalnum() or c in _ALLOWED else "_" for c in metric)[:_LONGEST_NAME]
    return "/".join(part for part in name.split("/") if part not in ("", ".", "..")) or "_"


class MLflow(Sink):
    """A run of MLflow.

    MLflow cannot remove steps, and keeps both values of a step that is sent twice. So a thread sends the steps in their
    order, and none that MLflow has already. If a request fails, the steps wait until the next step or start.

    Args:
        config: the resolved config without secrets: the parameters of a new run.
        run_id: the run to continue; None, or one that MLflow does not have, starts a new one.

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
        self._queue.put((step, {legal_name(name): value for name, value in finite_values(values).items()}))

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
        """Send the steps of the queue until its end. Only the thread calls this."""
        from mlflow.entities import Metric

        waiting: deque[tuple[int, dict[str, float]]] = deque()
        last: int | None = None  # the last step that MLflow has; None: not known, it may have what it did not confirm
        is_over = False
        while not is_over:
            entry = self._queue.get()
            is_over = entry is None
            waiting.extend([] if entry is None else [entry])
            try:
                last = self._last_step() if last is None else last
                while waiting:
                    step, values = waiting[0]
                    metrics = [Metric(name, value, int(1000 * time.time()), step) for name, value in values.items()]
                    if step > last and metrics:
                        self._client.log_batch(self.run_id, metrics)
                    last = max(last, waiting.popleft()[0])
            except Exception as error:  # whatever the client raises
                last = None
                self._warn(error)

    def _last_step(self) -> int:
        names = self._client.get_run(self.run_id).data.metrics
        histories = (self._client.get_metric_history(self.run_id, name) for name in names)
        return max((metric.step for history in histories for metric in history), default=-1)

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
        params = {legal_name(key): str(value)[:_LONGEST_PARAM] for key, value in flatten(config).items()}
        lacking = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        self._client.log_batch(run.info.run_id, params=lacking)
        return run.info.run_id
