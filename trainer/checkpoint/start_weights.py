"""The part of a checkpoint that names what the model directories gave to the run, so that a resume finds the same."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainer.checkpoint.components import Component, Restore, files_part, is_allowed
from trainer.checkpoint.manifest import Checkpoint, read_object
from trainer.config import Config
from trainer.errors import UserError, as_list
from trainer.files.atomic_io import digest_weights
from trainer.files.documents import Shape
from trainer.files.hf_hub import pinned_data, revision_of
from trainer.models.files import resolve_model_path
from trainer.models.given import BACKBONE_FILES, Given, differences, read_file_given, read_given

LOG = logging.getLogger(__name__)

WEIGHTS_FILE = "start_weights.json"
FILES_FILE = "start_files.json"
_FILES: dict[Any, Shape] = {"files": {str: dict}, "revisions": {str: str}}
_TEMPLATE = "model.chat_template"
_SAME_EMBEDDED = (
    "give data and model.tiny.start_accuracy as in that run (null if it began with a version without that key), so "
    "that the embedded model is the same"
)


def start_weights_part(cfg: Config, model_path: str) -> Component:
    """Make the part that holds fingerprints of the base weights, and the content of the model's other files.

    Checkpoints of LoRA runs, and of runs with a frozen reference, do not contain the base weights, so a resume must
    find the same files. The other files act on every run. The files are read on a thread while the ranks start. The
    files of the embedded model are not compared: this package makes them of the config.
    """
    t = cfg.trainer
    adapted = t.policy.lora.rank is not None or cfg.has_critic and t.critic.lora.rank is not None
    paths = {} if cfg.model.path is None else {"model.path": model_path}
    if cfg.has_critic and t.critic.path is not None:
        paths["trainer.critic.path"] = resolve_model_path(t.critic.path)
    needed = {}
    if adapted or cfg.has_reference and not cfg.reference_moves:
        needed["model.path"] = model_path
        if adapted and "trainer.critic.path" in paths:
            needed["trainer.critic.path"] = paths["trainer.critic.path"]
    threads = ThreadPoolExecutor(1)
    digests = {name: threads.submit(digest_weights, path) for name, path in needed.items()}
    given = {name: threads.submit(_read, cfg, name, path) for name, path in paths.items()}
    threads.shutdown(wait=False)

    def content() -> dict[str, bytes]:
        names = {"model.path": cfg.model.path, "trainer.critic.path": t.critic.path}
        weights = {name: digest.result() for name, digest in digests.items()}
        revisions = {str(names[name]): commit for name, path in paths.items() if (commit := revision_of(path))}
        revisions |= pinned_data()
        files = {"files": {name: found.result() for name, found in given.items()}, "revisions": revisions}
        documents = {WEIGHTS_FILE: weights, FILES_FILE: files}
        return {name: json.dumps(one, indent=1, sort_keys=True).encode() for name, one in documents.items()}

    def load(checkpoint: Checkpoint, restore: Restore) -> None:
        if restore.fork and not adapted:  # a fork may have another reference
            return
        saved = read_object(checkpoint, WEIGHTS_FILE, {str: str})
        refused = []
        for name, digest in digests.items():
            known = saved.get(name)
            if known not in (None, digest.result()) and not is_allowed(name, t.allow_config_change):
                remedy = _SAME_EMBEDDED if name == "model.path" and cfg.model.path is None else "restore them"
                refused.append(
                    f"{name}={needed[name]}: its weights are not those that the run began with, and the checkpoint "
                    f"depends on those; {remedy}, or allow others with trainer.allow_config_change=[{name}]"
                )
        refused += _refused_files(checkpoint, given, paths, t.allow_config_change, can_fork=not adapted)
        if refused:
            raise UserError(as_list(f"{checkpoint.path} cannot be used with these models:", refused))

    return files_part("start_weights", content, load)


def movable_paths(checkpoint: Checkpoint, cfg: Config, supervised: bool) -> tuple[str, ...]:
    """Return the keys of model directories that may have another path now, because a resume compares their content.

    Weights need no comparison if the checkpoint holds all of them.

    Raises:
        DamagedError: a record of the checkpoint cannot be read.
    """
    t = cfg.trainer
    named = {entry.path for entry in checkpoint.entries}
    if not {FILES_FILE, WEIGHTS_FILE} <= named:  # an earlier version saved it
        return ()
    files = read_object(checkpoint, FILES_FILE, _FILES)["files"]
    weights = read_object(checkpoint, WEIGHTS_FILE, {str: str})
    adapted = t.policy.lora.rank is not None or t.critic.lora.rank is not None
    builds = {
        "model.path": adapted or (not supervised and cfg.has_reference and not cfg.reference_moves),
        "trainer.critic.path": adapted,
    }
    paths = {"model.path": cfg.model.path, "trainer.critic.path": t.critic.path}
    return tuple(
        name
        for name, path in paths.items()
        if path is not None
        and os.path.isdir(path)
        and name in files
        and (name in weights or not builds[name])
        and not is_allowed(name, t.allow_config_change)
    )


def read_revisions(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the commits of the Hub that the run began with, by the ids of models and data sets.

    Raises:
        DamagedError: the file cannot be read.
    """
    if not any(entry.path == FILES_FILE for entry in checkpoint.entries):  # an earlier version saved it
        return {}
    return read_object(checkpoint, FILES_FILE, _FILES)["revisions"]


def _read(cfg: Config, name: str, path: str) -> Given:
    if name != "model.path":
        return read_given(path, cfg.model.trust_remote_code, BACKBONE_FILES)
    given = read_given(path, cfg.model.trust_remote_code)
    if cfg.model.chat_template is not None:
        given[_TEMPLATE] = read_file_given(cfg.model.chat_template)
    return given


def _refused_files(
    checkpoint: Checkpoint,
    given: Mapping[str, Future[Given]],
    paths: Mapping[str, str],
    allowed: list[str],
    can_fork: bool,
) -> list[str]:
    """Return a sentence for each model directory whose files are not those that the run began with."""
    if not any(entry.path == FILES_FILE for entry in checkpoint.entries):  # an earlier version saved it
        return []
    saved = read_object(checkpoint, FILES_FILE, _FILES)["files"]
    refused = []
    for name, found in given.items():
        before, now = saved.get(name), found.result()
        if before is None:
            continue
        files = sorted({*before, *now})
        if is_allowed(_TEMPLATE, allowed):
            files = [file for file in files if file != _TEMPLATE]
        changed = [change for file in files if (change := differences(file, before.get(file), now.get(file)))]
        if changed and is_allowed(name, allowed):
            LOG.warning(
                "%s=%s: other files than the run began with (%s), as trainer.allow_config_change allows",
                name,
                paths[name],
                "; ".join(changed),
            )
        elif changed:
            fork = "fork the checkpoint (trainer.resume_mode=from_path), " if can_fork else ""
            refused.append(
                f"{name}={paths[name]}: its files are not those that the run began with ({'; '.join(changed)}); "
                f"restore them, {fork}or allow others with trainer.allow_config_change=[{name}]"
            )
    return refused
