"""Keep what the comparison of a model with its own class has found, by all that it depends on. Cheap to import."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

import trainer
from trainer.config import ModelConfig, RoleSpec
from trainer.files.atomic_io import digest_bytes, digest_file, write_file
from trainer.models.files import cache_directory


@dataclass
class Verdict:
    """What the comparison of a model with its own class has found."""

    problem: str | None = None
    """What differs, and the key that trains the model rightly. None: nothing."""
    not_compared: list[str] = field(default_factory=list)
    difference: float = 0.0
    """The largest one between the rows and the model's own class: of log-probs in nats, else of hidden states."""
    limit: float = 0.0
    other_experts: int = 0
    """Tokens for which rounding has chosen other experts."""
    seconds: float = 0.0


def keep_verdict(file: str, verdict: Verdict) -> None:
    """Write `verdict` to `file`, if the directory can be written. Else the next start compares again."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(file), exist_ok=True)
        write_file(file, json.dumps(asdict(verdict), indent=1))


def read_verdict(file: str) -> Verdict | None:
    """Return the verdict that is kept in `file`. None: there is none."""
    try:
        with open(file, "rb") as stream:
            return Verdict(**json.loads(stream.read()))
    except (OSError, ValueError, TypeError):
        return None


def verdict_file(
    model: ModelConfig,
    path: str,
    device: str,
    sizes: Mapping[str, int],
    spec: RoleSpec,
    pack: bool,
    longest: int | None,
) -> str:
    """Return the name of the file of a verdict: a digest of what the verdict depends on."""
    with os.scandir(path) as entries:
        files = [(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file()]
    parts = [
        digest_file(os.path.join(path, "config.json")),
        *sorted(files),
        *(model.attn_implementation, model.trust_remote_code, pack, longest, device, spec.head),
        *(spec.sharding.param_dtype, spec.has_adapters),
        sorted((name, size > 1) for name, size in sizes.items()),
        *(version("torch"), version("transformers"), _code()),
    ]
    name = digest_bytes(repr(parts).encode())
    return os.path.join(cache_directory(model), "model_checks", f"{name}.json")


@functools.cache
def _code() -> str:
    """Return a digest of the code that computes what models do."""
    found = []
    for package in ("models", "parallel"):
        directory = os.path.join(os.path.dirname(trainer.__file__), package)
        names = sorted(name for name in os.listdir(directory) if name.endswith(".py"))
        found += [digest_file(os.path.join(directory, name)) for name in names]
    return digest_bytes(" ".join(found).encode())
