"""`committed.json` in the run directory: the last commit of the run. A restart uses it to notice a lost checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from trainer.errors import UserError, one_line
from trainer.files.atomic_io import read_file, write_file
from trainer.files.documents import is_count, parse_object
from trainer.files.uris import absolute

NAME = "committed.json"
_SHAPE = {"step": is_count, "ckpt_path": str}


def write(run_dir: str, step: int, ckpt_path: str) -> None:
    """Record that `global_step_{step}` was committed in `ckpt_path`."""
    write_file(os.path.join(run_dir, NAME), json.dumps({"step": step, "ckpt_path": absolute(ckpt_path)}))


def exists(run_dir: str) -> bool:
    """Return whether this run has committed a checkpoint."""
    return os.path.lexists(os.path.join(run_dir, NAME))


def read(run_dir: str) -> str | None:
    """Return the checkpoint directory of this run; None if there is no record of a commit, or it is damaged."""
    return (_read(run_dir) or {}).get("ckpt_path")


def _read(run_dir: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return parse_object(read_file(os.path.join(run_dir, NAME)), _SHAPE)
    return None


def check_nothing_committed(run_dir: str, ckpt_path: str) -> None:
    """Check that a run without a checkpoint has never committed one. Raises UserError: the run has committed a
    checkpoint."""
    if not exists(run_dir):
        return
    path, record = os.path.join(run_dir, NAME), _read(run_dir)
    committed = "a checkpoint"  # the record may be damaged, but its existence proves a commit
    if record is not None:
        committed = f"global_step_{record['step']} in {one_line(record['ckpt_path'])}"
    raise UserError(
        f"trainer.ckpt_path={ckpt_path}: no checkpoint is there, and {path} says that this run has committed "
        f"{committed}; mount or restore it, or, to start over, choose another trainer.run_name or remove {path}"
    )
