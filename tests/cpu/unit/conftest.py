"""What tests share and leave as it was: a run directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.odd_files import make_run


@pytest.fixture(scope="session")
def real_run(tmp_path_factory) -> Path:
    """A run directory with two checkpoints and the metrics of two steps. No test changes it."""
    root = tmp_path_factory.mktemp("run")
    make_run(root)
    return root


@pytest.fixture
def run_dir(real_run, tmp_path) -> Path:
    """A copy of it for one test."""
    return shutil.copytree(real_run, tmp_path / "run")
