"""The parts of a checkpoint: what each of them saves and restores."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.storage import Storage
from trainer.config import Config
from trainer.documents import parse_yaml


def read_config(checkpoint: str) -> dict[str, Any]:
    """The resolved config that a checkpoint was saved with.

    Raises:
        DamagedError: `config.yaml` is missing, or is no mapping of sections.
    """
    try:
        return parse_yaml(Storage(checkpoint).read("config.yaml"), {str: dict})
    except OSError as error:
        raise DamagedError(f"{checkpoint}: config.yaml cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise DamagedError(f"{checkpoint}: config.yaml is damaged ({error})") from error


def config_yaml(cfg: Config) -> bytes:
    """The content of `config.yaml`: the resolved config."""
    import yaml

    return yaml.safe_dump(asdict(cfg), sort_keys=False).encode()
