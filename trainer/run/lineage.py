"""`lineage.json` in the run directory of a fork: the checkpoint that the fork started from."""

from __future__ import annotations

import json
import os
from typing import Any

from trainer.checkpoint.manifest import LINEAGE, Checkpoint
from trainer.documents import parse_object
from trainer.durable import read_file, write_file
from trainer.errors import UserError
from trainer.hub import first_line

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
