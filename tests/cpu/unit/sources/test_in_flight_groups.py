"""Groups in flight: sampled together, recorded together, and judged together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.replies import source_of
from trainer.config import Config, TinyConfig
from trainer.generation.engine import Sampling
from trainer.models.tiny import build_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), path)
    return path


def in_flight(cfg: Config) -> None:
    cfg.rollout.engine, cfg.rollout.in_flight_updates = "vllm", True
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 4


def test_groups_are_in_the_engines_together(tmp_path: Path, model: str):
    """Also where the engines could repeat their tokens to the last bit, one group at a time: in flight nothing does."""
    together = threading.Barrier(4)

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        if number == 0:
            together.wait(30)
        return "x"

    with source_of(tmp_path, model, reply, edit=in_flight) as source:
        assert source.runner.engines.repeats
        source.start(1, is_initial=True)
        assert len(source.next(1)) == 8
