"""Find the checkpoint that a run resumes from, and compare its config with the config of this start."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import __version__
from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Restore, is_allowed, movable_paths, read_config
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import LINEAGE, Checkpoint, CorruptCheckpointError, step_in
from trainer.config import LOAD_COMPONENTS, TASKS, Config, correction_of
from trainer.config.fields import HARMLESS, RESUME, ResumeRule, matches
from trainer.config.rules import SavedRun
from trainer.config.rules import resume_rules as config_rules
from trainer.config.schema import MAPPINGS, is_open, plain, with_sections, without_source
from trainer.errors import UserError, as_list
from trainer.files.atomic_io import read_file, write_file
from trainer.files.documents import flatten, parse_object
from trainer.files.hf_hub import first_line
from trainer.files.redaction import redact
from trainer.files.uris import absolute, is_same, is_url
from trainer.run.run_metadata import has_metrics, second_run, starts_from

LOG = logging.getLogger(__name__)

LINEAGE_FILE = "lineage.json"
_NOT_SHOWN = ("trainer.resume_", "trainer.load_components", "trainer.allow_")
_NAMED_AFTER_RUN = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "logger.name", "logger.group")
"""Keys that follow `trainer.run_name`, unless they are set."""


@dataclass(frozen=True)
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

    Returns None if training starts from the beginning. Raises UserError: the directory holds a run but
    `trainer.resume_mode` is not set; or the checkpoint is missing, is damaged, or cannot be used under this config."""
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
    """Return the newest valid checkpoint of this run; None if the run has never had one. Raises UserError: no
    checkpoint of the run is valid, or all are missing."""
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
    """Compare the config of `checkpoint` with `cfg`, and return how the run resumes from the checkpoint. Raises
    UserError: keys differ that must not change, or must not change without permission."""
    saved: dict[str, Any] = read_config(checkpoint)
    restored = frozenset(cfg.trainer.load_components or LOAD_COMPONENTS) if fork else frozenset(LOAD_COMPONENTS)
    now = dataclasses.asdict(cfg)
    changes = find_changes(saved, now)
    movable = () if fork else movable_paths(checkpoint, cfg)
    rules = resume_rules(cfg, SavedRun(saved, checkpoint.manifest["roles"]), movable)
    allowed = cfg.trainer.allow_config_change
    check(changes, allowed, rules, forked=restored if fork else None)
    renamed = any(change.key == "trainer.run_name" for change in changes)
    for change in changes:
        if not change.key.startswith(_NOT_SHOWN + (_NAMED_AFTER_RUN if renamed else ())):
            LOG.info("config changed since the checkpoint: %s", change)
    then = [] if fork else starts_from(cfg.trainer.run_dir, checkpoint.step)
    since = [*changes]
    for start in then:  # the changes since later starts, which may have logged the steps that are trained again
        since += find_changes(start["config"], now)
    keys = altering(since, rules)
    if keys and not fork:
        named = ", ".join(dict.fromkeys(keys))
        LOG.info("replayed steps are not compared with what was logged, because %s changed", named)
    # Another version of this package may sum in another order.
    versions = {checkpoint.manifest.get("trainer_version"), *(one.get("versions", {}).get("trainer") for one in then)}
    return Resume(
        checkpoint,
        Restore(restored, fork, added_steps(changes, cfg, checkpoint.step)),
        same_rounding=versions == {__version__} and same_rounding(since, rules),
        altered=bool(keys),
    )


