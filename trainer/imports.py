"""Functions of the user's, by import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from trainer.errors import UserError


def import_function(path: str, key: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    """The function `package.module:function` (or `package.module.function`); modules may lie in the working directory.

    Args:
        key: the config key that names it, for errors.
        known: names that the key may have instead, for errors.

    Raises:
        UserError: there is none.
    """
    module_name, _, function_name = path.rpartition(":" if ":" in path else ".")
    if not (module_name and function_name):
        instead = f"choose one of {', '.join(known)}, or" if known else "must be"
        raise UserError(f"{key}={path}: {instead} an import path package.module:function")
    if os.getcwd() not in sys.path:  # a file beside where the command was given
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code runs here
        raise UserError(f"{key}={path}: cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{key}={path}: {module_name} has no function {function_name}")
    return function


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters that are keyword-only or have a default."""
    return tuple(p.name for p in _parameters(function) if p.kind is p.KEYWORD_ONLY or p.default is not p.empty)


def takes_any_option(function: Callable[..., Any]) -> bool:
    """It has a parameter `**options`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function))


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except ValueError:  # some functions in C do not tell
        return ()
