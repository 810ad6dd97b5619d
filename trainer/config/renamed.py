"""Keys, values and metrics that earlier versions called otherwise.

A command, a config file or a call with an old name is refused, and the message has the new name. What was saved under
old names (checkpoints, `config.yaml`, `starts.jsonl`, `metrics.jsonl`) is read under the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.roles import CHECKPOINTING_OF_BOOL
from trainer.import_utils import with_colon

METRICS = {
    "perf/tokens_shared": "perf/prefix_reuse_frac",
    "rollout/pearson": "rollout/logprob_corr",
    "rollout/corrected_frac": "rollout_is/clip_frac",
}
"""Metrics of earlier versions and their successors."""

RESOLVERS = {"in_sweep": "if_sweep", "when": "if_eq", "embedded": "if_builtin"}
"""Functions of config files (`${if_eq:…}`) of earlier versions and their successors."""


@dataclass(frozen=True)
class Renamed:
    """A key, or a section with all of its keys, that an earlier version called otherwise or gave other values."""

    old: str
    new: str
    """The same as `old` if only values have changed."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values of earlier versions and their successors. A command with an old value is refused."""
    convert: Callable[[Any], Any] | None = None
    """Returns the value of today for a saved value. Commands may use both."""

    def value(self, saved: Any) -> Any:
        """Return the value of today for a saved value."""
        if self.convert is not None:
            return self.convert(saved)
        return self.values.get(saved, saved) if self.values else saved


def with_new_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping by metrics, such as a line of `metrics.jsonl`, with the names of today."""
    return {METRICS.get(name, name): value for name, value in metrics.items()}


def _import_path(saved: Any) -> Any:
    return with_colon(saved) if isinstance(saved, str) else saved


def _checkpointing(saved: Any) -> Any:
    return CHECKPOINTING_OF_BOOL[str(saved)] if isinstance(saved, bool) else saved


RENAMED = (
    Renamed("trainer.colocate", "trainer.colocate_roles"),
    Renamed("trainer.silence_timeout_s", "trainer.heartbeat_timeout_s"),
    Renamed("trainer.worker_timeout_s", "trainer.collective_timeout_s"),
    Renamed("trainer.call_timeout_s", "trainer.rpc_timeout_s"),
    Renamed("trainer.lock_timeout_s", "trainer.lock_lease_s"),
    Renamed("trainer.min_workers", "trainer.min_world_size"),
    Renamed("trainer.drained_nodes", "trainer.excluded_nodes"),
    Renamed("trainer.replicas", "trainer.dp_replicate"),
    Renamed("trainer.context_parallel", "trainer.context_parallel_size"),
    Renamed("trainer.tensor_parallel", "trainer.tensor_parallel_size"),
    Renamed("trainer.diverged_above", "trainer.divergence_limits"),
    Renamed("trainer.diverged_steps", "trainer.divergence_patience"),
    Renamed("trainer.share_prompts", "trainer.share_prefixes"),
    Renamed("trainer.ckpt_local_dir", "trainer.ckpt_cache_dir"),
    Renamed("trainer.ckpt_local_copies", "trainer.ckpt_replicas"),
    Renamed("trainer.resume_load", "trainer.load_components"),
    Renamed("trainer.stop_at", "trainer.deadline"),
    Renamed("rollout.share_gpus", "rollout.colocate"),
    Renamed("algorithm.max_sample_batches", "algorithm.max_gen_batches"),
    Renamed("algorithm.ref_update_interval", "algorithm.ref_sync_interval"),
    Renamed("reward.store", "reward.cache"),
    Renamed("reward.max_failure_frac", "reward.max_error_rate"),
    Renamed("environment.max_failure_frac", "environment.max_error_rate"),
    Renamed("environment.options", "environment.kwargs"),
    Renamed("data.generator", "data.synthetic"),
    Renamed("data.generator_args", "data.synthetic_args"),
    Renamed("logger.rollouts", "logger.save_rollouts"),
    # Values. Successors of keys come first: these are names of today.
    Renamed("algorithm.old_logprobs", "algorithm.old_logprobs", {"trainer": "recompute", "sampler": "rollout"}),
    Renamed("trainer.best_metric", "trainer.best_metric", METRICS),
    Renamed("trainer.divergence_limits", "trainer.divergence_limits", convert=with_new_metrics),
    *(
        Renamed(key, key, convert=_import_path)
        for key in ("algorithm.advantage_estimator", "algorithm.policy_loss", "reward.name", "data.curriculum")
    ),
    *(
        Renamed(key, key, convert=_checkpointing)
        for key in ("trainer.policy.fsdp.activation_checkpointing", "trainer.critic.fsdp.activation_checkpointing")
    ),
)
"""Keys of earlier versions with their successors, and keys whose values have changed."""

_SUCCESSORS = {one.old: one.new for one in RENAMED if one.old != one.new}
_VALUES = {one.new: one.values for one in RENAMED if one.values}


def successor_of(key: str) -> str | None:
    """Return what the key of an earlier version, or a key below a section that was renamed, is called today."""
    for old, new in _SUCCESSORS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def successor_of_value(key: str, value: Any) -> Any:
    """Return what the value that an earlier version had for `key` is called today; None: it is no such value."""
    return _VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config that an earlier version saved with the keys and values of today. `saved` stays."""
    config = _copy_of_sections(saved)
    for one in RENAMED:
        *sections, name = one.old.split(".")
        section: Any = config
        for outer in sections:
            section = section.get(outer) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            value = one.value(section.pop(name) if one.old != one.new else section[name])
            _set(config, one.new, value, replace=one.old == one.new)
    return config


def with_new_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command that an earlier version recorded with the keys and values of today."""
    return [_new_word(word) for word in words]


def _new_word(word: str) -> str:
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    new = successor_of(name) or name
    return key.removesuffix(name) + new + equals + (successor_of_value(new, value) or value) if equals else word


def _set(config: dict[str, Any], key: str, value: Any, replace: bool) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    if replace or name not in config:
        config[name] = value


def _copy_of_sections(config: Any) -> Any:
    return {k: _copy_of_sections(v) for k, v in config.items()} if isinstance(config, Mapping) else config
