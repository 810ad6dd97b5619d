"""What a test does on a machine that lacks a program or a package."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(what: str, reason: str) -> NoReturn:
    """Skip the test; where the variable TESTS_NEED_{what} is set, fail it: somebody has seen to what it needs.

    Args:
        what: `BROWSER`, `SLURM`, `PROMETHEUS` or `PACKAGES` (of the package index, beside the locked ones).
    """
    if os.environ.get(f"TESTS_NEED_{what}"):
        pytest.fail(reason)
    pytest.skip(reason)
