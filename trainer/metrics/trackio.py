"""Metrics in Trackio: a database on this machine, which `trackio show` displays."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.logger import TrackioConfig
from trainer.errors import UserError
from trainer.files.hf_hub import first_line
from trainer.metrics.sinks import Samples, finite_values, steps_of

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_ID = "tracking_id"
"""The entry of the config by which the run is found again."""


class Trackio:
    """A run of Trackio.

    Its steps are those of `metrics.jsonl` after each start: the run is written again from these lines.

    Args:
        config: the resolved config without secrets.
        run_id: the run to write again; None starts a new one. Its name gets the id if another run has the name.

    Raises:
        UserError: Trackio refuses, or the environment makes it write elsewhere than to this machine.
    """

    def __init__(self, cfg: TrackioConfig, config: Mapping[str, Any], run_id: str | None) -> None:
        self.run_id = run_id or secrets.token_hex(4)
        self._cfg = cfg
        self._config = {**config, _ID: self.run_id}
        self._run: Any = None
        for name in _ELSEWHERE:
            if os.environ.get(name):
                raise UserError(
                    f"{name} is set: Trackio would send the metrics there, where each start of the run would add all "
                    "steps again; unset it (`trackio sync` copies a project to a Space), or choose "
                    "logger.trackio.enabled=false"
                )
        self._start()

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._start()
        for kept_step, values in steps_of(rows):
            self.log(kept_step, values, {})

    def log(self, step: int, values: Mapping[str, float | None], samples: Samples) -> None:
        self._run.log(finite_values(values), step=step)

    def close(self, exit_code: int) -> None:
        if self._run is not None:
            import trackio

            self._run = None
            with _quiet():
                trackio.finish()

    def _start(self) -> None:
        """Begin the run, without the steps that it has."""
        import trackio

        self.close(0)
        project, name = self._cfg.project, self._cfg.name
        try:
            with _quiet():
                if name in self._delete():
                    name = f"{name}-{self.run_id}"
                self._run = trackio.init(
                    project,
                    name,
                    self._cfg.group,
                    config=self._config,
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:
            raise UserError(
                f"logger.trackio.project={project}: {first_line(error)}; correct that, or choose "
                "logger.trackio.enabled=false"
            ) from error

    def _delete(self) -> set[str]:
        """Delete the run. Return the names of the other runs of its project."""
        import trackio

        names = set()
        with contextlib.suppress(ValueError):  # there is no such project yet
            for run in trackio.Api().runs(self._cfg.project):
                if (run.config or {}).get(_ID) == self.run_id:
                    run.delete()
                else:
                    names.add(run.name)
        return names


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Return a block that drops what Trackio prints: it would disturb the progress display."""
    return contextlib.redirect_stdout(io.StringIO())
