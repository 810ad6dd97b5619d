"""Import the user's functions by import path, and inspect their parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from trainer.errors import UserError, describe_error, describe_with_place, did_you_mean
from trainer.process import signals
from trainer.process.startup import importing, noting_processes

Spec = TypeVar("Spec")


def import_function(path: str, key: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    """Import the function `package.module:function`.

    The module may be a file in the working directory.

    Args:
        key: the config key that names the function, for errors.
        known: built-in names that the key also accepts, for errors.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = path.partition(":")
    if not (module_name and function_name):
        instead = f"choose one of {', '.join(known)}, or" if known else "must be"
        module_name, _, function_name = path.rpartition(".")
        if module_name and function_name:
            meant = f"{module_name}:{function_name}"
            raise UserError(f"{key}={path}: an import path has a colon before the function; write {meant}")
        raise UserError(f"{key}={path}: {instead} an import path package.module:function")
    if module_name.endswith(".py") or "/" in module_name:
        name = os.path.normpath(module_name.removesuffix(".py")).replace("/", ".").lstrip(".")
        raise UserError(
            f"{key}={path}: an import path names a module, not a file; write {name}:{function_name} and give the "
            "command in the directory of the module"
        )
    if os.getcwd() not in sys.path:  # for a file in the directory in which the command was given
        sys.path.append(os.getcwd())
    import_numpy()
    here = os.getcwd().replace("{", "{{").replace("}", "}}")
    problem = f"{key}={path}: cannot be imported ({{}}), neither from {here} nor from a package"
    # A module that was imported before starts nothing, and to look at all processes of the machine takes milliseconds.
    noting = contextlib.nullcontext() if module_name in sys.modules else noting_processes()
    with importing(), noting, user_code(problem):
        module = importlib.import_module(module_name)
        names = [name for name in dir(module) if not name.startswith("_") and _is_value(getattr(module, name, None))]
        function = getattr(module, function_name, None)
    signals.SIGNALS.check()
    if not _is_value(function):
        meant = did_you_mean(function_name, names)
        kind = "class " if function_name[0].isupper() else "function "
        if function_name.isupper():
            kind = ""  # a value, such as a task or the spec of an engine
        raise UserError(f"{key}={path}: {module_name} has no {kind}{function_name}{meant and f'; {meant}'}")
    return function


def import_numpy() -> None:
    """Import numpy if it is there, before the user's modules do: its threads must block signals while Ray starts."""
    with signals.SIGNALS.blocked(), contextlib.suppress(ImportError):
        import numpy  # noqa: F401


def _is_value(found: Any) -> bool:
    """Return whether this is what an import path may name: a function, a class, or a spec."""
    return callable(found) or dataclasses.is_dataclass(found)


def import_spec(path: str, key: str, kind: type[Spec], known: Iterable[str], usual: str) -> Spec:
    """Return the value of class `kind` at an import path, or for a class of the user the `kind` with that path. Raises
    UserError: it is neither, but must be `usual`."""
    found: Any = import_function(path, key, known)
    if isinstance(found, kind):
        return found
    if not isinstance(found, type):
        raise UserError(f"{key}={path}: is a {type(found).__name__}; it must be {usual}")
    return kind(path)  # type: ignore[call-arg]


def is_agent(kind: Any) -> bool:
    """Return whether what `environment.name` names is the class of an agent, which has `run`, and no environment."""
    return inspect.isclass(kind) and hasattr(kind, "run") and not hasattr(kind, "step")


def digest_code(path: str) -> str:
    """Return a digest of the file that an import path `package.module:function` names; empty if there is none. Of what
    the module imports, nothing is in it, but the version of the package if the module is installed."""
    module, _, function = path.partition(":")
    if not (function.isidentifier() and all(name.isidentifier() for name in module.split("."))):
        return ""
    with contextlib.suppress(UserError, OSError), user_code("{}"):
        spec = importlib.util.find_spec(module)
        if spec is None or not os.path.isfile(spec.origin or ""):
            return ""
        with open(spec.origin, "rb") as file:
            content = hashlib.blake2b(file.read(), digest_size=16)
        if "site-packages" in spec.origin:
            for name in sorted({*importlib.metadata.packages_distributions().get(module.partition(".")[0], ())}):
                content.update(f"{name} {importlib.metadata.version(name)}".encode())
        return content.hexdigest()
    return ""


def is_import_path(name: str) -> bool:
    return ":" in name


@contextmanager
def user_code(message: str, has_place: bool = False) -> Iterator[None]:
    """Turn everything that user code in the block raises, even SystemExit and KeyboardInterrupt, into a UserError.

    Args:
        message: the error message, with `{}` as the placeholder for the error.
        has_place: the message also names the innermost line of the user's own code.
    """
    try:
        yield
    except BaseException as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == signals.__name__:  # raised by a signal, not by user code
            raise
        described = describe_with_place(error) if has_place else describe_error(error)
        raise UserError(message.format(described)) from error


def problem_of_method(kind: Any, name: str, arguments: Sequence[str]) -> str | None:
    """Return why a call of the method `name` of the class `kind` with these arguments would fail, or None, as far as
    known."""
    method = inspect.getattr_static(kind, name, None)
    if not inspect.isfunction(method):  # no plain method: what it takes is not known
        return None
    try:
        inspect.signature(method, follow_wrapped=False).bind(kind, *arguments)  # a decorator may pass more
    except TypeError as error:
        return f"{name}: {error}; it gets {', '.join(arguments) or 'nothing'}"
    return None


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the function's parameters that are keyword-only or have a default."""
    return tuple(p.name for p in _parameters(function) if p.kind is p.KEYWORD_ONLY or p.default is not p.empty)


def parameter_names(function: Callable[..., Any], follow_wrapped: bool = True) -> tuple[str, ...]:
    """Return the names of all parameters of the function; of a decorated one, those of the function below if
    `follow_wrapped`."""
    return tuple(parameter.name for parameter in _parameters(function, follow_wrapped))


def default_of(function: Callable[..., Any], name: str) -> Any:
    """Return the default of the function's parameter `name`, or None if there is none."""
    return next((p.default for p in _parameters(function) if p.name == name and p.default is not p.empty), None)


def takes_any_option(function: Callable[..., Any]) -> bool:
    """Return whether the function has a parameter `**options`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function))


def _parameters(function: Callable[..., Any], follow_wrapped: bool = True) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values()
    except ValueError:  # some functions in C have no signature
        return ()
