"""The files of deploy/: what they say, and the commands of the trainer in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE, KUBERAY, SKYPILOT = (ROOT / f"deploy/{name}.yaml" for name in ("compose", "kuberay", "skypilot"))


def read_yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace the variables of a Compose file: `${NAME}`, `${NAME:-default}`, `${NAME:?message}`, and `$$`."""

    def value(found: re.Match[str]) -> str:
        name, sign, rest = found[1], found[2], found[3]
        assert name in values or sign == ":-", f"{name} has no value"
        return values.get(name) or (rest if sign == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text.replace("$$", "$"))


def compose_words(service: str, **values: str) -> list[str]:
    """The words that a service of the Compose file gives to the image."""
    return shlex.split(expand(read_yaml(COMPOSE)["services"][service]["command"], values))
