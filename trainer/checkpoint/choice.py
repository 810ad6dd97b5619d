"""The checkpoint, or the run with checkpoints, that a command line names."""

from __future__ import annotations

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import record
from trainer.checkpoint.checkpoint_files import MANIFEST, step_in
from trainer.checkpoint.inspection import check_step, describe_all, find_store, list_steps
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, UnreadableError
from trainer.checkpoint.store import CheckpointStore, open_store
from trainer.errors import UserError
from trainer.process.log_setup import escape, show


def open_run(root: str) -> CheckpointStore:
    """Return the store of a run, or of a directory or URL.

    Raises:
        UserError: there are none.
    """
    if (store := find_store(root)) is not None:
        return store
    if is_checkpoint(root):
        raise UserError(f"{root}: is one checkpoint; name its run, or the directory that it is in")
    raise UserError(
        f"{root}: no checkpoint is there; looked in it, in its checkpoints directory, and where its {record.NAME} names"
    )


def is_checkpoint(path: str) -> bool:
    path = path.rstrip("/")
    return step_in(path) is not None or MANIFEST in open_store(path).storage.names()


def read_named(path: str, level: str) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid checkpoint of the run at `path`.

    Raises:
        UserError: there is none.
    """
    path = path.rstrip("/")
    if is_checkpoint(path):
        return manifests.verify(path, level)
    store = open_run(path)
    for step in reversed(store.steps()):
        try:
            return manifests.verify(store.path(step), level if level != "off" else "size")
        except UnreadableError as error:
            raise UserError(f"{error}; give the command as its owner, or ask for access") from error
        except CorruptCheckpointError as error:
            show(f"skipped a damaged checkpoint: {escape(str(error), lines=False)}", error=True)
    raise UserError(f"{path}: no checkpoint there is valid")


def choose_checkpoint(path: str, step: int | None, best: bool) -> tuple[Checkpoint, str]:
    """Return the checkpoint that a command line names, after reading all of it, and why it was chosen, in words.

    Raises:
        UserError: there is no such checkpoint.
    """
    if step is None and not best:
        return read_named(path, "hash"), ""
    if is_checkpoint(path):
        raise UserError(f"{path}: is one checkpoint, and --best and --step choose one of a run; name the run")
    store = open_run(path)
    if step is not None:
        check_step(store, step, "--step")
        return manifests.verify(store.path(step), "hash"), ""
    rows = describe_all(store, "size")
    row = next((row for row in rows if row["best"]), None)
    if row is None:
        steps = list_steps(store.steps())
        raise UserError(f"--best: no checkpoint of {store.root} has a score; name one with --step, of {steps}")
    scored = sum(1 for row in rows if row["score"] is not None)
    why = f" (the best of {scored}: {row['score_metric'] or 'score'} {row['score']:.4g})"
    return manifests.verify(row["path"], "hash"), why
