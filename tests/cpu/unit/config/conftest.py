"""The cases of the tests in `contradictions.py`."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in (("contradiction", "CONTRADICTIONS"), ("at_the_bound", "AT_THE_BOUND")):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, getattr(metafunc.module, cases))
