"""What a config must satisfy before anything starts: ranges, choices, and what must hold between keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from trainer.config import (
    ADVANTAGE_OPTIONS,
    AGGREGATIONS,
    COMPARE_GROUPS,
    GENERATORS,
    KL_ESTIMATORS,
    LOSS_OPTIONS,
    MAX_SERVED_LORA_RANK,
    OPEN_SECTIONS,
    RESUME_LOAD,
    Config,
    CriticConfig,
    LoraConfig,
    ReferenceConfig,
    valid_keys,
)
from trainer.errors import UserError
from trainer.metrics.names import METRICS

_POSITIVE = 1e-9
_LOWEST_TEMPERATURE = 0.01  # vLLM takes this in place of anything lower
_OPTIMIZERS = ("trainer.policy.optimizer", "trainer.critic.optimizer", "sft.optimizer")
_ROLES = ("trainer.policy", "trainer.critic", "trainer.reference")

AT_LEAST: dict[float, tuple[str, ...]] = {
    1: (
        "trainer.total_steps", "trainer.num_workers", "trainer.replicas", "trainer.train_batch_size",
        "trainer.mini_batch_size", "trainer.update_epochs", "trainer.max_tokens_per_micro_batch",
        "trainer.lock_timeout_s", "rollout.num_engines", "rollout.tensor_parallel_size", "rollout.n",
        "rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.max_num_seqs", "rollout.kv_cache_mb",
        "algorithm.max_sample_batches", "algorithm.pass_k", "reward.num_processes", "sft.steps", "sft.batch_size",
        "sft.max_length", "trainer.policy.lora.rank", "trainer.critic.lora.rank",
        *(f"{optimizer}.schedule_steps" for optimizer in _OPTIMIZERS),
        *(f"model.tiny.{name}" for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads",
                                            "num_kv_heads", "head_dim", "max_position_embeddings")),
    ),
    0: (
        "trainer.seed", "trainer.master_port", "trainer.critic.warmup_steps", "trainer.keep_best",
        "trainer.ckpt_failures_allowed", "trainer.resume_tolerance", "model.tiny.seed", "rollout.val_n",
        "rollout.top_p", "logger.samples",
        "algorithm.kl_coef", "algorithm.entropy_coef", "algorithm.value_clip", "algorithm.overlong_buffer",
        "algorithm.overlong_factor", "algorithm.rollout_correction_low", "algorithm.clip_low", "algorithm.clip_high",
        "algorithm.cov_kl_coef", "algorithm.gamma", "algorithm.lam", "algorithm.cov_frac",
        *(f"{optimizer}.{name}" for optimizer in _OPTIMIZERS
          for name in ("lr", "weight_decay", "max_grad_norm", "warmup_steps", "min_lr_ratio")),
    ),
    0.001: ("trainer.worker_timeout_s", "trainer.silence_timeout_s", "trainer.call_timeout_s", "reward.timeout_s",
            "trainer.mean_time_between_failures"),
    _POSITIVE: (
        "algorithm.tau_pos", "algorithm.tau_neg", "algorithm.max_weight", "algorithm.kl_target",
        "algorithm.kl_horizon", "algorithm.rollout_correction_high", "sft.max_weight", "trainer.policy.lora.alpha",
        "trainer.critic.lora.alpha", "rollout.gpu_memory_utilization",
    ),
}  # fmt: skip
"""Least values; null is always allowed where the schema allows it."""

AT_LEAST_1_OR_OFF = (
    "trainer.val_interval", "trainer.hf_save_interval", "trainer.keep_every", "trainer.max_ckpts_to_keep",
    "data.train_size", "data.val_size", "rollout.top_k", "algorithm.ref_update_interval",
)  # fmt: skip
"""-1 turns these off."""

AT_MOST: dict[float, tuple[str, ...]] = {
    1: (
        "algorithm.gamma",
        "algorithm.lam",
        "algorithm.cov_frac",
        "rollout.top_p",
        "rollout.gpu_memory_utilization",
        "trainer.resume_tolerance",
        *(f"{optimizer}.min_lr_ratio" for optimizer in _OPTIMIZERS),
    ),
    100: ("rollout.temperature",),
    65535: ("trainer.master_port",),
    1_000_000: (  # days in seconds, years in minutes; the clocks of the libraries end not far above
        "trainer.worker_timeout_s",
        "trainer.lock_timeout_s",
        "reward.timeout_s",
        "trainer.ckpt_interval_minutes",
        "trainer.mean_time_between_failures",
    ),
    2**32 - 1: ("trainer.seed", "model.tiny.seed"),  # vLLM gives its seed to NumPy, which takes 32 bits
}
"""Greatest values."""

LARGEST_INTEGER = 2**31 - 1
"""The greatest value of all other whole numbers."""

LONGEST_NAME = 200

CHOICES: dict[str, tuple[str | None, ...]] = {
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.resume_mode": (None, "none", "latest", "from_path"),
    "trainer.verify_checkpoint": ("hash", "size", "off"),
    "trainer.best_mode": ("max", "min"),
    "trainer.on_resume_mismatch": ("warn", "stop", "fallback"),
    "trainer.hf_save_lora": ("merged", "adapter"),
    **{f"{optimizer}.scheduler": ("constant", "cosine") for optimizer in _OPTIMIZERS},
    **{f"{role}.fsdp.param_dtype": ("auto", "bfloat16", "float32") for role in _ROLES},
    **{f"{role}.fsdp.reduce_dtype": ("float32", "bfloat16") for role in _ROLES},
    "algorithm.kl_controller": ("fixed", "adaptive"),
    "algorithm.rollout_correction": (None, "tis", "mis"),
    "algorithm.rollout_correction_level": ("token", "arithmetic", "geometric", "product"),
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "model.attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "data.generator": (None, *GENERATORS),
    "rollout.engine": ("vllm", "transformers"),
    "rollout.dtype": ("auto", "bfloat16", "float32"),
    "rollout.weight_sync": ("auto", "shared_memory", "broadcast"),
    "rollout.lora_sync": ("auto", "merged", "adapter"),
    "sft.source": ("examples", "rollouts"),
    "logger.wandb.mode": ("online", "offline", "off"),
}


def validate(cfg: Config) -> None:
    """Check ranges, choices and contradictions.

    Raises:
        UserError: one sentence that names the key, its value and what is valid.
    """
    check = _Check(cfg)
    _every_key(check)
    _single_keys(check)
    _names(check)
    _trainer(check)
    _algorithm(check)
    _options(check)
    _roles(check)
    _lora(check)
    _rollout_and_model(check)
    _data(check)
    _sft(check)


class _Check:
    def __init__(self, cfg: Config):
        self.cfg = cfg

    def value(self, key: str) -> Any:
        value: Any = self.cfg
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def fail(self, key: str, problem: str) -> NoReturn:
        shown = str(self.value(key))
        raise UserError(f"{key}={shown if shown.isprintable() else ascii(shown)}: {problem}")

    def at_least(self, low: float, key: str, also: float | None = None) -> None:
        value = self.value(key)
        if value is not None and value != also and not value >= low:  # written so that NaN fails
            bound = "above 0" if low == _POSITIVE else f"at least {low:g}"
            self.fail(key, f"must be {bound}" + ("" if also is None else f" (or {also:g})"))

    def at_most(self, high: float, key: str) -> None:
        value = self.value(key)
        if value is not None and value > high:
            self.fail(key, f"must be at most {high}")

    def one_of(self, key: str, choices: tuple[str | None, ...]) -> None:
        if self.value(key) not in choices:
            self.fail(key, f"choose one of {', '.join('null' if c is None else c for c in choices)}")

    def changed(self, section: str, default: Any) -> Iterator[str]:
        """Names of the leaf keys of a section that are not as in `default`."""
        value = self.value(section)
        for f in dataclasses.fields(value):
            ours, theirs = getattr(value, f.name), getattr(default, f.name)
            if dataclasses.is_dataclass(ours):
                yield from self.changed(f"{section}.{f.name}", theirs)
            elif ours != theirs:
                yield f"{section}.{f.name}"


def _every_key(check: _Check) -> None:
    """What no value of its type may be, whatever the key."""
    for key in _leaf_keys(check.cfg):
        for value in _scalars(check.value(key)):
            if isinstance(value, float) and not math.isfinite(value):
                check.fail(key, "must be a finite number")
            if key in OPEN_SECTIONS:
                continue
            if isinstance(value, int) and abs(value) > LARGEST_INTEGER and key not in AT_MOST[2**32 - 1]:
                check.fail(key, f"must be at most {LARGEST_INTEGER}, negative or not")
            if isinstance(value, str):
                if not value.strip():
                    check.fail(key, "is empty; give a value, or drop the key")
                if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
                    check.fail(key, "holds a character that no file or program takes")


def _leaf_keys(section: Any, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(section):
        value, key = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            yield from _leaf_keys(value, f"{key}.")
        else:
            yield key


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value


def _names(check: _Check) -> None:
    """Names of runs, paths and metrics, and what `trainer.allow_config_change` names."""
    t, fail = check.cfg.trainer, check.fail
    name = t.run_name
    plain = name not in (".", "..") and "/" not in name and name.isprintable() and name == name.strip()
    if not plain or len(name.encode()) > LONGEST_NAME:
        fail(
            "trainer.run_name",
            "must be a plain name without slashes, control characters and spaces around it, at most "
            f"{LONGEST_NAME} bytes; trainer.run_dir takes a path",
        )
    for key in ("run_dir", "ckpt_path", "export_path", "resume_path"):
        if (getattr(t, key) or "").startswith("~"):
            fail(f"trainer.{key}", "begins with ~, which only a shell replaces; write the whole path")
    if t.best_metric not in METRICS:
        fail("trainer.best_metric", "no such metric; docs/metrics.md lists them")
    keys = set(_leaf_keys(check.cfg))
    for name in t.allow_config_change:
        if name not in keys and not any(key.startswith(f"{name}.") for key in keys):
            open_section = next((section for section in OPEN_SECTIONS if name.startswith(f"{section}.")), None)
            valid = ", ".join(valid_keys(name.rpartition(".")[0]) or valid_keys())
            hint = f"name {open_section} as a whole" if open_section else f"valid are {valid}"
            fail("trainer.allow_config_change", f"there is no key or section {name}; {hint}")


def _single_keys(check: _Check) -> None:
    for low, keys in AT_LEAST.items():
        for key in keys:
            check.at_least(low, key)
    for key in AT_LEAST_1_OR_OFF:
        check.at_least(1, key, also=-1)
    for high, keys in AT_MOST.items():
        for key in keys:
            check.at_most(high, key)
    check.at_least(_LOWEST_TEMPERATURE, "rollout.temperature", also=0)
    for key, choices in CHOICES.items():
        check.one_of(key, choices)
    for key, table in (("advantage_estimator", ADVANTAGE_OPTIONS), ("policy_loss", LOSS_OPTIONS)):
        if ":" not in check.value(f"algorithm.{key}"):
            check.one_of(f"algorithm.{key}", tuple(table))


def _trainer(check: _Check) -> None:
    t, fail = check.cfg.trainer, check.fail
    if t.train_batch_size % t.mini_batch_size:
        fail("trainer.train_batch_size", f"must be a multiple of trainer.mini_batch_size={t.mini_batch_size}")
    for optimizer in _OPTIMIZERS:
        betas = check.value(f"{optimizer}.betas")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            fail(f"{optimizer}.betas", "must be two numbers, each at least 0 and below 1")
        if not check.value(f"{optimizer}.eps") > 0:
            fail(f"{optimizer}.eps", "must be above 0")
    if t.num_workers % t.replicas:
        fail("trainer.num_workers", f"must be a multiple of trainer.replicas={t.replicas}")
    if t.ckpt_interval != "auto":
        if not isinstance(t.ckpt_interval, int):
            fail("trainer.ckpt_interval", "must be a number of steps, -1 or auto")
        check.at_least(1, "trainer.ckpt_interval", also=-1)
    check.at_least(0.001, "trainer.ckpt_interval_minutes", also=-1)
    if t.resume_mode == "from_path" and not t.resume_path:
        fail("trainer.resume_mode", "needs trainer.resume_path, a global_step_N directory")
    if t.resume_path and t.resume_mode != "from_path":
        fail("trainer.resume_path", "needs trainer.resume_mode=from_path")
    if t.resume_load:
        if t.resume_mode != "from_path":
            fail("trainer.resume_load", "needs trainer.resume_mode=from_path: a run continues with all of its state")
        if not set(t.resume_load) <= set(RESUME_LOAD):
            fail("trainer.resume_load", f"may name {', '.join(RESUME_LOAD)}")
    for key in ("trainer.keep_best", "trainer.keep_every"):
        if check.value(key) > 0 and t.max_ckpts_to_keep < 0:
            fail(key, "all checkpoints are kept; set trainer.max_ckpts_to_keep too")
    if t.keep_best > 0 and t.best_metric.startswith("val/") and t.val_interval < 1:
        fail("trainer.keep_best", f"trainer.best_metric={t.best_metric} is never measured with trainer.val_interval=-1")
    if "://" in t.ckpt_path:
        fail("trainer.ckpt_path", "must be a directory that all ranks see; object stores are not supported yet")
    if t.stop_at is not None:
        try:
            datetime.fromisoformat(t.stop_at).timestamp()
        except (ValueError, OverflowError):
            fail("trainer.stop_at", "must be a time such as 2026-11-21T18:00")


def _algorithm(check: _Check) -> None:
    t, a, r, fail = check.cfg.trainer, check.cfg.algorithm, check.cfg.rollout, check.fail
    if a.dual_clip is not None and not a.dual_clip > 1:
        fail("algorithm.dual_clip", "must be above 1")
    if a.advantage_estimator in COMPARE_GROUPS:
        if r.n < 2:
            fail("rollout.n", f"algorithm.advantage_estimator={a.advantage_estimator} compares completions of a "
                 "prompt and needs at least 2")  # fmt: skip
        if r.temperature == 0:
            fail("rollout.temperature", "greedy completions of a prompt are all equal; "
                 f"{a.advantage_estimator} needs a value above 0")  # fmt: skip
    if a.rollout_correction == "mis" and a.rollout_correction_low > a.rollout_correction_high:
        fail("algorithm.rollout_correction_low", "exceeds algorithm.rollout_correction_high="
             f"{a.rollout_correction_high}, which leaves no token to learn from")  # fmt: skip
    low, high = (1.0 if a.cov_low is None else a.cov_low), (5.0 if a.cov_high is None else a.cov_high)
    if low > high:
        key = "algorithm.cov_low" if a.cov_high is None else "algorithm.cov_high"
        fail(key, f"leaves no room from cov_low={low} to cov_high={high}")
    if a.advantage_estimator == "grpo_passk" and (a.overlong_buffer > 0 or (a.kl_in == "reward" and a.kl_coef > 0)):
        fail("algorithm.advantage_estimator", "grpo_passk asks whether a reward reaches 1, which one with a penalty "
             "taken off does not; use algorithm.kl_in=loss and algorithm.overlong_buffer=0")  # fmt: skip
    if a.pass_k is not None and a.pass_k > r.n:
        fail("algorithm.pass_k", f"exceeds rollout.n={r.n}")
    if a.kl_in == "reward" and a.kl_estimator.endswith("+"):
        fail("algorithm.kl_estimator", "a straight-through estimator only differs in its gradient, and a reward has "
             "none; choose k1, k2, k3 or abs")  # fmt: skip
    if a.kl_controller == "adaptive":
        if a.kl_coef == 0:
            fail("algorithm.kl_controller", "needs algorithm.kl_coef above 0 to start from")
        if a.kl_horizon < t.train_batch_size * r.n:
            fail("algorithm.kl_horizon", f"must be at least the {t.train_batch_size * r.n} completions of one step")
    if a.overlong_buffer > r.max_response_tokens:
        fail("algorithm.overlong_buffer", f"exceeds rollout.max_response_tokens={r.max_response_tokens}")
    if a.dynamic_sampling and r.n < 2:
        fail("rollout.n", "algorithm.dynamic_sampling compares completions of a prompt and needs at least 2")
    if a.dynamic_sampling and r.temperature == 0:
        fail("rollout.temperature", "greedy completions of a prompt are all equal, and algorithm.dynamic_sampling "
             "would pass over every one")  # fmt: skip


def _options(check: _Check) -> None:
    """Options that the chosen functions do not take are errors, not ignored."""
    a = check.cfg.algorithm
    imported = ":" in a.advantage_estimator or ":" in a.policy_loss
    taken = {*ADVANTAGE_OPTIONS.get(a.advantage_estimator, ()), *LOSS_OPTIONS.get(a.policy_loss, ())}
    for table, key in ((ADVANTAGE_OPTIONS, "advantage_estimator"), (LOSS_OPTIONS, "policy_loss")):
        for name in sorted({option for options in table.values() for option in options}):
            if getattr(a, name) is not None and name not in taken and not imported:
                takes = table[getattr(a, key)]
                check.fail(f"algorithm.{name}", f"algorithm.{key}={getattr(a, key)} does not take it; "
                           + (f"it takes {', '.join(takes)}" if takes else "it takes no option"))  # fmt: skip
    if a.options and not imported:
        check.fail("algorithm.options", "is for functions given by import path")


def _roles(check: _Check) -> None:
    """Keys of roles that the run does not have."""
    cfg, fail = check.cfg, check.fail
    t, a = cfg.trainer, cfg.algorithm
    if t.critic.warmup_steps >= t.total_steps:
        fail("trainer.critic.warmup_steps", f"leaves no step of trainer.total_steps={t.total_steps} for the policy")
    if not cfg.has_critic:
        for key in check.changed("trainer.critic", CriticConfig()):
            fail(key, f"algorithm.advantage_estimator={a.advantage_estimator} has no critic; choose algorithm=ppo or "
                 "drop the key")  # fmt: skip
    if not cfg.has_reference or cfg.reference_is_base:
        reason = (
            "with trainer.policy.lora the policy without its adapters is the reference; drop the key"
            if cfg.has_reference
            else "there is no reference model with algorithm.kl_coef=0; raise it or drop the key"
        )
        for key in check.changed("trainer.reference", ReferenceConfig()):
            fail(key, reason)
    if a.ref_update_interval > 0:
        if not cfg.has_reference:
            fail("algorithm.ref_update_interval", "there is no reference model with algorithm.kl_coef=0")
        if not t.colocate:
            fail("algorithm.ref_update_interval", "needs trainer.colocate=true: the reference takes the weights of the "
                 "policy beside it")  # fmt: skip


def _lora(check: _Check) -> None:
    t, r, fail = check.cfg.trainer, check.cfg.rollout, check.fail
    for section, lora in (("trainer.policy.lora", t.policy.lora), ("trainer.critic.lora", t.critic.lora)):
        if lora.rank is None:
            for key in check.changed(section, LoraConfig()):
                fail(key, f"needs {section}.rank")
    if t.policy.lora.rank is None:
        for key, default in (("rollout.lora_sync", "auto"), ("trainer.hf_save_lora", "merged")):
            if check.value(key) != default:
                fail(key, "needs trainer.policy.lora.rank")
    elif r.lora_sync == "adapter":
        if r.engine != "vllm":
            fail("rollout.lora_sync", f"rollout.engine={r.engine} serves no adapters; choose merged or rollout=vllm")
        if t.policy.lora.rank > MAX_SERVED_LORA_RANK:
            fail("rollout.lora_sync", f"vLLM serves adapters up to rank {MAX_SERVED_LORA_RANK}; choose merged")


def _rollout_and_model(check: _Check) -> None:
    r, tiny, fail = check.cfg.rollout, check.cfg.model.tiny, check.fail
    if r.top_p == 0:
        fail("rollout.top_p", "must be above 0 (1 keeps all tokens)")
    if r.tensor_parallel_size > 1 and r.engine != "vllm":
        fail("rollout.tensor_parallel_size", f"rollout.engine={r.engine} runs on one device; choose vllm")
    if r.engine_args and r.engine != "vllm":
        fail("rollout.engine_args", f"rollout.engine={r.engine} takes none; choose vllm")
    if tiny.head_dim % 2:
        fail("model.tiny.head_dim", "must be even: positions turn pairs of its numbers")
    if tiny.num_heads % tiny.num_kv_heads:
        fail("model.tiny.num_kv_heads", f"must divide model.tiny.num_heads={tiny.num_heads}")
    if check.cfg.model.path is None:
        if check.cfg.sft.max_length > tiny.max_position_embeddings:
            fail("sft.max_length", "exceeds model.tiny.max_position_embeddings")
        if r.max_prompt_tokens + r.max_response_tokens > tiny.max_position_embeddings:
            fail("rollout.max_response_tokens", "with rollout.max_prompt_tokens it exceeds "
                 f"model.tiny.max_position_embeddings={tiny.max_position_embeddings}")  # fmt: skip


def _data(check: _Check) -> None:
    d, fail = check.cfg.data, check.fail
    if d.generator:
        if d.train_files or d.val_files:
            fail("data.generator", "data.train_files and data.val_files cannot be combined with a generator; "
                 "choose data=files or drop them")  # fmt: skip
        for key in ("data.train_size", "data.val_size"):
            if check.value(key) < 1:
                fail(key, "a generator needs a number of examples")
        known = {"arithmetic": ("max_value",), "reverse_text": ("min_letters", "max_letters")}[d.generator]
        for name in d.generator_args:
            if name not in known:
                fail("data.generator_args", f"data.generator={d.generator} takes {', '.join(known)}, not {name}")
    elif not d.train_files:
        fail("data.train_files", "name at least one file, or choose a data group such as data=arithmetic")
    elif not d.val_files and check.cfg.trainer.val_interval > 0:
        fail("trainer.val_interval", "needs data.val_files; name some or set it to -1")
    if d.curriculum is not None and ":" not in d.curriculum:
        fail("data.curriculum", "must be an import path package.module:function")


def _sft(check: _Check) -> None:
    s, files, fail = check.cfg.sft, check.cfg.data.train_files, check.fail
    if s.source == "rollouts":
        if not files:
            fail("sft.source", "needs data.train_files, the files that logger.rollouts=true makes a run write")
    else:
        for key in ("sft.min_reward", "sft.max_weight"):
            if check.value(key) is not None:
                fail(key, "is for rollouts; set sft.source=rollouts or drop the key")
    if not s.train_on:
        fail("sft.train_on", "names no role, so nothing would be learnt")
    if s.weights:
        if len(s.weights) != len(files):
            fail("sft.weights", f"must name one weight for each of the {len(files)} data.train_files")
        if not all(0 < weight < math.inf for weight in s.weights):
            fail("sft.weights", "must be numbers above 0")
