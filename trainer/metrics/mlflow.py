"""Metrics in MLflow: a tracking server, or a database file in the run directory."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from queue import Queue
from typing import Any

from trainer.config.logger import MlflowConfig
from trainer.errors import UserError
from trainer.files.documents import flatten
from trainer.files.hf_hub import first_line
from trainer.files.redaction import redact_text
from trainer.metrics.sinks import TIMED, Samples, finite_values, steps_of
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

LOG = logging.getLogger(__name__)

CONTINUES = "continues_run"
"""Tag of a run that has begun because an earlier run has other numbers: the id of that run."""
CONTINUED_BY = "continued_by_run"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 600.0
_MOST_METRICS = 900
"""In one request: MLflow takes 1000."""
_LONGEST_NAME = 250
_LONGEST_PARAM = 500
_ALLOWED = frozenset("_-. /")


@cache
def legal_name(metric: str) -> str:
    """Return the name of a metric in MLflow, which takes no other characters: `val/pass@4` is `val/pass_4`."""
    name = "".join(c if c.isascii() and c.isalnum() or c in _ALLOWED else "_" for c in metric)[:_LONGEST_NAME]
    return "/".join(part for part in name.split("/") if part not in ("", ".", "..")) or "_"


class MLflow:
    """A run of MLflow that has the steps of `metrics.jsonl`.

    MLflow cannot remove steps, and keeps both values of a step that is sent twice. So a thread reads which values the
    run has, and compares them with each step before it sends what the run lacks. If the run has another number, a new
    run begins with all steps until then; tags of both runs name the other one. Times are not compared.

    Steps are sent in their order. If a request fails, the steps wait, and are compared again with the next step or at
    the next start: the server may have taken what it did not confirm.

    Args:
        config: the resolved config without secrets: the parameters of a new run.
        run_id: the run to continue; None, or one that MLflow does not have, starts a new one.
        read_rows: reads `metrics.jsonl`, for a new run in place of one with other numbers.
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
        read_rows: Callable[[], Sequence[Mapping[str, Any]]],
        abandoned: str | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 7 take minutes, while nothing is sent
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._cfg, self._config, self._read_rows = cfg, config, read_rows
        uri = cfg.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath(run_dir)}/mlflow.db"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self.run_id = self._continue(self._find(run_id) or self._create(self._experiment(), {}))
        except Exception as error:  # a database fails with errors of its driver
            # A server, which may have got credentials, is not quoted.
            text = type(error).__name__ if uri.startswith("http") else first_line(error)
            raise UserError(
                f"logger.mlflow.uri={redact_text(uri)}: {text}; correct that, or choose logger.mlflow.enabled=false"
            ) from error
        if abandoned is not None:
            with contextlib.suppress(Exception):  # somebody may have deleted it
                self._client.set_terminated(self._newest(self._client.get_run(abandoned)).info.run_id, "KILLED")
        self._queue: Queue[tuple[Sequence[Mapping[str, Any]], bool] | None] = Queue()
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._stored: dict[int, dict[str, float]] | None = None
        """What the run has of the steps that wait or may come, as `_read_stored` returns it. None: unknown."""
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._has_given_up = False
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._queue.put((rows, True))

    def log(self, step: int, values: Mapping[str, float | None], samples: Samples) -> None:
        self._queue.put(([{"step": step, **values}], False))

    def close(self, exit_code: int) -> None:
        self._queue.put(None)
        self._thread.join(time_limits.TRACKING_END_S)
        if self._thread.is_alive():
            self._has_given_up = True
            self._warn("it does not answer")
        else:
            self._try(self._client.set_terminated, self.run_id, "FAILED" if exit_code else "FINISHED")

    # The thread

    def _send_all(self) -> None:
        may_get_more = True
        while may_get_more:
            may_get_more = self._take()
            if time.monotonic() >= self._retry_at or not may_get_more:
                self._try(self._send)

    def _take(self) -> bool:
        """Wait for steps, and take all there are. Return whether more may come."""
        while (entry := self._queue.get()) is not None:
            rows, begins = entry
            if begins:
                self._waiting, self._stored = [], None
            self._try(lambda rows=rows: self._waiting.extend(_numbers_of(rows)))
            if self._queue.empty():
                return True
        return False

    def _send(self) -> None:
        """Send what the run lacks of the steps that wait."""
        if not self._waiting:
            return
        try:
            if self._stored is None:
                self._stored = self._read_stored()
            while (step := self._first_difference()) is not None and not self._has_given_up:
                self._start_over(step)
            lacking = self._lacking()
            while (metrics := list(itertools.islice(lacking, _MOST_METRICS))) and not self._has_given_up:
                self._client.log_batch(self.run_id, metrics)
        except Exception:
            self._stored = None  # to be read again, which takes seconds of a long run
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            raise
        self._retry_s = _FIRST_RETRY_S
        last = self._waiting[-1][0]
        self._stored = {step: values for step, values in self._stored.items() if step >= last}
        self._waiting = []

    def _read_stored(self) -> dict[int, dict[str, float]]:
        """Return the values that the run has, by step and name. NaN: it has several."""
        stored: dict[int, dict[str, float]] = {}
        for name in self._client.get_run(self.run_id).data.metrics:
            for metric in self._client.get_metric_history(self.run_id, name):
                values = stored.setdefault(metric.step, {})
                values[name] = metric.value if values.get(name, metric.value) == metric.value else math.nan
        return stored

    def _first_difference(self) -> int | None:
        """Return the first waiting step of which the run has another number; None: there is none."""
        for step, values in self._waiting:
            stored = self._stored.get(step, {})
            for name in values.keys() & stored.keys():
                if not name.startswith(TIMED) and not math.isclose(stored[name], values[name], rel_tol=1e-12):
                    return step
        return None

    def _lacking(self) -> Iterator[Any]:
        """Return the metrics of the waiting steps that the run does not have."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for step, values in self._waiting:
            stored = self._stored.get(step, {})
            yield from (Metric(name, value, now, step) for name, value in values.items() if name not in stored)

    def _start_over(self, step: int) -> None:
        """Continue with a new run, which gets all steps. One that a kill or a lost answer has left is taken."""
        first = self._waiting[0][0]
        earlier = [row for row in self._read_rows() if row["step"] < first]
        old = self._client.get_run(self.run_id)
        new = self._successor(old) or self._create(old.info.experiment_id, {CONTINUES: old.info.run_id})
        self._hand_over(old, new)
        self.run_id = self._continue(new)
        self._waiting[:0] = _numbers_of(earlier)
        problem = "MLflow has other numbers for step %d: its run %s ends, and %s has those of now"
        LOG.warning(problem, step, old.info.run_id, self.run_id)
        self._stored = self._read_stored()

    def _try(self, call: Callable[..., object], *args: Any) -> None:
        """Call MLflow. A failure is a warning, once: the metrics are in `metrics.jsonl`."""
        try:
            call(*args)
        except Exception as error:
            self._warn(first_line(error))

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            LOG.warning("MLflow lacks steps of this run: %s; the next step or start sends them", problem)

    # Runs of MLflow

    def _find(self, run_id: str | None) -> Any:
        """Return a run that can be continued; None: there is none."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._cfg.experiment)
        return found.experiment_id if found is not None else self._client.create_experiment(self._cfg.experiment)

    def _create(self, experiment: str, tags: Mapping[str, str]) -> Any:
        return self._client.create_run(experiment, run_name=self._cfg.name, tags=dict(tags))

    def _continue(self, run: Any) -> str:
        """Open the newest of a run and its successors again, and return its id."""
        from mlflow.entities import Param

        run = self._newest(run)
        self._client.update_run(run.info.run_id, status="RUNNING")
        params = {legal_name(key): str(value)[:_LONGEST_PARAM] for key, value in flatten(self._config).items()}
        lacking = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        self._client.log_batch(run.info.run_id, params=lacking)
        return run.info.run_id

    def _newest(self, run: Any) -> Any:
        while (newer := self._successor(run)) is not None:
            self._hand_over(run, newer)
            run = newer
        return run

    def _successor(self, run: Any) -> Any:
        """Return the run that continues `run`; None: there is none."""
        query = f"tags.{CONTINUES} = '{run.info.run_id}'"
        return next(iter(self._client.search_runs([run.info.experiment_id], query, max_results=1)), None)

    def _hand_over(self, old: Any, new: Any) -> None:
        """End a run that another one continues."""
        self._client.set_tag(old.info.run_id, CONTINUED_BY, new.info.run_id)
        self._client.set_terminated(old.info.run_id, "KILLED")


def _numbers_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return each step and its values under the names of MLflow, which takes finite ones."""
    return [
        (step, {legal_name(name): float(value) for name, value in finite_values(values).items()})
        for step, values in steps_of(rows)
    ]
