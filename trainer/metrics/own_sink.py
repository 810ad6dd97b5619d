"""A sink of the user's own, for a service that `logger.*` does not know."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trainer.config import SinkConfig
from trainer.errors import UserError
from trainer.import_utils import import_function, problem_of_method, user_code
from trainer.metrics.sinks import Samples, Sink

LOG = logging.getLogger(__name__)

KEY = "logger.sink.name"

_METHODS = {"begin": ("rows", "step"), "log": ("step", "values", "samples"), "close": ("exit_code",)}
"""The methods of a sink, and what they get."""


class OwnSink:
    """A `Sink` around that of `logger.sink`, which cannot end a run that has begun.

    After the first exception of `log`, it gets no more steps from this process. The next start gives it all of them.

    Args:
        run_dir: local directory of the run.
        config: the resolved config without secrets.

    Raises:
        UserError: the sink cannot be built.
    """

    def __init__(self, run_dir: str, sink: SinkConfig, config: Mapping[str, Any]) -> None:
        self._name = sink.name
        kind = find_sink(sink)
        with self._calling():
            self._sink: Sink | None = kind(run_dir, config, **sink.kwargs)

    def begin(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if self._sink is not None:
            with self._calling():
                self._sink.begin(rows, step)

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        if self._sink is not None:
            with self._left_out_if_it_fails("gets no more steps; metrics.jsonl has them all"), self._calling():
                self._sink.log(step, values, samples)

    def close(self, exit_code: int) -> None:
        if self._sink is not None:
            with self._left_out_if_it_fails("has not been closed"), self._calling():
                self._sink.close(exit_code)

    @contextmanager
    def _left_out_if_it_fails(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self._sink = None
            LOG.warning("%s; it %s", error, consequence)

    def _calling(self) -> AbstractContextManager[None]:
        return user_code(f"{KEY}={self._name}: {{}}", has_place=True)


def find_sink(sink: SinkConfig) -> Callable[..., Sink]:
    """Import the class of a sink.

    Raises:
        UserError: there is none, it lacks a method, a method does not take its arguments, or the class does not take
            `logger.sink.kwargs`.
    """
    assert sink.name is not None
    kind = import_function(sink.name, KEY)
    lacking = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    if lacking:
        raise UserError(f"{KEY}={sink.name}: has no method {lacking[0]}; it needs begin, log and close")
    for name, arguments in _METHODS.items():
        if problem := problem_of_method(kind, name, arguments):
            raise UserError(f"{KEY}={sink.name}: {problem}")
        if inspect.iscoroutinefunction(getattr(kind, name)):
            raise UserError(
                f"{KEY}={sink.name}: {name} is async, and nothing awaits it; put what takes long on a thread"
            )
    try:
        inspect.signature(kind).bind("", {}, **sink.kwargs)
    except TypeError as error:
        raise UserError(
            f"{KEY}={sink.name}: {error}; it gets run_dir, config, and each logger.sink.kwargs.NAME by name"
        ) from error
    return kind
