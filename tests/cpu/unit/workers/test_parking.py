"""States of ranks that are in host memory while engines generate."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import config, load_then_step, train_with_parking
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny
from trainer.workers.parking import ParkingPlace


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), path)
    return path


def test_parked_tensors_lose_their_memory_and_get_their_values_back():
    tensor, place = torch.arange(6.0), ParkingPlace()
    view = tensor[2:]
    for _ in range(2):
        place.park([tensor, view])
        place.park([tensor])
        assert tensor.untyped_storage().nbytes() == 0
        place.restore()
        place.restore()
        assert torch.equal(tensor, torch.arange(6.0)) and view.data_ptr() == tensor[2:].data_ptr()


def test_training_and_checkpoints_do_not_notice_that_states_were_away(model_path, tmp_path):
    results, resumed = {}, {}
    for offload in ("none", "optimizer", "all"):
        directory = str(tmp_path / offload)
        cfg = config(offload=offload)
        results[offload] = run_ranks(2, train_with_parking, model_path, directory, cfg=cfg)[0]
        resumed[offload] = run_ranks(2, load_then_step, model_path, directory, cfg=config())[0]
    held = {offload: result.pop("held") for offload, result in results.items()}
    assert held["none"] > held["optimizer"] > 0 == held["all"], held
    for offload in ("optimizer", "all"):
        assert results[offload] == results["none"] and resumed[offload] == resumed["none"]
