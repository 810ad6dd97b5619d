"""Which runs of services such as MLflow belong to a run: a file of the run directory, from their first moment on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from types import NoneType

from trainer.errors import one_line
from trainer.files.atomic_io import write_file
from trainer.files.documents import parse_object

LOG = logging.getLogger(__name__)

FILE = "services.json"
_SHAPE = {"begins": (str, NoneType), "run_ids": {str: str}}


class ServiceRuns:
    """The ids of the runs of services, by the name under which checkpoints hold them.

    A run that is killed before its first checkpoint continues those in the file, if it begins again with the same
    weights, data and settings.

    Args:
        saved: the ids that the checkpoint of this run holds.
        begins: what the run begins with, if it has no checkpoint of its own; None: it has one.
    """

    def __init__(self, run_dir: str, saved: Mapping[str, str | None], begins: str | None):
        self._path = os.path.join(run_dir, FILE)
        kept_begins, kept = self._read()
        self._begins = kept_begins if begins is None else begins
        self._ids = {**saved, **(kept if begins in (None, kept_begins) else {})}

    def get(self, name: str) -> str | None:
        """Return the run to continue; None: there is none."""
        return self._ids.get(name)

    def keep(self, name: str, run_id: str) -> None:
        """Write down the run that a service has opened. If that fails, a warning says so."""
        self._ids[name] = run_id
        run_ids = {one: known for one, known in self._ids.items() if known is not None}
        try:
            write_file(self._path, json.dumps({"begins": self._begins, "run_ids": run_ids}, indent=1))
        except OSError as error:
            LOG.warning(
                "%s is not written (%s); a kill before the next checkpoint loses the runs of services",
                self._path,
                one_line(str(error)),
            )

    def all(self) -> dict[str, str | None]:
        """Return the ids for a checkpoint."""
        return dict(self._ids)

    def _read(self) -> tuple[str | None, dict[str, str]]:
        try:
            with open(self._path, "rb") as file:
                content = parse_object(file.read(), _SHAPE)
        except FileNotFoundError:
            return None, {}
        except (OSError, ValueError) as error:
            LOG.warning(
                "%s cannot be read (%s); services get the runs of the checkpoint, or new ones",
                self._path,
                one_line(str(error)),
            )
            return None, {}
        return content["begins"], content["run_ids"]
