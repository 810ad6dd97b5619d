"""What an evaluation reads of the config: a task that starts no ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NoReturn

from trainer.config import TaskSpec
from trainer.config.schema import KEYS, MAPPINGS, NAME, SECTIONS
from trainer.errors import UserError

PATH = f"{__name__}:EVALUATION"
"""The value of `trainer.task`."""
READ = (
    *(f"trainer.{name}" for name in ("task", "run_name", "run_dir", "seed", "device", "deterministic", "ray_address")),
    *(f"trainer.{name}" for name in ("placement_timeout_s", "max_restarts", "profile", "policy.lora.*")),
    *(f"model.{name}" for name in ("path", "cache_dir", "check", "trust_remote_code", "chat_template*")),
    *("reward.*", "environment.*"),
    *(f"data.{name}" for name in ("val_*", "prompt_key", "answer_key", "messages_key", "synthetic*", "train_size")),
    "data.system_prompt",
    *(f"rollout.{name}" for name in ("engine*", "urls", "num_engines", "tensor_parallel_size")),
    *(f"rollout.{name}" for name in ("max_*_tokens", "temperature", "top_*", "val_n", "dtype", "max_logprob_diff")),
    *(f"rollout.{name}" for name in ("max_num_seqs", "gpu_memory_utilization")),
    *("rollout.lora_sync", "rollout.journal", "logger.trace*"),
)
"""The keys that an evaluation reads. A new key is refused until it stands here."""


def _is_read(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in READ)


def _unused() -> tuple[str, ...]:
    """Return patterns of all keys that are not read, and of the sections and mappings of which no key is."""
    keys = [key for key in KEYS if not _is_read(key) and NAME not in key]
    whole = [name for name in (*SECTIONS, *MAPPINGS) if name and NAME not in name]
    none = [f"{name}.*" for name in whole if not any(_is_read(key) for key in KEYS if f"{key}.".startswith(f"{name}."))]
    return (*keys, *none)


def _build(config: Any) -> NoReturn:
    raise UserError(f"trainer.task={PATH}: is no training; give the command trainer evaluate")


EVALUATION = TaskSpec(_build, generates=True, trains=False, unused=_unused())
"""It generates with the weights that it is given, and changes none."""
