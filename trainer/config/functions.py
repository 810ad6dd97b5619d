"""Options and inputs of the functions of `trainer.algorithms`, read from their signatures without importing torch."""

from __future__ import annotations

import ast
import functools
import os
from typing import Any

from trainer.import_utils import import_function, is_import_path, parameter_names

_FILES = {"advantage_estimator": "advantages.py", "policy_loss": "losses.py"}
_ALGORITHMS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "algorithms")


def built_in_defaults(key: str, name: str | None) -> dict[str, Any]:
    """Return the keyword-only parameters that have a default, of the function `name` that `algorithm.<key>` chooses.

    Empty for a function that is given by import path.
    """
    function = _functions(key).get(name or "")
    if function is None:
        return {}
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {parameter.arg: ast.literal_eval(default) for parameter, default in pairs if default is not None}


INPUTS = {
    "advantage_estimator": ("values", "baselines", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
    "policy_loss": ("ref_logprobs", "rollout_logprobs", "values", "returns", "group_ids"),
}
"""Arrays that a function gets if it has a parameter of that name, besides `GIVEN` and the `scores` of roles."""
GIVEN = {
    "advantage_estimator": ("rewards", "mask", "group_ids"),
    "policy_loss": ("logprobs", "old_logprobs", "advantages", "mask"),
}
"""Arrays that every function gets, in the order of its parameters."""


def inputs_of(key: str, name: str) -> frozenset[str]:
    """Return which of `INPUTS` the function `name`, that `algorithm.<key>` chooses, reads.

    Raises:
        UserError: the function is given by import path and cannot be imported.
    """
    if not is_import_path(name):
        function = _functions(key).get(name)
        names = {p.arg for p in (*function.args.args, *function.args.kwonlyargs)} if function is not None else set()
    else:
        names = set(parameter_names(import_function(name, f"algorithm.{key}")))
    return frozenset(names.intersection(INPUTS[key]))


@functools.cache
def _functions(key: str) -> dict[str, ast.FunctionDef]:
    with open(os.path.join(_ALGORITHMS, _FILES[key]), encoding="utf-8") as source:
        return {node.name: node for node in ast.parse(source.read()).body if isinstance(node, ast.FunctionDef)}
