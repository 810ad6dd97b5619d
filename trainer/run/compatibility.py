"""Which config keys may change when a run resumes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trainer.checkpoint.components import Restore, is_allowed
from trainer.checkpoint.manifest import Checkpoint
from trainer.config import OPEN_SECTIONS, Config, TrainerConfig, own_defaults
from trainer.errors import UserError, as_list
from trainer.files.redaction import agree

# Changes of these keys do not change the computed values, beyond rounding: directories, logging, saving, validation,
# and the split of the work over machines. Data is here because the ledger compares the examples themselves, and
# model.tiny.start_accuracy because the start weights are compared where a checkpoint depends on them.
HARMLESS = (
    "logger.*",
    "data.*",
    "model.cache_dir",
    "model.tiny.start_accuracy",
    "trainer.total_steps",
    "reward.timeout_s",
    "reward.num_processes",
    "reward.concurrency",
    "reward.max_error_rate",
    "reward.cache",
    "reward.remote.*",
    "reward.success_threshold",
    "environment.timeout_s",
    "environment.num_processes",
    "environment.max_error_rate",
    "trainer.run_name",
    "trainer.run_dir",
    "trainer.export_path",
    "trainer.hf_save_*",
    "trainer.deadline",
    "trainer.val_*",
    "trainer.ckpt_*",
    "trainer.keep_*",
    "trainer.best_*",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_*",
    "trainer.load_components",
    "trainer.verify_checkpoint",
    "trainer.allow_config_change",
    "trainer.on_resume_mismatch",
    "trainer.mean_time_between_failures",
    "trainer.lock_lease_s",
    "trainer.num_workers",
    "trainer.min_world_size",
    "trainer.excluded_nodes",
    "trainer.dp_replicate",
    "trainer.context_parallel_size",
    "trainer.tensor_parallel_size",
    "trainer.device",
    "trainer.colocate_roles",
    "trainer.offload",
    "trainer.deterministic",
    "trainer.ray_address",
    "trainer.placement_timeout_s",
    "trainer.master_port",
    "trainer.collective_timeout_s",
    "trainer.heartbeat_timeout_s",
    "trainer.node_timeout_s",
    "trainer.hang_timeout_s",
    "trainer.divergence_limits",
    "trainer.divergence_patience",
    "trainer.max_restarts",
    "trainer.restart_window_minutes",
    "trainer.rpc_timeout_s",
    "trainer.max_tokens_per_micro_batch",
    "trainer.share_prefixes",
    "trainer.*.fsdp.reshard_after_forward",
    "trainer.*.fsdp.cpu_offload",
    "trainer.*.fsdp.prefetch",
    "trainer.*.fsdp.activation_checkpointing",
    "trainer.*.fsdp.compile",
    "trainer.*.fsdp.reduce_gradients",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.colocate",
    "rollout.val_n",
    "rollout.max_num_seqs",
    "rollout.kv_cache_mb",
    "rollout.enforce_eager",
    "rollout.gpu_memory_utilization",
    "rollout.weight_sync",
    "rollout.weight_sync_bucket_mb",
    "rollout.lora_sync",
)


@dataclass(frozen=True)
class Bound:
    """Why saved state has no meaning under another value of a key."""

    reason: str
    kinds: tuple[str, ...] = ()
    """The kinds of state (of `LOAD_COMPONENTS`) that lose their meaning. A fork that restores none of them may change
    the key."""


IMPOSSIBLE = {
    "model.tiny.*": Bound("the saved weights belong to another model", ("weights", "optimizer")),
    "trainer.seed": Bound("every random draw of the run depends on it", ("data",)),
    "algorithm.advantage_estimator": Bound("only one of the two has a critic"),
    "algorithm.ref_sync_interval": Bound("it decides whether the checkpoint holds the reference"),
    "trainer.*.lora.rank": Bound("the saved adapters have another shape", ("weights", "optimizer")),
    "trainer.*.lora.target_modules": Bound("the saved adapters belong to other layers", ("weights", "optimizer")),
}

# Keys that even a fork changes with permission alone, if it restores weights or their optimizer state.
FORK_NEEDS_PERMISSION = ("model.path",)

# Harmless changes after which a replayed step equals the logged one only to rounding.
ROUNDING = (
    "trainer.num_workers",
    "trainer.dp_replicate",
    "trainer.context_parallel_size",
    "trainer.tensor_parallel_size",
    "trainer.device",
    "trainer.deterministic",
    "trainer.colocate_roles",
    "trainer.*.fsdp.*",
    "trainer.max_tokens_per_micro_batch",
    "trainer.share_prefixes",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.max_num_seqs",
    "rollout.kv_cache_mb",
    "rollout.enforce_eager",
    "rollout.gpu_memory_utilization",
    "rollout.weight_sync",
    "rollout.weight_sync_bucket_mb",
    "rollout.lora_sync",
)

# Harmless changes after which the logged validation means something else.
VALIDATION = ("data.val_*", "rollout.val_n", "reward.success_threshold")

# Changes that act in the update of a step: the rollouts of the first step after a resume are as they were logged.
UPDATE = (
    "trainer.*.optimizer.*",
    "trainer.critic.*",
    "trainer.mini_batch_size",
    "trainer.update_epochs",
    "sft.optimizer.*",
    "algorithm.*",
)
SAMPLING = ("algorithm.dynamic_sampling", "algorithm.max_gen_batches")  # the exceptions to `UPDATE`

# The metrics that a change alters, by the beginning of their names.
OF_VALIDATION = ("val/",)
OF_UPDATE = ("critic/", "policy/", "rollout/", "rollout_is/", "sft/", "val/")
ALL_METRICS = ("",)

# Explanations for keys that need the user's permission, where the reason is not obvious.
REASONS = {
    "model.path": "the saved weights belong to that model",
    "*.optimizer.schedule_steps": "the learning rate of every step goes by it (null: the number of steps of the run)",
}


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.saved} -> {self.now}"


class ConfigRefused(UserError):
    """A checkpoint cannot be used with the config of this start.

    Args:
        sentences: one for each key that must not change, with its remedy.
        keys: these keys.
    """

    resume: tuple[Checkpoint, Restore]
    """The checkpoint, and what of it would have been restored."""

    def __init__(self, sentences: Sequence[str], keys: Sequence[str]):
        super().__init__(as_list("the checkpoint cannot be used with this config:", sentences))
        self.sentences = sentences
        self.keys = keys


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Change]:
    """Return the leaf keys in which two nested configs differ.

    Args:
        defaults: values of keys that the saved config does not have, because an older version wrote it.
    """
    fallback = _flatten(defaults)
    old, new = (_with_schedules(fallback | _flatten(config)) for config in (saved, now))
    own_before, own_now = _defaults_of_functions(old), _defaults_of_functions(new)
    changes = []
    for name in sorted(new):
        # Earlier versions saved null for the default of a function.
        before = own_before.get(name) if old.get(name) is None else old[name]
        after = own_now.get(name) if new[name] is None else new[name]
        is_default = before == own_before.get(name) and after == own_now.get(name)  # it changes with the function alone
        is_unknown = "${" in str(before)  # an older config lacks the key, whose default is an interpolation
        if not agree(before, after) and not is_default and not is_unknown:
            changes.append(Change(name, before, after))
    return changes


def ignored_keys(cfg: Config, supervised: bool) -> tuple[str, ...]:
    """Return patterns of the keys that this kind of run does not use."""
    if supervised:
        return (
            "algorithm.*",
            "rollout.*",
            "reward.*",
            "environment.*",
            "trainer.policy.optimizer.*",
            "trainer.critic.*",
            "trainer.reference.*",
            "trainer.*_batch_size",
            "trainer.update_epochs",
            "sft.steps",
        )
    return ("sft.*",) if cfg.model.path is not None else ()


def impossible_changes(cfg: Config, saved: Mapping[str, Any], saved_roles: Collection[str]) -> dict[str, Bound]:
    """Return the keys that must not change between these two configs, with the reasons.

    Args:
        saved_roles: the roles that the checkpoint holds.
    """
    impossible = dict(IMPOSSIBLE)
    if ("critic" in saved_roles) == ("critic" in {role.name for role in cfg.roles}):
        del impossible["algorithm.advantage_estimator"]
    if saved.get("algorithm", {}).get("kl_controller") == cfg.algorithm.kl_controller == "adaptive":
        impossible["algorithm.kl_coef"] = Bound("the adaptive controller has steered the weight since", ("state",))
    return impossible


def check(
    changes: list[Change],
    allowed: list[str],
    harmless: tuple[str, ...] = (),
    impossible: Mapping[str, Bound] = IMPOSSIBLE,
    forked: Collection[str] | None = None,
) -> list[Change]:
    """Refuse changes of keys that must not change; return the changes that may change what is computed.

    A resume needs the user's permission for these. A fork is asked for explicitly, so it needs permission for few keys.

    Args:
        allowed: keys or sections that the user allows to change (`trainer.allow_config_change`).
        harmless: patterns of further keys that may change, besides `HARMLESS`.
        impossible: keys that must not change, with the reasons.
        forked: the kinds of state that a fork restores; None: the run continues.

    Raises:
        ConfigRefused: lists all keys that must not change, with the remedies.
    """
    effective = [change for change in changes if not matches(change.key, (*HARMLESS, *harmless))]
    refused: list[str] = []
    refused_keys: list[str] = []
    askable: list[str] = []
    for change in effective:
        saved = f"{change.key}={change.now}: the checkpoint was saved with {change.saved}"
        bound = next((bound for pattern, bound in impossible.items() if fnmatchcase(change.key, pattern)), None)
        if bound is not None and (forked is None or set(bound.kinds) & set(forked)):
            other = (
                "start a new run"
                if forked is None
                else f"leave {' and '.join(bound.kinds)} out of trainer.load_components"
            )
            refused.append(f"{saved}, and {bound.reason}; restore the value, or {other}")
            refused_keys.append(change.key)
        elif _needs_permission(change.key, forked) and not is_allowed(change.key, allowed):
            why = "".join(f", and {why}" for pattern, why in REASONS.items() if fnmatchcase(change.key, pattern))
            refused.append(
                f"{saved}{why}; restore the value, or allow it with trainer.allow_config_change=[{change.key}]"
            )
            refused_keys.append(change.key)
            askable.append(change.key)
    if len(askable) > 1:
        keys = ",".join([*allowed, *askable])
        refused.append(f"to allow all that can be allowed: trainer.allow_config_change=[{keys}]")
    if refused:
        raise ConfigRefused(refused, refused_keys)
    return effective


def _needs_permission(key: str, forked: Collection[str] | None) -> bool:
    if forked is None:
        return True
    return matches(key, FORK_NEEDS_PERMISSION) and bool({"weights", "optimizer"} & set(forked))


def altered_metrics(changes: Sequence[Change], effective: Sequence[Change]) -> tuple[tuple[str, ...], list[str]]:
    """Return the metrics that the changes alter (`()`, `OF_VALIDATION`, `OF_UPDATE` or `ALL_METRICS`), and the keys.

    Args:
        effective: those of the changes that change what is computed in training.
    """
    of_validation = [change.key for change in changes if matches(change.key, VALIDATION)]
    keys = [change.key for change in effective]
    if any(not matches(key, UPDATE) or matches(key, SAMPLING) for key in keys):
        return ALL_METRICS, keys
    if keys:
        return OF_UPDATE, keys
    return (OF_VALIDATION, of_validation) if of_validation else ((), [])


def added_steps(changes: list[Change], trainer: TrainerConfig, step: int) -> dict[str, int]:
    """Return how many optimizer steps the learning rate schedule of each role must move by, because of `changes`.

    The schedule counts optimizer steps, and new batch sizes give the first `step` steps another number of optimizer
    steps. The difference moves the schedule to the place where a run with the new batch sizes would be, so that it
    still ends with the run.
    """
    saved = {change.key: change.saved for change in changes}
    before = copy.deepcopy(trainer)
    for name in ("train_batch_size", "mini_batch_size", "update_epochs"):
        setattr(before, name, saved.get(f"trainer.{name}", getattr(trainer, name)))
    before.critic.warmup_steps = saved.get("trainer.critic.warmup_steps", trainer.critic.warmup_steps)
    old, new = before.optimizer_steps(step), trainer.optimizer_steps(step)
    return {role: new[role] - old[role] for role in new}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the patterns covers the key `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _with_schedules(flat: dict[str, Any]) -> dict[str, Any]:
    """Replace a null `schedule_steps` by the total steps, and the value of a constant schedule by null."""
    totals = {
        "trainer.policy.optimizer": "trainer.total_steps",
        "trainer.critic.optimizer": "trainer.total_steps",
        "sft.optimizer": "sft.steps",
    }
    lengths = {}
    for optimizer, total in totals.items():
        key = f"{optimizer}.schedule_steps"
        if key in flat:
            scheduled = flat.get(f"{optimizer}.scheduler") != "constant"
            lengths[key] = (flat[key] or flat.get(total)) if scheduled else None
    return flat | lengths


def _defaults_of_functions(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the options of the functions that a flat config chooses, with the functions' defaults."""
    section = "algorithm."
    algorithm = {key.removeprefix(section): value for key, value in flat.items() if key.startswith(section)}
    return {section + name: value for name, value in own_defaults(algorithm, custom=True).items()}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in OPEN_SECTIONS:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat
