"""Waits that no key decides: each is used, in seconds, and read at the moment of the wait."""

from __future__ import annotations

import ast
from pathlib import Path

from trainer.process import time_limits

NAMES = [name for name in vars(time_limits) if name.isupper()]
PACKAGE = Path(time_limits.__file__).parents[1]


def read_names() -> set[str]:
    """The limits that the package reads as `time_limits.NAME`, so that a test can shorten them."""
    return {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "time_limits"
        and node.attr.isupper()
    }


def test_every_limit_is_used_and_every_used_one_exists():
    assert read_names() == set(NAMES)


def test_limits_are_seconds_and_say_so():
    limits = {name: getattr(time_limits, name) for name in NAMES}
    assert [n for n, s in limits.items() if not (n.endswith("_S") and isinstance(s, float) and 0 < s <= 14400)] == []


def test_nobody_imports_a_limit_by_its_name():
    """A copy of the name would not see a shorter limit of a test."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "trainer.process.time_limits"), path
