"""Keys, values and metrics that earlier versions called otherwise.

A command, a config file or a call with an old name is refused, and the message has the new name. What was saved under
old names (checkpoints, `config.yaml`, `starts.jsonl`, `metrics.jsonl`) is read under the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config.algorithm import correction_or_off
from trainer.config.training import CHECKPOINTING_OF_BOOL
from trainer.import_utils import with_colon

METRICS = {
    "perf/tokens_shared": "perf/prefix_reuse_frac",
    "rollout/pearson": "rollout/logprob_corr",
    "rollout/corrected_frac": "rollout_is/clip_frac",
}
"""Metrics of earlier versions and their successors."""

RESOLVERS = {"in_sweep": "if_sweep", "when": "if_eq", "embedded": "if_builtin"}
"""Functions of config files (`${if_eq:…}`) of earlier versions and their successors."""


KEYS = {
    "trainer.colocate": "trainer.colocate_roles",
    "trainer.silence_timeout_s": "trainer.heartbeat_timeout_s",
    "trainer.worker_timeout_s": "trainer.collective_timeout_s",
    "trainer.call_timeout_s": "trainer.rpc_timeout_s",
    "trainer.lock_timeout_s": "trainer.lock_lease_s",
    "trainer.min_workers": "trainer.min_world_size",
    "trainer.drained_nodes": "trainer.excluded_nodes",
    "trainer.replicas": "trainer.dp_replicate",
    "trainer.context_parallel": "trainer.context_parallel_size",
    "trainer.tensor_parallel": "trainer.tensor_parallel_size",
    "trainer.diverged_above": "trainer.divergence_limits",
    "trainer.diverged_steps": "trainer.divergence_patience",
    "trainer.share_prompts": "trainer.share_prefixes",
    "trainer.ckpt_local_dir": "trainer.ckpt_cache_dir",
    "trainer.resume_load": "trainer.load_components",
    "trainer.stop_at": "trainer.deadline",
    "rollout.share_gpus": "rollout.colocate",
    "algorithm.max_sample_batches": "algorithm.max_gen_batches",
    "algorithm.ref_update_interval": "algorithm.ref_sync_interval",
    "reward.store": "reward.cache",
    "reward.max_failure_frac": "reward.max_error_rate",
    "environment.max_failure_frac": "environment.max_error_rate",
    "environment.options": "environment.kwargs",
    "data.generator": "data.synthetic",
    "data.generator_args": "data.synthetic_args",
    "logger.rollouts": "logger.save_rollouts",
}
"""Keys of earlier versions, and sections with all of their keys, and their successors."""

VALUES: dict[str, dict[str, str]] = {
    "algorithm.old_logprobs": {"trainer": "recompute", "sampler": "rollout"},
    "trainer.best_metric": METRICS,
}
"""By key (of today): its values of earlier versions and their successors. A command with an old value is refused."""


def with_new_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping by metrics, such as a line of `metrics.jsonl`, with the names of today."""
    return {METRICS.get(name, name): value for name, value in metrics.items()}


def _import_path(saved: Any) -> Any:
    return with_colon(saved) if isinstance(saved, str) else saved


def _checkpointing(saved: Any) -> Any:
    return CHECKPOINTING_OF_BOOL[str(saved)] if isinstance(saved, bool) else saved


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "algorithm.rollout_correction": correction_or_off,
    "trainer.divergence_limits": with_new_metrics,
    "algorithm.advantage_estimator": _import_path,
    "algorithm.policy_loss": _import_path,
    "reward.name": _import_path,
    "data.curriculum": _import_path,
    "trainer.policy.fsdp.activation_checkpointing": _checkpointing,
    "trainer.critic.fsdp.activation_checkpointing": _checkpointing,
}
"""By key (of today): a function from a saved value to that of today. Commands may use both."""

LACKING = {"model.tool_format": "hermes"}
"""Keys that earlier versions did not have, and did not treat as their defaults do: what these versions did."""


def successor_of(key: str) -> str | None:
    """Return what the key of an earlier version, or a key below a section that was renamed, is called today."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def successor_of_value(key: str, value: Any) -> Any:
    """Return what the value that an earlier version had for `key` is called today; None: it is no such value."""
    return VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config that an earlier version saved with the keys and values of today. `saved` stays."""
    config = _copy_of_sections(saved)
    for old, new in KEYS.items():
        section, name = _section_of(config, old)
        if name in section:
            successor, new_name = _section_of(config, new, make=True)
            successor.setdefault(new_name, section.pop(name))
    for key in (*VALUES, *CONVERTERS):
        section, name = _section_of(config, key)
        if name in section:
            value = section[name]
            section[name] = CONVERTERS[key](value) if key in CONVERTERS else VALUES[key].get(value, value)
    for key, value in LACKING.items():
        section, name = _section_of(config, key)
        if section:
            section.setdefault(name, value)
    return config


def with_new_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command that an earlier version recorded with the keys and values of today."""
    return [_new_word(word) for word in words]


def _new_word(word: str) -> str:
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    new = successor_of(name) or name
    return key.removesuffix(name) + new + equals + (successor_of_value(new, value) or value) if equals else word


def _section_of(config: dict[str, Any], key: str, make: bool = False) -> tuple[dict[str, Any], str]:
    """Return the section that holds a key, and the name of the key in it. The section is empty if there is none."""
    section: Any = config
    *outer, name = key.split(".")
    for inner in outer:
        section = section.setdefault(inner, {}) if make else section.get(inner)
        if not isinstance(section, dict):
            return {}, name
    return section, name


def _copy_of_sections(config: Any) -> Any:
    return {k: _copy_of_sections(v) for k, v in config.items()} if isinstance(config, Mapping) else config
