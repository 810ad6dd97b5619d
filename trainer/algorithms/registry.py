"""Functions by name, or by import path, and the options that each takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def resolve(registry: Mapping[str, Callable[..., Any]], name: str, key: str) -> Callable[..., Any]:
    """`registry[name]`, or the function of an import path `package.module:function`.

    Args:
        key: the config key, for the error.

    Raises:
        ValueError: names the key and the known names.
    """
    if name in registry:
        return registry[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{key}={name}: choose one of {', '.join(registry)}, or package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}={name}: cannot be imported ({error})") from error
    if not callable(function):
        raise ValueError(f"{key}={name}: is not a function")
    return function


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
