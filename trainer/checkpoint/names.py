"""Names that every kind of store uses for checkpoints."""

from __future__ import annotations

import os
import re

MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"
NODE = ".node"
"""A file with the name of the disk, in a directory that each node has for itself."""
BOOKKEEPING = (".lock", ".record", ".steps.json", NODE)
"""What a store keeps for itself: names, by their beginning."""
_STEP_DIR = re.compile(r"^global_step_(0|[1-9][0-9]{0,17})\Z")


def step_in(path: str) -> int | None:
    """Return the step in the name of a checkpoint; None if the name does not belong to a checkpoint."""
    match = _STEP_DIR.match(os.path.basename(path.rstrip("/")))
    return int(match[1]) if match else None
