"""Functions by name, or by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.plugins import import_function


def resolve(registry: Mapping[str, Callable[..., Any]], name: str, key: str) -> Callable[..., Any]:
    """`registry[name]`, or the function of an import path `package.module:function`.

    Args:
        key: the config key, for the error.

    Raises:
        ValueError: names the key and the known names.
    """
    if name in registry:
        return registry[name]
    return import_function(name, key, known=registry)
