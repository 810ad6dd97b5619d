"""Parse JSON and YAML from files that may be damaged or hostile. The only error is a ValueError."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

_MAX_DEPTH = 50

Shape = type | Callable[[Any], bool] | dict | list | tuple
"""The shape of a value: a type; a function that tests the value; `(a, b)`: one of these shapes; `[a]`: a list of `a`;
`{str: a}`: an object with any names; `{"x": a, …}`: an object with at least these fields."""
ObjectShape = dict[Any, Shape] | Callable[[dict[str, Any]], dict[Any, Shape]]
"""The shape of an object; a function returns it for an object, whose version it looks at."""


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number from 0 that fits 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return type(value) is int and abs(value) < 2**63 or type(value) is float and math.isfinite(value)


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError: the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: bytes | str, shape: ObjectShape | None = None) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError: it is not JSON, is nested too deeply, or has another shape."""
    return checked_object(parse_json(text), shape or {})


def parse_yaml(text: bytes | str, shape: dict[Any, Shape] | None = None) -> dict[str, Any]:
    """Parse a YAML mapping of this shape. Aliases are refused, because a few lines with aliases can grow to any size.
    Raises ValueError: the text is not YAML, is nested too deeply, or has another shape."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias")
            return super().compose_node(parent, index)

    try:
        value = yaml.load(text, Loader)
    except Exception as error:  # the constructors of PyYAML raise any exception on a bad value
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return checked_object(value, shape or {})


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value as YAML, its keys in their order. Texts such as `1e5` are in quotes: PyYAML takes them for texts
    without, but OmegaConf for numbers."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*+(\.[\d_]*+)?|\.[\d_]++)[eE][-+]?\d+")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, **options)


def flatten(
    tree: Mapping[str, Any], prefix: str = "", whole: Callable[[str], bool] = lambda key: False
) -> dict[str, Any]:
    """Return the values of nested mappings by dotted key. `whole` says whether the mapping of a key stays a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, Mapping) and not whole(key)
        flat |= flatten(value, f"{key}.", whole) if is_section else {key: value}
    return flat


def nests_deeply(value: Any) -> bool:
    """Return whether lists and objects are nested so deeply in `value` that a parser or a printer may fail."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        nested = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level = [child for children in nested for child in children]
    return bool(level)


def mismatch(value: Any, shape: Shape, where: str = "") -> str | None:
    """Return a description of the first field of `value` that does not have its `shape`, or None if all have it."""
    if isinstance(shape, tuple):
        ok = any(mismatch(value, one, where) is None for one in shape)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no object"
        missing = [name for name in shape if name is not str and name not in value]
        if missing:
            return f"{_join(where, missing[0])} is missing"
        inner = [(_join(where, n), v, shape.get(n, shape.get(str))) for n, v in value.items()]
        return next((problem for w, v, s in inner if s is not None and (problem := mismatch(v, s, w))), None)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        inner = (mismatch(v, shape[0], f"{where}[{i}]") for i, v in enumerate(value))
        return next((problem for problem in inner if problem), None)
    elif isinstance(shape, type):
        ok = type(value) is shape
    else:
        ok = shape(value)
    return None if ok else f"{where} is {reprlib.repr(value)}"


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else f"{name}"


def checked_object(value: Any, shape: ObjectShape) -> dict[str, Any]:
    """Return a parsed value. Raises ValueError: it is no object, is nested too deeply, or has another shape."""
    if not isinstance(value, dict):
        raise ValueError(f"it holds {'nothing' if value is None else type(value).__name__} instead of fields")
    if nests_deeply(value):
        raise ValueError("it is nested too deeply")
    problem = mismatch(value, shape if isinstance(shape, dict) else shape(value))
    if problem:
        raise ValueError(problem)
    return value
