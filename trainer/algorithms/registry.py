"""Find a function by its name, or by its import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer.import_utils import import_function

Function = TypeVar("Function", bound=Callable[..., Any])


def compares_completions(function: Function) -> Function:
    """Mark an estimator that compares the completions of a prompt. They must be able to differ."""
    function.compares_completions = True  # type: ignore[attr-defined]
    return function


def needs_different_completions(function: Callable[..., Any]) -> bool:
    """Return whether `function` is decorated with `compares_completions`."""
    return getattr(function, "compares_completions", False)


def without_ratio(function: Function) -> Function:
    """Mark a policy loss that has no ratio of the policy to the old one."""
    function.without_ratio = True  # type: ignore[attr-defined]
    return function


def has_ratio(function: Callable[..., Any]) -> bool:
    """Return whether `function` is not decorated with `without_ratio`."""
    return not getattr(function, "without_ratio", False)


def resolve(registry: Mapping[str, Callable[..., Any]], name: str, key: str) -> Callable[..., Any]:
    """Return `registry[name]`, or the function at the import path `package.module:function`. Raises ValueError: names
    `key` and the known names."""
    if name in registry:
        return registry[name]
    return import_function(name, key, known=registry)
