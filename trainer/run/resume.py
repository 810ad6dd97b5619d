"""Find the checkpoint that a run resumes from, and compare its config with the config of this start."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
from typing import Any

from trainer import __version__
from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Restore, movable_paths, read_config
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import LINEAGE, Checkpoint, CorruptCheckpointError, step_in
from trainer.config import LOAD_COMPONENTS, Config
from trainer.config.rules import SavedRun
from trainer.errors import UserError
from trainer.files.atomic_io import read_file, write_file
from trainer.files.documents import parse_object
from trainer.files.hf_hub import first_line
from trainer.files.uris import absolute, is_same, is_url
from trainer.run import compatibility
from trainer.run.run_metadata import has_metrics, second_run, starts_from

LOG = logging.getLogger(__name__)

LINEAGE_FILE = "lineage.json"
_NOT_SHOWN = ("trainer.resume_", "trainer.load_components", "trainer.allow_")
_NAMED_AFTER_RUN = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "logger.name", "logger.group")
"""Keys that follow `trainer.run_name`, unless they are set."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """The checkpoint that a run resumes from."""

    checkpoint: Checkpoint
    restore: Restore
    """The kinds of state that are restored, and whether the resume is a fork of another run."""
    same_rounding: bool  # the work is split as before, so replayed steps are equal to the last bit
    altered: bool
    """The config has changed so that replayed steps have other metrics than those that were logged."""
    is_copy: bool = False
    """The checkpoint is a copy in shared memory (see `trainer.checkpoint.step_copies`)."""


def find_resume(cfg: Config, checkpoints: CheckpointManager) -> Resume | None:
    """Find the checkpoint that `trainer.resume_mode` asks for, and compare its config with `cfg`.

    Returns None if training starts from the beginning. UserError: the directory holds a run but `trainer.resume_mode`
    is not set; or the checkpoint is missing, is damaged, or cannot be used under this config."""
    t = cfg.trainer
    holds_run = bool(checkpoints.store.steps()) or has_metrics(t.run_dir) or last_commit.exists(t.run_dir)
    if t.resume_mode in (None, "none"):
        if holds_run:
            raise second_run(t.run_dir)
        return None
    if t.resume_mode == "latest":
        if (newest := find_newest(cfg, checkpoints)) is not None:
            return compare(cfg, newest, False)
        if forked := read_lineage(t.run_dir):
            raise UserError(
                f"trainer.run_dir={t.run_dir}: holds a fork that has no checkpoint yet; start it again with "
                f"trainer.resume_mode=from_path trainer.resume_path={forked['forked_from']}, or choose another "
                "trainer.run_name"
            )
        return None
    checkpoint, fork = _find_named(cfg, checkpoints, holds_run)
    resume = compare(cfg, checkpoint, fork)
    if fork:
        lineage = {"forked_from": checkpoint.path, "step": checkpoint.step, "manifest": checkpoint.manifest["self"]}
        write_file(os.path.join(t.run_dir, LINEAGE_FILE), json.dumps(lineage, indent=2))
    return resume


def find_newest(cfg: Config, checkpoints: CheckpointManager) -> Checkpoint | None:
    """Return the newest valid checkpoint of this run; None if the run has never had one. UserError: no checkpoint of
    the run is valid, or all are missing."""
    newest = checkpoints.latest("unsharded")  # the ranks check the rest before they load it
    if newest is None:
        last_commit.check_nothing_committed(cfg.trainer.run_dir, cfg.trainer.ckpt_path)
    return newest


def _find_named(cfg: Config, checkpoints: CheckpointManager, holds_run: bool) -> tuple[Checkpoint, bool]:
    """Return the checkpoint at `trainer.resume_path`, or the newest checkpoint of the fork that started there.

    The second value says whether a new fork starts.
    """
    t = cfg.trainer
    assert t.resume_path is not None
    path = absolute(t.resume_path)
    if step_in(path) is None or not (is_url(path) or os.path.isdir(path)):
        problem = "must be a global_step_N directory" if step_in(path) is None else "no such checkpoint"
        raise UserError(f"trainer.resume_path={t.resume_path}: {problem}; `trainer checkpoint ls RUN` names them")
    if is_same(os.path.dirname(path), t.ckpt_path):
        raise UserError(
            f"trainer.resume_path={path}: is a checkpoint of this run; continue it with trainer.resume_mode=latest, "
            f"after `trainer checkpoint rollback {shlex.quote(os.path.dirname(path))} --to {step_in(path)}` if "
            "there are newer ones, or fork into another trainer.run_name"
        )
    forked = read_lineage(t.run_dir)
    if forked and (holds_run or forked["forked_from"] == path):  # else no fork was ever trained here
        if forked["forked_from"] != path:
            raise UserError(
                f"trainer.run_dir={t.run_dir}: holds a fork of {forked['forked_from']}; choose another "
                "trainer.run_name, or trainer.resume_mode=latest"
            )
        newest = find_newest(cfg, checkpoints)
        if newest is not None:
            return newest, False
    elif holds_run:
        raise UserError(
            f"trainer.run_dir={t.run_dir}: already holds a run that is no fork; choose another trainer.run_name, or "
            "continue it with trainer.resume_mode=latest"
        )
    try:
        return manifests.verify(path, "unsharded"), True  # no fallback: the user named this checkpoint
    except CorruptCheckpointError as error:
        raise damaged_origin(error) from error


def damaged_origin(error: CorruptCheckpointError) -> CorruptCheckpointError:
    """Return the error of a fork from a damaged checkpoint. The user has named it, so no other takes its place."""
    return CorruptCheckpointError(
        f"trainer.resume_path={error}; restore the checkpoint from a copy, or name another one"
    )


def compare(cfg: Config, checkpoint: Checkpoint, fork: bool) -> Resume:
    """Compare the config of `checkpoint` with `cfg`, and return how the run resumes from the checkpoint. UserError:
    keys differ that must not change, or must not change without permission."""
    saved: dict[str, Any] = read_config(checkpoint)
    restored = frozenset(cfg.trainer.load_components or LOAD_COMPONENTS) if fork else frozenset(LOAD_COMPONENTS)
    now = dataclasses.asdict(cfg)
    changes = compatibility.find_changes(saved, now)
    movable = () if fork else movable_paths(checkpoint, cfg)
    rules = compatibility.resume_rules(cfg, SavedRun(saved, checkpoint.manifest["roles"]), movable)
    allowed = cfg.trainer.allow_config_change
    compatibility.check(changes, allowed, rules, forked=restored if fork else None)
    renamed = any(change.key == "trainer.run_name" for change in changes)
    for change in changes:
        if not change.key.startswith(_NOT_SHOWN + (_NAMED_AFTER_RUN if renamed else ())):
            LOG.info("config changed since the checkpoint: %s", change)
    then = [] if fork else starts_from(cfg.trainer.run_dir, checkpoint.step)
    since = [*changes]
    for start in then:  # the changes since later starts, which may have logged the steps that are trained again
        since += compatibility.find_changes(start["config"], now)
    altering = compatibility.altering(since, rules)
    if altering and not fork:
        keys = ", ".join(dict.fromkeys(altering))
        LOG.info("replayed steps are not compared with what was logged, because %s changed", keys)
    added_steps = compatibility.added_steps(changes, cfg, checkpoint.step)
    # Another version of this package may sum in another order.
    versions = {checkpoint.manifest.get("trainer_version"), *(one.get("versions", {}).get("trainer") for one in then)}
    return Resume(
        checkpoint,
        Restore(restored, fork, added_steps),
        same_rounding=versions == {__version__} and compatibility.same_rounding(since, rules),
        altered=bool(altering),
    )


# ----------------------------------------------------------------------------------------------------------
# The origin of a fork. `lineage.json` names the checkpoint that the fork started from.


def read_lineage(run_dir: str) -> dict[str, Any]:
    """Return the record that `find_resume` wrote (see `manifest.LINEAGE`); empty if the run is not a fork. UserError:
    the file is damaged."""
    path = os.path.join(run_dir, LINEAGE_FILE)
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
