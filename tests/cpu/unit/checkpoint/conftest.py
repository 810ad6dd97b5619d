from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import write_two
from tests.support.one_rank import save_run
from tests.support.ranks import run_ranks
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny


@pytest.fixture(scope="module")
def real_checkpoints(tmp_path_factory):
    """Two checkpoints with DCP shards, of states 1 and 2."""
    root = tmp_path_factory.mktemp("real")
    run_ranks(1, write_two, str(root))
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128, seed=3), str(path))
    return path


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, model) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_run, str(root), str(model))
    return root
