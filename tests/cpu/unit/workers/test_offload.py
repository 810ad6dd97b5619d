"""States of ranks that are in host memory while engines generate."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import (
    config,
    left_after_scores,
    load_then_step,
    make_batch,
    train_with_offloading,
    update,
)
from tests.support.whole_batches import compute_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.errors import UserError
from trainer.workers import host_memory
from trainer.workers.host_memory import HostMemory, local_tensor
from trainer.workers.rank import Rank


def test_offloaded_tensors_lose_their_memory_and_get_their_values_back():
    tensor, buffer = torch.arange(6.0), HostMemory(None)
    view = tensor[2:]
    for _ in range(2):
        buffer.offload([tensor, view])
        buffer.offload([tensor])
        assert tensor.untyped_storage().nbytes() == 0 and buffer.offloaded_bytes() == 24
        buffer.onload()
        buffer.onload()
        assert torch.equal(tensor, torch.arange(6.0)) and view.data_ptr() == tensor[2:].data_ptr()
        buffer.forget()
        tensor.add_(0)


def test_weights_come_back_before_the_states_of_the_optimizer():
    weight, state, buffer = torch.ones(3), torch.full((5,), 2.0), HostMemory(None)
    buffer.offload([weight], [state])
    for _ in range(2):  # what is still offloaded, and has not changed, is not copied again
        assert buffer.offloaded_bytes(optimizer=False) == 12 and buffer.offloaded_bytes() == 32
        buffer.onload(optimizer=False)
        assert weight.tolist() == [1.0] * 3 and state.untyped_storage().nbytes() == 0
        buffer.offload([weight], [state])
    buffer.onload()
    assert state.tolist() == [2.0] * 5
    buffer.forget()
    weight.fill_(4.0)
    buffer.offload([weight], [state])
    buffer.onload()
    assert weight.tolist() == [4.0] * 3
    assert buffer.size == 128  # one buffer, with two numbers of bytes rounded up to 64


def onload_without_memory(_: Rank) -> None:
    tensors, buffer = (
        [torch.full((2**27,), value, dtype=torch.uint8) for value in (1, 2)],
        HostMemory(None),
    )
    buffer.offload(tensors)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * 2**26, limits[1]))  # enough for one of the two
    try:
        with pytest.raises(RuntimeError, match="allocate memory"):
            buffer.onload()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert sorted(tensor.untyped_storage().nbytes() for tensor in tensors) == [0, 2**27]
    buffer.onload()
    for value, tensor in enumerate(tensors, 1):
        assert tensor.untyped_storage().nbytes() == 2**27 and bool((tensor == value).all())


def test_memory_that_runs_out_while_tensors_come_back_loses_none():
    run_ranks(1, onload_without_memory)  # in a process whose other threads neither take nor free memory


def test_training_and_checkpoints_do_not_notice_that_states_were_away(model_path, tmp_path):
    results = {}
    for offload in ("none", "optimizer", "all"):
        directory = str(tmp_path / offload)
        cfg = config(offload=offload)
        results[offload] = run_ranks(2, train_with_offloading, model_path, directory, cfg=cfg)[0]
    saved = (str(tmp_path / offload) for offload in ("none", "all"))
    resumed = [run_ranks(1, load_then_step, model_path, directory, cfg=config())[0] for directory in saved]
    held = {offload: result.pop("held") for offload, result in results.items()}
    assert held["none"] > held["optimizer"] > 0 == held["all"], held
    assert results["optimizer"] == results["all"] == results["none"] and resumed[0] == resumed[1]


def bytes_of_roles(rank: Rank) -> dict[str, tuple[int, int]]:
    """The bytes that the weights and the optimizer's states of each role take on the device of this rank."""

    def taken(tensors: list) -> int:
        return sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)

    optimizers = {name: rank.roles[name].optimizers.tensors("cpu") for name in ("policy", "critic")}
    return {
        name: (taken(worker.weight_tensors()), taken(optimizers.get(name, []))) for name, worker in rank.roles.items()
    }


def held_in_a_step(rank: Rank, path: str) -> dict[str, dict[str, tuple[int, int]]]:
    """What each role has on the device in the phases of a step."""
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    batch = make_batch()
    for role in ("critic", "policy"):
        update(rank, role, batch, 1)  # the states of the optimizers are there now
    held = {}

    def watch(role: str, method: str) -> None:
        worker = rank.roles[role]
        original = getattr(worker, method)

        def watched(*args, **kwargs):
            held[f"{method} {role}"] = bytes_of_roles(rank)
            return original(*args, **kwargs)

        setattr(worker, method, watched)

    for role, method in (("reference", "logprobs"), ("critic", "update"), ("policy", "update"), ("policy", "limits")):
        watch(role, method)
    rank.release_memory()
    compute_batch(rank, "reference", "logprobs", batch)
    for role in ("critic", "policy"):
        update(rank, role, batch, 2)
    rank.release_memory()
    rank.call("policy", "limits")
    return held


def test_a_rank_has_only_what_a_phase_needs(model_path):
    held = {
        offload: run_ranks(1, held_in_a_step, model_path, cfg=config(offload=offload))[0]
        for offload in ("none", "optimizer", "all")
    }
    whole = held["none"]["update policy"]
    weights, states = ({name: sizes[i] for name, sizes in whole.items()} for i in (0, 1))
    assert all(weights.values()) and states["policy"] and states["critic"]
    assert all(found == whole for found in held["none"].values())
    needed = {"logprobs reference": "", "update critic": "critic", "update policy": "policy", "limits policy": ""}
    assert held["optimizer"] == {
        phase: {name: (weights[name], states[name] if name == role else 0) for name in whole}
        for phase, role in needed.items()
    }
    assert held["all"] == {
        phase: {
            name: (weights[name], states[name] if "update" in phase else 0) if name == phase.split()[1] else (0, 0)
            for name in whole
        }
        for phase in needed
    }


