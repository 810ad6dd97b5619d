"""Which config keys may change when a run resumes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.components import is_allowed
from trainer.config import TASKS, Config, correction_of
from trainer.config.fields import HARMLESS, RESUME, ResumeRule, matches
from trainer.config.rules import SavedRun
from trainer.config.rules import resume_rules as config_rules
from trainer.config.schema import MAPPINGS, is_open, plain, with_sections, without_source
from trainer.errors import UserError, as_list
from trainer.files.documents import flatten
from trainer.files.redaction import redact


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
