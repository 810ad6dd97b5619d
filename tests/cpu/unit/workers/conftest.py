"""A model that the ranks of most tests hold."""

from __future__ import annotations

import pytest

from trainer.models.tiny import TinyShape, build_tiny


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), path)
    return path
