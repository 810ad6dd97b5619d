"""The origin of a fork, in its run directory.

`lineage.json` names the checkpoint that the fork started from. `metrics.parent.jsonl` is a copy of the parent's metrics
up to there, because the parent may be deleted.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from typing import Any

from trainer.checkpoint.manifest import LINEAGE, Checkpoint
from trainer.checkpoint.store import open_store
from trainer.errors import UserError
from trainer.files.atomic_io import read_file, write_file
from trainer.files.documents import parse_object
from trainer.files.hf_hub import first_line
from trainer.metrics.tracker import METRICS_FILE, PARENT_FILE, as_lines, read_metrics
from trainer.run.run_files import RunFiles

LOG = logging.getLogger(__name__)

NAME = "lineage.json"


def read(run_dir: str) -> dict[str, Any]:
    """Return the record that `write` wrote (see `manifest.LINEAGE`); empty if the run is not a fork.

    Raises:
        UserError: the file is damaged.
    """
    path = os.path.join(run_dir, NAME)
    if not os.path.lexists(path):
        return {}
    try:
        return parse_object(read_file(path), LINEAGE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: is damaged ({first_line(error)}), and names the checkpoint that this fork started from; restore "
            "the file from `parent` in the manifest.json of a checkpoint, or remove it and use "
            "trainer.resume_mode=latest"
        ) from error


def write(run_dir: str, parent: Checkpoint) -> dict[str, Any]:
    """Record that this run starts from the checkpoint `parent`; return the record."""
    lineage = {"forked_from": parent.path, "step": parent.step, "manifest": parent.manifest["self"]}
    write_file(os.path.join(run_dir, NAME), json.dumps(lineage, indent=2))
    return lineage


def copy_metrics(run_dir: str, parent: Checkpoint, parent_run_dir: str) -> None:
    """Copy the metrics of the parent, and of its own parent, up to the step of its checkpoint.

    They are for the report alone: if they are gone or damaged, the fork starts without them.

    Args:
        parent_run_dir: as the parent's config names it. What the checkpoint carries, and the directory above the
            checkpoints, are tried first, because a run may have been moved.
    """
    with tempfile.TemporaryDirectory() as carried:
        try:
            store = open_store(os.path.dirname(parent.path))
            RunFiles(carried, store).restore(parent, (METRICS_FILE, PARENT_FILE))
            for directory in (carried, os.path.dirname(os.path.dirname(parent.path)), parent_run_dir):
                own = read_metrics(os.path.join(directory, METRICS_FILE))
                earlier = read_metrics(os.path.join(directory, PARENT_FILE))
                if own:
                    rows = [row for row in earlier if row["step"] < own[0]["step"]]
                    rows += [row for row in own if row["step"] <= parent.step]
                    write_file(os.path.join(run_dir, PARENT_FILE), as_lines(rows))
                    return
        except (OSError, UserError) as error:
            LOG.warning("the report will not show the parent of this fork: %s", error)
