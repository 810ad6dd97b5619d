"""What tests share and leave as it was: a run directory, a model, an inference server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_files import make_run
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer


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


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The directory of a model with random weights. No test changes it."""
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model) -> Any:
    """The tokenizer of that model. The tests of one module share it."""
    return load_tokenizer(model)
