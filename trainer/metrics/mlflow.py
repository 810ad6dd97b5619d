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
from trainer.metrics.sinks import TIMED, Samples, reason_of
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

    MLflow cannot remove steps, and keeps both values of a step that is sent twice. So a step that a resumed run trains
    again is not sent again if MLflow has its numbers. If it has others, a new run begins with the lines of
    `metrics.jsonl`; tags of both runs name the other one. Steps that MLflow has not received are sent. A thread sends
    them, so that a slow server does not keep the ranks waiting; what a server refuses is left to the next start.

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
            self._sent = self._steps(self.run_id)
        except Exception as error:  # a database fails with errors of its driver
            raise UserError(
                f"logger.mlflow.uri={redact_text(uri)}: {reason_of(error)}; correct that, or choose "
                "logger.mlflow.enabled=false"
            ) from error
        if abandoned is not None:
            with contextlib.suppress(Exception):  # somebody may have deleted it
                self._client.set_terminated(abandoned, "KILLED")
        self._run_dir, self._cfg, self._config = run_dir, cfg, config
        self._kept_step = -1
        self._histories: dict[str, dict[int, float]] = {}
        self._queue: Queue[tuple[int, list[Any]] | None] = Queue()
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._kept_step = step
        for row in rows:
            if row["step"] not in self._sent:
                self.log(row["step"], {name: value for name, value in row.items() if name != "step"}, {})

    def log(self, step: int, values: Mapping[str, float | None], samples: Samples) -> None:
        self._queue.put((step, _metrics_of(step, values)))

    def close(self, exit_code: int) -> None:
        self._queue.put(None)
        self._thread.join(time_limits.TRACKING_END_S)
        if self._thread.is_alive():
            self._warn("it does not answer")
        else:
            self._try(self._client.set_terminated, self.run_id, "FAILED" if exit_code else "FINISHED")

    def _send_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._try(self._send, *entry)

    def _send(self, step: int, metrics: Sequence[Any]) -> None:
        if step in self._sent:
            if step <= self._kept_step or self._has(step, metrics):
                return
            self._start_over(step)
        self._log(self.run_id, metrics)
        self._sent.add(step)
        self._histories.clear()

    def _log(self, run_id: str, metrics: Sequence[Any]) -> None:
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(run_id, metrics[first : first + _MOST_METRICS])

    def _steps(self, run_id: str) -> set[int]:
        return {metric.step for metric in self._client.get_metric_history(run_id, STEP)}

    def _has(self, step: int, metrics: Sequence[Any]) -> bool:
        """Return whether the run has the numbers of a step. Times do not count: they are never the same."""
        for metric in metrics:
            if not metric.key.startswith(TIMED):
                if metric.key not in self._histories:
                    history = self._client.get_metric_history(self.run_id, metric.key)
                    self._histories[metric.key] = {value.step: value.value for value in history}
                if not math.isclose(self._histories[metric.key].get(step, math.nan), metric.value, rel_tol=1e-12):
                    return False
        return True

    def _start_over(self, step: int) -> None:
        """Begin a new run with the steps before `step`, and end the old one."""
        from trainer.metrics.tracker import METRICS_FILE, read_metrics

        old, new = self.run_id, self._create(self._cfg, self._config)
        rows = [row for row in read_metrics(os.path.join(self._run_dir, METRICS_FILE)) if row["step"] < step]
        try:
            self._client.set_tag(new, "continues_run", old)
            for row in rows:
                self._log(new, _metrics_of(row["step"], {name: row[name] for name in row if name != "step"}))
        except Exception:
            with contextlib.suppress(Exception):
                self._client.delete_run(new)
            raise
        self.run_id, self._sent = new, {row["step"] for row in rows}
        LOG.warning("MLflow has other numbers for step %d: its run %s ends, and %s has those of now", step, old, new)
        self._client.set_tag(old, "continued_by_run", new)
        self._client.set_terminated(old, "KILLED")

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


def _metrics_of(step: int, values: Mapping[str, float | None]) -> list[Any]:
    """Return the metrics of a step. The mark comes last: until MLflow has it, the step is sent again."""
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return [
        *(Metric(legal_name(name), float(finite[name]), now, step) for name in finite),
        Metric(STEP, step, now, step),
    ]


def _flat(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        dotted = f"{name}.{key}" if name else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, dotted)
        else:
            yield dotted, value