@table("offload", ["none", "all"])
def test_scores_leave_no_gathered_weights_beside_engines(model_path, offload):
    ((gathered, _),) = run_ranks(1, left_after_scores, model_path, cfg=config(offload=offload))
    assert gathered == []


def held_at_loads(rank: Rank, path: str, directory: str) -> list[dict[str, tuple[int, int]]]:
    """What each role has on the device after the load of the critic, and of the policy."""
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    for role in ("critic", "policy"):
        update(rank, role, make_batch(), 1)
    files = ShardedFiles(directory)
    rank.begin_save(["policy", "critic"], files)
    rank.finish_save()
    held = []
    for role in ("critic", "policy"):
        rank.call(role, "load", files)
        held.append(bytes_of_roles(rank))
    return held


def test_a_resume_loads_one_role_at_a_time(model_path, tmp_path):
    (held,) = run_ranks(1, held_at_loads, model_path, str(tmp_path), cfg=config(offload="all"))
    for role, sizes in zip(("critic", "policy"), held, strict=True):
        assert [name for name, size in sizes.items() if size != (0, 0)] == [role]


class SlowFiles(ShardedFiles):
    """Files whose writing takes a while."""

    def write(self, *args: Any) -> list[dict]:
        time.sleep(1.0)
        return super().write(*args)


def save_what_is_away(rank: Rank, path: str, directory: str) -> list[dict[str, tuple[int, int]]]:
    """Save roles whose states are in host memory, and then those of the policy in part; return what each has on the
    device while it is saved.
    """
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    batch = make_batch()
    for role in ("critic", "policy"):
        update(rank, role, batch, 1)
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/here"))
    rank.finish_save()
    held = []
    for number, leaves in enumerate((rank.release_memory, lambda: compute_batch(rank, "policy", "logprobs", batch))):
        leaves()
        rank.begin_save(["policy", "critic"], SlowFiles(f"{directory}/{number}"))
        held.append(bytes_of_roles(rank))
        rank.finish_save()
    rank.begin_save(["policy", "critic"], SlowFiles(f"{directory}/2"))
    for role in ("critic", "policy"):  # what is written is of the time before
        update(rank, role, batch, 2)
    rank.release_memory()
    rank.finish_save()
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/later"))
    rank.finish_save()
    rank.release_memory()
    reached = Path(directory, "reached")
    os.environ["TRAINER_FAILPOINT"] = f"save:staging,1,{reached}"
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/returning"))
    while not reached.exists():
        time.sleep(0.01)
    rank._onload(["policy"], optimizer=True)  # a GPU may still be copying when the save begins
    for tensor in rank.roles["policy"].weight_tensors():
        local_tensor(tensor.detach()).zero_()
    reached.unlink()
    rank.finish_save()
    return held


def read_back(rank: Rank, path: str, directory: str, names: Sequence[str]) -> dict[str, list[list[float]]]:
    """Load the roles of each save; return for each role the number of its optimizer steps, and a number per tensor."""
    read: dict[str, list[list[float]]] = {}
    for name in names:
        rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
        read[name] = []
        for role in ("policy", "critic") if name.isdigit() else ("policy",):
            rank.call(role, "load", ShardedFiles(f"{directory}/{name}"))
            worker = rank.roles[role]
            tensors = [local_tensor(tensor) for tensor in worker.weight_tensors() + worker.optimizers.tensors("cpu")]
            sums = (float(tensor.detach().double().abs().sum()) for tensor in tensors)
            read[name].append([worker.optimizers.steps, *sums])
    return read


def test_a_save_takes_what_is_away_from_host_memory(model_path, tmp_path):
    directory = str(tmp_path)
    (held,) = run_ranks(1, save_what_is_away, model_path, directory, cfg=config(offload="all"))
    assert all(size == (0, 0) for size in held[0].values())
    weights, states = held[1].pop("policy")
    assert weights > 0 == states and all(size == (0, 0) for size in held[1].values())
    names = ("here", "0", "1", "2", "later", "returning")
    (read,) = run_ranks(1, read_back, model_path, directory, names, cfg=config())
    assert read["0"] == read["1"] == read["2"] and read["0"][0] == read["here"][0] != []
    assert read["returning"] == read["later"] != read["here"]


def offload_during_a_save(rank: Rank, path: str, directory: str) -> float:
    """Leave the device while a save is written, on a machine with memory for one copy; return the seconds waited."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update(rank, "policy", make_batch(), 1)
    rank.begin_save(["policy"], SlowFiles(directory))
    update(rank, "policy", make_batch(), 2)
    host_memory.available_bytes = lambda: 0
    rank.release_memory()
    waited = rank.pop_stall_seconds()
    rank.finish_save()
    compute_batch(rank, "policy", "logprobs", make_batch())
    update(rank, "policy", make_batch(), 3)
    rank.saver.memory("policy").hold(rank.saver.memory("policy").copy({}))  # somebody else needs the only buffer
    with pytest.raises(UserError, match="use a machine with more host memory"):
        rank.release_memory()
    return waited


def test_a_rank_waits_for_a_save_if_the_machine_has_memory_for_one_copy(model_path, tmp_path):
    (waited,) = run_ranks(1, offload_during_a_save, model_path, str(tmp_path), cfg=config(offload="all"))
    assert waited > 0
