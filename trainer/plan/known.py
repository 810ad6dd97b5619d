"""The models whose shapes come with this project, so that a plan needs no network. Cheap to import."""

from __future__ import annotations

import os

_SHAPES = os.path.join(os.path.dirname(__file__), "shapes")
_ENDINGS = ("-instruct", "-base", "-chat", "-it")
_SAME_SHAPES = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.3-70b",
    "llama-3.1-70b": "llama-3.3-70b",
}
"""Models with the matrices of another one."""


def known_models() -> list[str]:
    """Return the names of the models."""
    return sorted(name.removesuffix(".json") for name in os.listdir(_SHAPES) if name.endswith(".json"))


def known_file(path: str) -> str | None:
    """Return the `config.json` of the model that an id, such as `Qwen/Qwen3-8B`, names; None: it is not known."""
    name = path.rstrip("/").rpartition("/")[2].casefold()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    name = name.removeprefix("meta-")
    name = _SAME_SHAPES.get(name, name)
    return os.path.join(_SHAPES, f"{name}.json") if name in known_models() else None
