"""A sink of the user's own, for a service that `logger.*` does not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import SinkConfig
from trainer.errors import UserError
from trainer.import_utils import import_function, problem_of_method, user_code
from trainer.metrics.sinks import Rows, Samples, Sink

KEY = "logger.sink.name"

_METHODS = {"start": ("rows", "step"), "log": ("step", "values"), "samples": ("step", "samples"), "end": ("exit_code",)}
"""The methods of a sink, and what they get."""


class OwnSink:
    """A `Sink` around that of `logger.sink`, whose exceptions name it.

    Args:
        run_dir: local directory of the run.
        config: the resolved config without secrets.

    Raises:
        UserError: the sink cannot be built.
    """

    def __init__(self, run_dir: str, sink: SinkConfig, config: Mapping[str, Any]) -> None:
        self._name = sink.name
        kind = find_sink(sink)
        self._sink: Sink = self._call(kind, run_dir, config, **sink.kwargs)

    def start(self, rows: Rows, step: int) -> None:
        self._call(self._sink.start, rows, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(self._sink.log, step, values)

    def samples(self, step: int, samples: Samples) -> None:
        self._call(self._sink.samples, step, samples)

    def end(self, exit_code: int) -> None:
        self._call(self._sink.end, exit_code)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with user_code(f"{KEY}={self._name}: {{}}", has_place=True):
            return function(*args, **kwargs)


def find_sink(sink: SinkConfig) -> Callable[..., Sink]:
    """Import the class of a sink.

    Raises:
        UserError: there is none, it lacks a method, a method does not take its arguments, or the class does not take
            `logger.sink.kwargs`.
    """
    assert sink.name is not None
    kind = import_function(sink.name, KEY)
    for name, arguments in _METHODS.items():
        problem = None
        if not callable(method := getattr(kind, name, None)):
            problem = f"has no method {name}; it needs start, log, samples and end"
        elif inspect.iscoroutinefunction(method):
            problem = f"{name} is async, and nothing awaits it; put what takes long on a thread"
        if problem := problem or problem_of_method(kind, name, arguments):
            raise UserError(f"{KEY}={sink.name}: {problem}")
    try:
        inspect.signature(kind).bind("", {}, **sink.kwargs)
    except TypeError as error:
        raise UserError(
            f"{KEY}={sink.name}: {error}; it gets run_dir, config, and each logger.sink.kwargs.NAME by name"
        ) from error
    return kind
