"""Metrics in Trackio: a database on this machine, which `trackio show` displays."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Mapping
from typing import Any

from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.files.hf_hub import first_line
from trainer.metrics.sinks import Rows, Sink, finite_values, group_of

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_ID = "tracking_id"
"""The entry of the config by which the run is found again."""


class Trackio(Sink):
    """A run of Trackio.

    Its steps are those of `metrics.jsonl` after each start: the run is written again from these lines.

    Args:
        config: the resolved config without secrets.
        run_id: the run to write again; None starts a new one. Its name gets the id if another run has the name.

    Raises:
        UserError: Trackio refuses, or the environment makes it write elsewhere than to this machine.
    """

    def __init__(self, logger: LoggerConfig, config: Mapping[str, Any], run_id: str | None) -> None:
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
            with _quiet():
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
            with _quiet():
                trackio.finish()

    def _begin(self) -> Any:
        """Begin the run, without the steps that it has."""
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


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Return a block that drops what Trackio prints: it would disturb the progress display."""
    return contextlib.redirect_stdout(io.StringIO())
