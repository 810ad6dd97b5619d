"""The config of a checkpoint, and whether a run may continue from it under another config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trainer.checkpoint.parts import is_allowed
from trainer.config import OPEN_SECTIONS, Config, TrainerConfig
from trainer.errors import UserError

# Where the run lives, how it is spread over machines, what it prints, saves and keeps: none of it changes
# what is computed, beyond rounding. Data is here because the prompt ledger compares the prompts themselves.
HARMLESS = (
    "logger.*",
    "data.*",
    "model.cache_dir",
    "trainer.total_steps",
    "reward.timeout_s",
    "reward.num_processes",
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
VALIDATION = ("data.val_*", "rollout.val_n")

# Why a value that may change if the user says so does not change by itself, where that is not plain.
REASONS = {
    "*.optimizer.schedule_steps": "the learning rate of every step goes by it (null: the number of steps of the run)",
}


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.saved} -> {self.now}"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Change]:
    """The leaf keys in which two nested configs differ.

    Args:
        defaults: stands in for keys that the saved config, written by an older version, does not have.
    """
    fallback = _flatten(defaults)
    old, new = (_with_schedules(fallback | _flatten(config)) for config in (saved, now))
    found = []
    for name in sorted(new):
        if old.get(name) != new[name]:
            found.append(Change(name, old.get(name), new[name]))
    return found


def meaningless(cfg: Config, supervised: bool) -> tuple[str, ...]:
    """Patterns of keys that change nothing for this kind of run."""
    if supervised:
        return ("algorithm.*", "rollout.*", "reward.*", "trainer.policy.optimizer.*", "trainer.critic.*",
                "trainer.reference.*", "trainer.*_batch_size", "trainer.update_epochs", "sft.steps")  # fmt: skip
    return ("sft.*",) if cfg.model.path is not None else ()


def impossible(cfg: Config, saved: Mapping[str, Any], restored: set[str]) -> dict[str, str]:
    """Keys whose new value would not fit the state that is restored, and why.

    Args:
        restored: what is taken over from the checkpoint, of `RESUME_LOAD`.
    """
    before = saved.get("algorithm", {}).get("kl_controller")
    if "state" in restored and before == cfg.algorithm.kl_controller == "adaptive":
        return {"algorithm.kl_coef": "the adaptive controller has steered the weight since"}
    return {}


def check(
    found: list[Change],
    allowed: list[str],
    harmless: tuple[str, ...] = (),
    critic_changes: bool = True,
    impossible: Mapping[str, str] | None = None,
) -> list[Change]:
    """Refuse what must not change; returns the changes that needed the user's permission.

    Args:
        allowed: keys or sections that the user allows (`trainer.allow_config_change`).
        harmless: patterns of keys that mean nothing to this kind of run, besides `HARMLESS`.
        critic_changes: there was a critic and is none now, or the other way round.
        impossible: reasons why further keys must not change, besides `IMPOSSIBLE`.

    Raises:
        UserError: names the first key that may not change, and what to do.
    """
    permitted = []
    reasons = IMPOSSIBLE | dict(impossible or {})
    for change in found:
        if matches(change.key, (*HARMLESS, *harmless)):
            continue
        reason = next((why for pattern, why in reasons.items() if fnmatchcase(change.key, pattern)), None)
        if reason is not None and (critic_changes or change.key != "algorithm.advantage_estimator"):
            raise UserError(f"{change.key}={change.now}: the checkpoint was saved with {change.saved}, and {reason}; "
                            "restore the value, or start a new run")  # fmt: skip
        if not is_allowed(change.key, allowed):
            why = "".join(f", and {why}" for pattern, why in REASONS.items() if fnmatchcase(change.key, pattern))
            raise UserError(f"{change.key}={change.now}: the checkpoint was saved with {change.saved}{why}; restore "
                            f"the value, or allow it with trainer.allow_config_change=[{change.key}]")  # fmt: skip
        permitted.append(change)
    return permitted


def added_steps(found: list[Change], trainer: TrainerConfig, step: int) -> dict[str, int]:
    """By role, how many more optimizer steps the first `step` steps have under `trainer` than under the saved config.

    The schedule of the learning rate counts optimizer steps. Its place moves by this, so that it is where a run started
    with the new batch sizes would be, and the schedule still ends with the run.
    """
    saved = {change.key: change.saved for change in found}
    before = copy.deepcopy(trainer)
    for name in ("train_batch_size", "mini_batch_size", "update_epochs"):
        setattr(before, name, saved.get(f"trainer.{name}", getattr(trainer, name)))
    before.critic.warmup_steps = saved.get("trainer.critic.warmup_steps", trainer.critic.warmup_steps)
    old, new = before.optimizer_steps(step), trainer.optimizer_steps(step)
    return {role: new[role] - old[role] for role in new}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """One of the patterns covers this key."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _with_schedules(flat: dict[str, Any]) -> dict[str, Any]:
    """Put the steps that each schedule really takes in place of null; null where there is no schedule."""
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
