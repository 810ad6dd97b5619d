"""The options of the built-in functions of `trainer.algorithms`, read from their signatures without importing torch."""

from __future__ import annotations

import ast
import functools
import os
from typing import Any

_FILES = {"advantage_estimator": "advantages.py", "policy_loss": "losses.py"}
_ALGORITHMS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "algorithms")


def built_in_defaults(key: str, name: str | None) -> dict[str, Any]:
    """The keyword-only parameters that have a default, of the function `name` that `algorithm.<key>` chooses.

    Empty for a function that is given by import path.
    """
    return _defaults(_FILES[key]).get(name or "", {})


@functools.cache
def _defaults(file: str) -> dict[str, dict[str, Any]]:
    with open(os.path.join(_ALGORITHMS, file), encoding="utf-8") as source:
        functions = [node for node in ast.parse(source.read()).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {
            parameter.arg: ast.literal_eval(default)
            for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if default is not None
        }
        for function in functions
    }
