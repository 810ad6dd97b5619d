"""States of ranks that are in host memory while engines generate."""

from __future__ import annotations

import torch

from tests.support.ranks import run_ranks
from tests.support.training import config, load_then_step, train_with_offloading
from trainer.workers.host_memory import HostMemory
from trainer.workers.offload import OffloadBuffer


def test_offloaded_tensors_lose_their_memory_and_get_their_values_back():
    tensor, buffer = torch.arange(6.0), OffloadBuffer(HostMemory(None))
    view = tensor[2:]
    for _ in range(2):
        buffer.offload([tensor, view])
        buffer.offload([tensor])
        assert tensor.untyped_storage().nbytes() == 0 and buffer.offloaded_bytes() == 24
        buffer.onload()
        buffer.onload()
        assert torch.equal(tensor, torch.arange(6.0)) and view.data_ptr() == tensor[2:].data_ptr()
        buffer.memory.forget()
        tensor.add_(0)


def test_weights_come_back_before_the_states_of_the_optimizer():
    weight, state, buffer = torch.ones(3), torch.full((5,), 2.0), OffloadBuffer(HostMemory(None))
    buffer.offload([weight], [state])
    for _ in range(2):  # what is still offloaded, and has not changed, is not copied again
        assert buffer.offloaded_bytes(optimizer=False) == 12 and buffer.offloaded_bytes() == 32
        buffer.onload(optimizer=False)
        assert weight.tolist() == [1.0] * 3 and state.untyped_storage().nbytes() == 0
        buffer.offload([weight], [state])
    buffer.onload()
    assert state.tolist() == [2.0] * 5
    buffer.memory.forget()
    weight.fill_(4.0)
    buffer.offload([weight], [state])
    buffer.onload()
    assert weight.tolist() == [4.0] * 3
    assert buffer.memory.size == 128  # one buffer, with two numbers of bytes rounded up to 64


def test_training_and_checkpoints_do_not_notice_that_states_were_away(model_path, tmp_path):
    results, resumed = {}, {}
    for offload in ("none", "optimizer", "all"):
        directory = str(tmp_path / offload)
        cfg = config(offload=offload)
        results[offload] = run_ranks(2, train_with_offloading, model_path, directory, cfg=cfg)[0]
        resumed[offload] = run_ranks(2, load_then_step, model_path, directory, cfg=config())[0]
    held = {offload: result.pop("held") for offload, result in results.items()}
    assert held["none"] > held["optimizer"] > 0 == held["all"], held
    for offload in ("optimizer", "all"):
        assert results[offload] == results["none"] and resumed[offload] == resumed["none"]