# ----------------------------------------------------------------------------------------------------------
# Which config keys may change when a run resumes


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.saved} -> {self.now}"


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the leaf keys in which two nested configs differ.

    Of sections that only one of them has, such as a source of `data.mix`, their mapping is the key that differs. A key
    of a source that changes with that of the run is left out. Keys that an older version did not save have their
    defaults."""
    fallback = _flat(dataclasses.asdict(Config()))
    # A new password is no change of the run.
    old, new = (_with_schedules(fallback | _flat(redact(config, references=False))) for config in (saved, now))
    usual = _flat(dataclasses.asdict(with_sections()))
    one_sided = tuple(f"{key}.{name}." for key in MAPPINGS for name in {*old[key]} ^ {*new[key]})
    changes = []
    for name in sorted(new):
        of_run = without_source(name)
        if name.startswith(one_sided) or (name != of_run and (old.get(name), new[name]) == (old[of_run], new[of_run])):
            continue
        if name not in old:  # an earlier version saved the source
            old[name] = usual.get(plain(name)) if name == of_run else old[of_run]
        before, after = old[name], new[name]
        is_unknown = "${" in str(before)  # an older config lacks the key, whose default is an interpolation
        if before != after and not is_unknown:
            changes.append(Change(name, before, after))
    return changes


def resume_rules(cfg: Config, saved: SavedRun, harmless: Collection[str] = ()) -> dict[str, ResumeRule]:
    """Return what a resume of the run `saved` with the config `cfg` may do with each key. The keys in `harmless` may
    change, too.
    """
    rules, free = config_rules(cfg, saved), cfg.task.may_change
    unread = {key for key in rules if not cfg.reads(key) or matches(key, free)}
    return {key: HARMLESS if key in harmless or key in unread else rule for key, rule in rules.items()}


def check(
    changes: Sequence[Change],
    allowed: Sequence[str],
    rules: Mapping[str, ResumeRule],
    forked: Collection[str] | None = None,
) -> list[Change]:
    """Refuse changes of keys that must not change; return the changes that may change what is computed.

    A resume needs the user's permission for these. A fork is asked for explicitly, so it needs permission only where
    the state that it restores belongs to the value.

    Args:
        allowed: keys or sections that the user allows to change (`trainer.allow_config_change`).
        rules: of each key (see `resume_rules`).
        forked: the kinds of state that a fork restores; None: the run continues.

    Raises:
        UserError: lists all keys that must not change, with the remedies.
    """
    effective = [change for change in changes if not rules[change.key].is_free]
    refused: dict[str, str] = {}
    overridable: list[str] = []
    for change in effective:
        rule = rules[change.key]
        if forked is not None and not set(rule.state) & set(forked):
            continue
        saved = f"{change.key}={change.now}: the checkpoint was saved with {change.saved}"
        why = f", and {rule.reason}" if rule.reason else ""
        if rule.change == "never":
            kinds = " and ".join(rule.state)
            other = "start a new run" if forked is None else f"leave {kinds} out of trainer.load_components"
            refused[change.key] = f"{saved}{why}; restore the value, or {other}"
        elif not is_allowed(change.key, allowed):
            allow = f"trainer.allow_config_change=[{change.key}]"
            refused[change.key] = f"{saved}{why}; restore the value, or allow it with {allow}"
            overridable.append(change.key)
    sentences = list(refused.values())
    if len(overridable) > 1:
        keys = ",".join([*allowed, *overridable])
        sentences.append(f"to allow all that can be allowed: trainer.allow_config_change=[{keys}]")
    if refused:
        raise UserError(as_list("the checkpoint cannot be used with this config:", sentences))
    return effective


def altering(changes: Sequence[Change], rules: Mapping[str, ResumeRule]) -> list[str]:
    """Return the changed keys after which a step has other metrics, even those of validation alone."""
    same = ("harmless", "rounding")
    return [change.key for change in changes if rules[change.key].change not in same]


def same_rounding(changes: Sequence[Change], rules: Mapping[str, ResumeRule]) -> bool:
    """Return whether what is computed before and after the changes is equal to the last bit, where it is the same."""
    return not any(rules[change.key].change == "rounding" for change in changes)


def deciding_settings(cfg: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that decide rollouts and rewards, and those that decide the update, by key.

    Keys that change nothing, or only how sums are rounded, are in neither. Nor are the paths of models: their content
    is what counts.
    """
    algorithm = dataclasses.replace(cfg.algorithm, rollout_correction=correction_of(cfg))
    deciding = dataclasses.replace(cfg, algorithm=algorithm)
    flat = _with_schedules(_flat(redact(dataclasses.asdict(deciding), references=False)))
    paths = {"model.path", *(role.config_key for role in cfg.roles)}
    by_rule: dict[str, dict[str, Any]] = {name: {} for name in RESUME}
    for key, rule in config_rules(cfg).items():
        if key not in paths and cfg.reads(key):
            by_rule[rule.change][key] = flat[key]
    return by_rule["rollouts"] | by_rule["never"], by_rule["update"]


def added_steps(changes: list[Change], cfg: Config, step: int) -> dict[str, int]:
    """Return how many optimizer steps the learning rate schedule of each role must move by, because of `changes`.

    The schedule counts optimizer steps, and new batch sizes give the first `step` steps another number of optimizer
    steps. The difference moves the schedule to where it would be with the new batch sizes, so that it still ends with
    the run.
    """
    saved = {change.key: change.saved for change in changes if cfg.reads(change.key)}
    before = copy.deepcopy(cfg)
    for name in ("train_batch_size", "mini_batch_size", "update_epochs"):
        setattr(before.trainer, name, saved.get(f"trainer.{name}", getattr(cfg.trainer, name)))
    critic = before.trainer.critic
    critic.warmup_steps = saved.get("trainer.critic.warmup_steps", critic.warmup_steps)
    old = {role.name: role.optimizer_steps(step) for role in before.roles}
    return {role.name: role.optimizer_steps(step) - old[role.name] for role in cfg.roles if role.trained}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested config by dotted key, and the names in each of `MAPPINGS`."""
    flat = flatten(config, whole=is_open)
    for key in MAPPINGS:
        section, _, name = key.rpartition(".")
        flat[key] = sorted((config.get(section) or {}).get(name) or {})
    return flat


def _with_schedules(flat: dict[str, Any]) -> dict[str, Any]:
    """Replace a null `schedule_steps` by the total steps, and the value of a constant schedule by null."""
    totals = {task.optimizer: task.total_steps for task in TASKS.values()}
    lengths = {}
    for optimizer, total in totals.items():
        key = f"{optimizer}.schedule_steps"
        if key in flat:
            scheduled = flat.get(f"{optimizer}.scheduler") != "constant"
            lengths[key] = (flat[key] or flat.get(total)) if scheduled else None
    return flat | lengths


# ----------------------------------------------------------------------------------------------------------
# The origin of a fork. `lineage.json` names the checkpoint that the fork started from.


def read_lineage(run_dir: str) -> dict[str, Any]:
    """Return the record that `find_resume` wrote (see `manifest.LINEAGE`); empty if the run is not a fork. Raises
    UserError: the file is damaged."""
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
