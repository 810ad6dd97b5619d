"""Exports at a path or a URL. An export at a URL is made in a local directory first, and put there file by file."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint.manifest import LATEST, step_in
from trainer.checkpoint.storage import for_each, open_storage
from trainer.config import Config
from trainer.errors import UserError, failure_source_of, is_disk_unwritable
from trainer.files.atomic_io import naming
from trainer.models.export import MADE_LAST, PolicyExporter, check_replaceable, export_target
from trainer.process.signals import SIGNALS
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_PARALLEL = 8


class PolicyExports:
    """The exports of a run's policy: while it trains, as `trainer.hf_save_interval` says, and at its end."""

    def __init__(self, cfg: Config, exporter: PolicyExporter):
        self._cfg = cfg
        self._exporter = exporter
        self._exported: int | None = None  # the step that this process has exported last

    def export(self, target: str) -> None:
        """Write the policy in Hugging Face format to the directory `target`, whole or not at all."""
        with SIGNALS.waiting(), export_directory(target, self._cfg.trainer.run_dir) as directory:
            self._exporter.export(directory, self._cfg.export_dtype)
        LOG.info("exported %s", target)

    def export_if_due(self, step: int) -> None:
        """Export the policy after `step` if the interval says so. A full disk costs this export alone."""
        interval = self._cfg.trainer.hf_save_interval
        if interval > 0 and (step % interval == 0 or step == self._cfg.total_steps):
            target = export_target(self._cfg, step)
            try:
                self.export(target)
                self._exported = step
            except OSError as error:
                if not is_disk_unwritable(error) or failure_source_of(error) is not None:  # others wait for that rank
                    raise
                reason = error.strerror
                LOG.warning("%s: cannot be written (%s); training continues without this export", target, reason)

    def export_if_missing(self, step: int) -> None:
        """Export the policy after the last step if the run was killed between its last checkpoint and that export."""
        if self._cfg.trainer.hf_save_interval > 0 and not is_exported(export_target(self._cfg, step)):
            self.export_last(step)

    def export_last(self, step: int) -> str:
        """Export the policy after the last step, unless this process has done so; return the directory."""
        target = export_target(self._cfg, step)
        if self._exported != step:
            self.export(target)
            self._exported = step
        return target


def check_export_path(path: str) -> None:
    """Check that a run may export to the directory or URL `path`, before anything starts. Raises UserError: checkpoints
    of another run are there, or something that an export would have to replace."""
    storage = open_storage(path)
    try:
        names = storage.names()
    except OSError:  # a store that is out of service now may be there when the first export is made
        return
    if LATEST in names:
        raise UserError(f"trainer.export_path={path}: holds checkpoints; choose another directory for exports")
    for name in names if storage.disk is not None else ():
        if step_in(name) is not None:
            check_replaceable(os.path.join(path, name, "policy"))


def is_exported(target: str) -> bool:
    """Return whether there is a whole export at a path or URL."""
    return any(name in MADE_LAST for name in open_storage(target).names())


@contextlib.contextmanager
def export_directory(target: str, scratch: str | None = None) -> Iterator[str]:
    """Give the block a local path to export to: `target`, or a directory whose content is then put at the URL `target`.
    `scratch`: the parent of that directory, which all ranks see; None: that of temporary files."""
    files = open_storage(target)
    with TRACER.span("export"), naming(target), contextlib.ExitStack() as temporary:
        if files.disk is not None:
            yield target
            return
        folder = temporary.enter_context(tempfile.TemporaryDirectory(dir=scratch, prefix=".export-"))
        made = os.path.join(folder, "export")
        yield made
        paths = [path.relative_to(made).as_posix() for path in sorted(Path(made).rglob("*")) if path.is_file()]
        for name in MADE_LAST:
            files.delete(name)  # of an earlier export, which is replaced
        for batch in ([path for path in paths if path not in MADE_LAST], [path for path in MADE_LAST if path in paths]):
            for_each(lambda path: files.upload(os.path.join(made, path), path), batch, _PARALLEL)
