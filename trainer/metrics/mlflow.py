"""Metrics in MLflow: a tracking server, or a database file in the run directory."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import Queue
from typing import Any

from trainer.config.logger import MlflowConfig
from trainer.errors import UserError
from trainer.files.redaction import redact_text
from trainer.metrics.sinks import Samples, reason_of
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

LOG = logging.getLogger(__name__)

STEP = "step"
"""A metric of our own in every step, from which a resumed run sees the steps that MLflow has."""
_MOST_METRICS = 900
"""In one request: MLflow takes 1000."""
_MOST_PARAMS = 100
_LONGEST_PARAM = 500
_ALLOWED = frozenset("_-. /")


def legal_name(metric: str) -> str:
    """Return the name of a metric in MLflow, which takes no other characters: `val/pass@4` is `val/pass_4`."""
    return "".join(c if c.isascii() and c.isalnum() or c in _ALLOWED else "_" for c in metric)


class MLflow:
    """A run of MLflow.

    MLflow cannot remove steps: those that it has of an earlier process stay as they are, and no step is sent twice.
    Steps that it has not received are sent. A thread sends them, so that a slow server does not keep the ranks waiting;
    what a server refuses is left to the next start.

    Args:
        config: the resolved config without secrets: the parameters of a new run.
        run_id: the run to continue; None, or one that MLflow does not have, starts a new one.
        abandoned: a run that a kill has left, and that nothing continues. It is ended.

    Raises:
        UserError: MLflow refuses, or does not answer.
    """

    def __init__(
        self,
        run_dir: str,
        cfg: MlflowConfig,
        config: Mapping[str, Any],
        run_id: str | None,
        abandoned: str | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 7 take minutes, while nothing is sent
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = cfg.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath(run_dir)}/mlflow.db"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self.run_id = self._continue(run_id) or self._create(cfg, config)
            self._sent = {metric.step for metric in self._client.get_metric_history(self.run_id, STEP)}
        except Exception as error:  # a database fails with errors of its driver
            raise UserError(
                f"logger.mlflow.uri={redact_text(uri)}: {reason_of(error)}; correct that, or choose "
                "logger.mlflow.enabled=false"
            ) from error
        if abandoned is not None:
            with contextlib.suppress(Exception):  # somebody may have deleted it
                self._client.set_terminated(abandoned, "KILLED")
        self._queue: Queue[list[Any] | None] = Queue()
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if any(sent > step for sent in self._sent):
            LOG.warning("MLflow has steps of this run after step %d; they are not sent again", step)
        for row in rows:
            self.log(row["step"], {name: value for name, value in row.items() if name != "step"}, {})

    def log(self, step: int, values: Mapping[str, float | None], samples: Samples) -> None:
        if step in self._sent:
            return
        from mlflow.entities import Metric

        self._sent.add(step)
        now = int(1000 * time.time())
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        metrics = [Metric(legal_name(name), float(value), now, step) for name, value in finite.items()]
        self._queue.put(
            [*metrics, Metric(STEP, step, now, step)]
        )  # the mark comes last: until then a step is sent again

    def close(self, exit_code: int) -> None:
        self._queue.put(None)
        self._thread.join(time_limits.TRACKING_END_S)
        if self._thread.is_alive():
            self._warn("it does not answer")
        else:
            self._try(self._client.set_terminated, self.run_id, "FAILED" if exit_code else "FINISHED")

    def _send_all(self) -> None:
        while (metrics := self._queue.get()) is not None:
            for first in range(0, len(metrics), _MOST_METRICS):
                if not self._try(self._client.log_batch, self.run_id, metrics[first : first + _MOST_METRICS]):
                    break

    def _try(self, call: Any, *args: Any) -> bool:
        """Call MLflow. A failure is a warning, once: the metrics are in `metrics.jsonl`."""
        try:
            call(*args)
        except Exception as error:
            self._warn(reason_of(error))
            return False
        return True

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            LOG.warning("MLflow lacks steps of this run: %s; the next start sends them", problem)

    def _continue(self, run_id: str | None) -> str | None:
        """Open the run again; None: there is none."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create(self, cfg: MlflowConfig, config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(cfg.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(cfg.experiment)
        run_id = self._client.create_run(experiment, run_name=cfg.name).info.run_id
        params = [Param(legal_name(key), str(value)[:_LONGEST_PARAM]) for key, value in _flat(config)]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id


def _flat(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        dotted = f"{name}.{key}" if name else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, dotted)
        else:
            yield dotted, value
