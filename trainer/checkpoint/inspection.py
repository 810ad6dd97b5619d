"""What is known about the checkpoints of a run, for people."""

from __future__ import annotations

import posixpath
from typing import Any

from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    UnreadableError,
    step_in,
)
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import CheckpointStore, open_store
from trainer.errors import UserError
from trainer.files.uris import is_url
from trainer.process.log_setup import escape, show


def find_store(path: str) -> CheckpointStore | None:
    """Return the store with the checkpoints of a run, or of a directory or URL; None: there are none."""
    for directory in (posixpath.join(path, "checkpoints"), path, None if is_url(path) else last_commit.read(path)):
        store = None if directory is None else open_store(directory)
        if store is not None and any("global_step_" in name for name in store.storage.names()):
            return store
    return None


def describe(path: str, level: str) -> dict[str, Any]:
    """Return what is known about the checkpoint `global_step_N` at a path or URL, after a check of `level`."""
    row: dict[str, Any] = {"step": step_in(path), "path": path, "saved_at": None, "ranks": None}
    row |= dict.fromkeys(("axes", "score", "score_metric", "score_mode", "score_of_start"))
    row |= {"bytes": 0, "files": 0}
    row |= {"valid": True, "readable": True, "checked": level, "problem": None}
    try:
        row["bytes"] = sum(open_storage(path).list().values())
        checkpoint = manifests.read(path)
        manifest = checkpoint.manifest
        row |= {name: manifest.get(name) for name in row if name in manifest}
        row["files"] = len(manifest["files"])
        manifests.check_files(checkpoint, level)
    except CheckpointError as error:
        row |= {"valid": False, "readable": isinstance(error, CorruptCheckpointError)}
        row["problem"] = str(error).removeprefix(f"{path}: ")
    return row


def describe_all(store: CheckpointStore, level: str) -> list[dict[str, Any]]:
    """Return what is known about the checkpoints of a run, oldest first; `best` and `latest` mark one each."""
    rows = [describe(store.path(step), level) for step in store.steps()]
    valid = [row["step"] for row in rows if row["valid"]]
    best = find_best(rows)
    return [row | {"best": row["step"] == best, "latest": row["step"] == max(valid, default=None)} for row in rows]


def find_best(rows: list[dict[str, Any]]) -> int | None:
    """Return the valid step with the best score; None: no checkpoint has a score.

    Scores are those of the metric by which the newest of them was compared.
    """
    scored = [row for row in rows if row["valid"] and row["score"] is not None]
    if not scored:
        return None
    newest = scored[-1]
    alike = [row for row in scored if row["score_metric"] == newest["score_metric"]]
    sign = -1 if newest["score_mode"] == "min" else 1
    return max(alike, key=lambda row: sign * row["score"])["step"]  # of equal scores the first


def list_steps(steps: list[int], most: int = 20) -> str:
    """Return steps as text: all of them, or the newest ones."""
    shown = ", ".join(map(str, steps[-most:]))
    return f"{shown} and {len(steps) - most} older ones" if len(steps) > most else shown


def check_step(store: CheckpointStore, step: int, option: str) -> None:
    """Check that there is a checkpoint of `step`. Raises UserError: there is none; the message lists the steps there
    are."""
    steps = store.steps()
    if step not in steps:
        raise UserError(f"{option}={step}: {store.root} has no checkpoint of that step; it has {list_steps(steps)}")


# ---------------------------------------------------------------------------------------------------
# The checkpoint that a command line names


def open_run(root: str) -> CheckpointStore:
    """Return the store of a run, or of a directory or URL. Raises UserError: there are none."""
    if (store := find_store(root)) is not None:
        return store
    if is_checkpoint(root):
        raise UserError(f"{root}: is one checkpoint; name its run, or the directory that it is in")
    raise UserError(
        f"{root}: no checkpoint is there; looked in it, in its checkpoints directory, and where its "
        f"{last_commit.NAME} names"
    )


def is_checkpoint(path: str) -> bool:
    path = path.rstrip("/")
    return step_in(path) is not None or MANIFEST in open_store(path).storage.names()


def read_named(path: str) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid checkpoint of the run at `path`, after reading all of it.
    Raises UserError: there is none."""
    path = path.rstrip("/")
    if is_checkpoint(path):
        return manifests.verify(path)
    store = open_run(path)
    for step in reversed(store.steps()):
        try:
            return manifests.verify(store.path(step))
        except UnreadableError as error:
            raise UserError(f"{error}; give the command as its owner, or ask for access") from error
        except CorruptCheckpointError as error:
            show(f"skipped a damaged checkpoint: {escape(str(error), lines=False)}", error=True)
    raise UserError(f"{path}: no checkpoint there is valid")


def choose_checkpoint(path: str, step: int | None, best: bool) -> tuple[Checkpoint, str]:
    """Return the checkpoint that a command line names, after reading all of it, and why it was chosen, in words. Raises
    UserError: there is no such checkpoint."""
    if step is None and not best:
        return read_named(path), ""
    if is_checkpoint(path):
        raise UserError(f"{path}: is one checkpoint, and --best and --step choose one of a run; name the run")
    store = open_run(path)
    if step is not None:
        check_step(store, step, "--step")
        return manifests.verify(store.path(step)), ""
    rows = describe_all(store, "size")
    row = next((row for row in rows if row["best"]), None)
    if row is None:
        steps = list_steps(store.steps())
        raise UserError(f"--best: no checkpoint of {store.root} has a score; name one with --step, of {steps}")
    scored = sum(1 for row in rows if row["score"] is not None)
    why = f" (the best of {scored}: {row['score_metric'] or 'score'} {row['score']:.4g})"
    return manifests.verify(row["path"]), why
