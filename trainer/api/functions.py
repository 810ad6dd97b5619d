"""Functions that a caller passes to `train`, on their way to the processes of the run.

A function of a module travels as its import path. A function of a script or a notebook, which no other process can
import, travels by value: cloudpickle writes it into the run directory, as a module that can be imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import TaskSpec
from trainer.errors import UserError, describe_error
from trainer.files.atomic_io import write_file
from trainer.run.next_command import PASSED_FUNCTIONS

_DIRECTORY = "functions"
_MODULE = '''"""A function that was passed to `trainer.train`, as cloudpickle has written it."""

import pathlib

import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())
'''


def describe_function(parameter: str, function: Callable[..., Any] | str) -> tuple[str, bytes | None]:
    """Return the import path of a function, and its pickle if no module holds it.

    Raises:
        UserError: `function` is no function, or it holds something that other processes cannot get.
    """
    if isinstance(function, str):
        return function, None
    if not callable(function) and not isinstance(function, TaskSpec):
        raise UserError(f"{parameter}: must be a function or the name of one, not {type(function).__name__}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    spec = getattr(sys.modules.get(module or ""), "__spec__", None)
    if module != "__main__" and spec is not None and getattr(sys.modules[module], name, None) is function:
        return f"{module}:{name}", None
    plain = getattr(function, "__name__", "")
    plain = plain if plain.isidentifier() else parameter  # a lambda, or an object with `__call__`
    import cloudpickle

    try:
        return path_of(parameter, plain), cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"{parameter}={plain}: other processes cannot get this function ({describe_error(error)}); let it open or "
            "make what it needs when it is called, or move it to a module"
        ) from error


def path_of(parameter: str, name: str) -> str:
    """Return the import path of the function `name` that was passed by value."""
    return f"{PASSED_FUNCTIONS}.{parameter}:{name}"


def write_functions(run_dir: str, pickles: Mapping[str, tuple[str, bytes]]) -> None:
    """Write pickled functions into the run directory, and let this process and all that it starts import them."""
    if not pickles:
        return
    digest = hashlib.sha256(repr(sorted(pickles.items())).encode()).hexdigest()[:16]
    root = os.path.abspath(os.path.join(run_dir, _DIRECTORY, digest))
    package = os.path.join(root, PASSED_FUNCTIONS)
    try:
        os.makedirs(package, exist_ok=True)
        os.chmod(os.path.join(run_dir, _DIRECTORY), 0o700)  # the functions hold what they have captured
        for parameter, (name, data) in pickles.items():
            write_file(os.path.join(package, f"{parameter}.pkl"), data)
            write_file(os.path.join(package, f"{parameter}.py"), _MODULE.format(name=name))
    except OSError as error:
        raise UserError(f"trainer.run_dir={run_dir}: cannot be written ({error.strerror}); choose another") from error
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
