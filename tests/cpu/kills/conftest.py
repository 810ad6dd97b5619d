"""What tests of killed and lost processes share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.killed_jobs import outcome, run_until


@pytest.fixture(scope="module")
def uninterrupted(overrides, tmp_path_factory) -> tuple[list[dict[str, Any]], bytes]:
    """The outcome of a job with the `overrides` of the module that loses nothing."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert run_until(directory / "log", f"trainer.run_dir={directory}/run", *overrides)
    return outcome(directory / "run")
