"""Tests of one path of the code with many inputs: one test with a table, and not one test for each row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def table(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each row of a table, as one test. A failure says which row it was.

    Args:
        names: parameters of the test that a row has values for, as `pytest.mark.parametrize` takes them. The others are
            fixtures, which all rows share.
    """
    keys, rows = [name.strip() for name in names.split(",")], list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test, updated=())  # not the attributes by which hypothesis knows its tests
        def run(**others: Any) -> None:
            for row in rows:
                try:
                    test(**others, **dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)))
                except BaseException as error:
                    error.add_note(f"in the row {row!r}")
                    raise

        signature = inspect.signature(test)
        own = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return decorate
