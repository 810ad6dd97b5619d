"""Which config keys may change when a run resumes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trainer.checkpoint.parts import is_allowed
from trainer.config import OPEN_SECTIONS, Config, TrainerConfig
from trainer.errors import UserError

# Changes of these keys do not change the computed values, beyond rounding: directories, logging, saving, validation,
# and the split of the work over machines. Data is here because the ledger compares the examples themselves.
HARMLESS = (
    "logger.*",
    "data.*",
    "model.cache_dir",
    "trainer.total_steps",
    "reward.timeout_s",
    "reward.num_processes",
    "reward.success_threshold",
    "trainer.run_name",
    "trainer.run_dir",
    "trainer.export_path",
    "trainer.hf_save_*",
    "trainer.stop_at",
    "trainer.val_*",
    "trainer.ckpt_*",
    "trainer.keep_*",
    "trainer.best_*",
    "trainer.max_ckpts_to_keep",
    "trainer.resume_*",
    "trainer.verify_checkpoint",
    "trainer.allow_config_change",
    "trainer.on_resume_mismatch",
    "trainer.mean_time_between_failures",
    "trainer.lock_timeout_s",
    "trainer.num_workers",
    "trainer.replicas",
    "trainer.device",
    "trainer.colocate_roles",
    "trainer.ray_address",
    "trainer.master_port",
    "trainer.worker_timeout_s",
    "trainer.silence_timeout_s",
    "trainer.call_timeout_s",
    "trainer.max_tokens_per_micro_batch",
    "trainer.*.fsdp.reshard_after_forward",
    "trainer.*.fsdp.cpu_offload",
    "trainer.*.fsdp.activation_checkpointing",
    "trainer.reference.fsdp.reduce_dtype",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.share_gpus",
    "rollout.val_n",
    "rollout.max_num_seqs",
    "rollout.kv_cache_mb",
    "rollout.enforce_eager",
    "rollout.gpu_memory_utilization",
    "rollout.weight_sync",
    "rollout.lora_sync",
)

# The saved state has no meaning under another value.
IMPOSSIBLE = {
    "model.tiny.*": "the saved weights belong to another model",
    "trainer.seed": "every random draw of the run depends on it",
    "algorithm.advantage_estimator": "only one of the two has a critic",
    "algorithm.ref_update_interval": "it decides whether the checkpoint holds the reference",
    "trainer.*.lora.rank": "the saved adapters have another shape",
    "trainer.*.lora.target_modules": "the saved adapters belong to other layers",
}

# Harmless changes after which a replayed step equals the logged one only to rounding.
ROUNDING = (
    "trainer.num_workers",
    "trainer.replicas",
    "trainer.device",
    "trainer.colocate_roles",
    "trainer.*.fsdp.*",
    "trainer.max_tokens_per_micro_batch",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.max_num_seqs",
    "rollout.kv_cache_mb",
    "rollout.enforce_eager",
    "rollout.gpu_memory_utilization",
    "rollout.weight_sync",
    "rollout.lora_sync",
)

# Harmless changes after which the logged validation means something else.
VALIDATION = ("data.val_*", "rollout.val_n", "reward.success_threshold")

# Explanations for keys that need the user's permission, where the reason is not obvious.
REASONS = {
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


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Change]:
    """Return the leaf keys in which two nested configs differ.

    Args:
        defaults: values of keys that the saved config does not have, because an older version wrote it.
    """
    fallback = _flatten(defaults)
    old, new = (_with_schedules(fallback | _flatten(config)) for config in (saved, now))
    changes = []
    for name in sorted(new):
        if old.get(name) != new[name]:
            changes.append(Change(name, old.get(name), new[name]))
    return changes


def ignored_keys(cfg: Config, supervised: bool) -> tuple[str, ...]:
    """Return patterns of the keys that this kind of run does not use."""
    if supervised:
        return (
            "algorithm.*",
            "rollout.*",
            "reward.*",
            "trainer.policy.optimizer.*",
            "trainer.critic.*",
            "trainer.reference.*",
            "trainer.*_batch_size",
            "trainer.update_epochs",
            "sft.steps",
        )
    return ("sft.*",) if cfg.model.path is not None else ()


def impossible_changes(cfg: Config, saved: Mapping[str, Any], restored: set[str]) -> dict[str, str]:
    """Return the keys that must not change because of the state that is restored, with the reasons.

    Args:
        restored: the kinds of state that are restored, of `RESUME_LOAD`.
    """
    before = saved.get("algorithm", {}).get("kl_controller")
    if "state" in restored and before == cfg.algorithm.kl_controller == "adaptive":
        return {"algorithm.kl_coef": "the adaptive controller has steered the weight since"}
    return {}


def check(
    changes: list[Change],
    allowed: list[str],
    harmless: tuple[str, ...] = (),
    critic_changes: bool = True,
    impossible: Mapping[str, str] | None = None,
) -> list[Change]:
    """Refuse changes of keys that must not change; returns the changes that needed the user's permission.

    Args:
        allowed: keys or sections that the user allows to change (`trainer.allow_config_change`).
        harmless: patterns of further keys that may change, besides `HARMLESS`.
        critic_changes: only one of the two configs has a critic.
        impossible: further keys that must not change, besides `IMPOSSIBLE`, with the reasons.

    Raises:
        UserError: names the first key that must not change, and the remedy.
    """
    permitted = []
    reasons = IMPOSSIBLE | dict(impossible or {})
    for change in changes:
        if matches(change.key, (*HARMLESS, *harmless)):
            continue
        reason = next((why for pattern, why in reasons.items() if fnmatchcase(change.key, pattern)), None)
        if reason is not None and (critic_changes or change.key != "algorithm.advantage_estimator"):
            raise UserError(
                f"{change.key}={change.now}: the checkpoint was saved with {change.saved}, and {reason}; "
                "restore the value, or start a new run"
            )
        if not is_allowed(change.key, allowed):
            why = "".join(f", and {why}" for pattern, why in REASONS.items() if fnmatchcase(change.key, pattern))
            raise UserError(
                f"{change.key}={change.now}: the checkpoint was saved with {change.saved}{why}; restore "
                f"the value, or allow it with trainer.allow_config_change=[{change.key}]"
            )
        permitted.append(change)
    return permitted


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


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in OPEN_SECTIONS:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat
