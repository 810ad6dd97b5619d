"""Copies between GPUs and hosts, counted by hand and beside a real rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from trainer.config import Config, TinyConfig
from trainer.config.axes import AXES
from trainer.models.tiny import build_tiny
from trainer.plan.hardware import Cluster
from trainer.plan.host_copies import HostCopies, copies_of_engine, copies_of_ranks
from trainer.plan.plan import make_plan
from trainer.plan.ranks import plan_role, rank_phases
from trainer.plan.workload import workload_of
from trainer.workers.rank import Rank

ALONE = dict.fromkeys(AXES, 1)
NUMBERS = 596_049_920
"""Of Qwen3-0.6B. Eight ranks have the same share of each tensor."""
PCIE, HOST, GPU = 51e9, 0.7 * 614e9 / 8, 0.7 * 3350e9
"""Bytes per second of an H100: to its host, of the memory of the host, and of its own memory."""


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that are copied as bytes, which only `OffloadBuffer` does."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            self.size += args[0].nbytes
        return function(*args, **(kwargs or {}))


class Receiver:
    """Takes weights as engines on the GPUs of ranks do."""

    def send(self, weights: Any, rank: int) -> None:
        for _ in weights:
            pass


def one_step(rank: Rank, path: str, names: list[str]) -> int:
    """The bytes that a rank copies in a step, in the order in which the driver calls it."""
    rows, width = 4, 16
    mask = np.ones((rows, width), np.float32)
    mask[:, 0] = 0
    batch = {
        "input_ids": np.full((rows, width), 7),
        "mask": mask,
        "lengths": np.full(rows, width),
        "group_ids": np.arange(rows) // 4,
        **dict.fromkeys(("old_logprobs", "rollout_logprobs", "advantages"), -mask),
    }
    scored = {name: batch[name] for name in ("input_ids", "mask", "lengths", "group_ids")}
    batch |= dict.fromkeys(("values", "returns"), mask)
    rank.build(roles(rank.cfg, names), path)

    def train() -> None:
        for name in names:
            rank.score(name, "values" if name == "critic" else "logprobs", scored)
        for name in ("critic", "policy"):
            if name in names:
                rank.update(name, batch, 1)
        rank.release_memory()  # engines wake their weights
        rank.call("policy", "send_weights", Receiver(), "float32")
        rank.release_memory()  # engines generate

    train()  # the states of the optimizer are there now
    with CopiedBytes() as copied:
        train()
    return copied.size


@pytest.mark.parametrize(
    ("offload", "names"),
    [
        ("all", ["policy", "reference"]),
        ("all", ["policy", "critic", "reference"]),
        ("optimizer", ["policy", "critic"]),
    ],
)
def test_offload_copies_what_a_rank_copies(tmp_path, offload, names):
    cfg = Config()
    cfg.model.tiny = TinyConfig(hidden_size=64, num_layers=2)
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 1
    cfg.trainer.update_epochs = 2  # so the policy scores its rows, too
    cfg.trainer.offload, cfg.rollout.colocate, cfg.rollout.n = offload, True, 4
    build_tiny(cfg.model.tiny, str(tmp_path / "model"))
    copied = run_ranks(1, one_step, str(tmp_path / "model"), names, cfg=cfg, device="cpu")[0]
    workload = workload_of(cfg, ALONE)
    planned = [plan_role(cfg, role, ALONE, workload, "cpu", traced=False) for role in roles(cfg, names)]
    copies = copies_of_ranks(cfg, planned, workload)
    assert copies.to_host + copies.to_gpu == copied > 0


@pytest.mark.parametrize(
    ("offload", "to_host", "to_gpu"),
    [("none", 0, 0), ("optimizer", 8, 8), ("all", 4 + 8, 2 * 4 + 8)],
)
def test_states_leave_the_gpu_once_and_weights_come_back_twice(cfg, node, offload, to_host, to_gpu):
    cfg.trainer.offload = offload
    plan = make_plan(cfg, node, traced=False)
    copies = copies_of_ranks(cfg, plan.roles, plan.workload)
    assert copies == HostCopies(to_host * NUMBERS / 8, to_gpu * NUMBERS / 8)
    assert plan.time.phases.get("offload", 0.0) == pytest.approx((to_host + to_gpu) * NUMBERS / 8 / PCIE)


def copies_of(cfg: Config, node: Cluster) -> HostCopies:
    plan = make_plan(cfg, node, traced=False)
    return copies_of_ranks(cfg, plan.roles, plan.workload)


def test_a_reference_is_copied_back_to_score_and_leaves_again_only_if_it_has_changed(cfg, node):
    before = copies_of(cfg, node)
    cfg.algorithm.kl_coef, size = 0.1, 2 * NUMBERS / 8
    assert copies_of(cfg, node) == HostCopies(before.to_host, before.to_gpu + size)
    cfg.algorithm.ref_sync_interval = 10
    assert copies_of(cfg, node) == HostCopies(before.to_host + size / 10, before.to_gpu + size + size / 10)


def test_a_policy_whose_base_is_the_reference_comes_back_to_score_and_again_after_the_critic(cfg, node):
    cfg.algorithm.advantage_estimator, cfg.algorithm.kl_coef, cfg.trainer.policy.lora.rank = "gae", 0.1, 8
    cfg.algorithm.old_logprobs = "rollout"  # so the policy itself scores nothing
    plan, copies = make_plan(cfg, node, traced=False), copies_of(cfg, node)
    policy, critic = (next(r for r in plan.roles if r.spec.name == name) for name in ("policy", "critic"))
    assert copies.to_gpu == 3 * policy.state[0] + policy.state[1] + sum(critic.state)


def test_a_reference_is_saved_from_the_host_if_its_weights_are_there(cfg, node):
    cfg.algorithm.kl_coef, cfg.algorithm.ref_sync_interval = 0.1, 10
    totals = {}
    for cfg.trainer.offload in ("optimizer", "all"):
        plan = make_plan(cfg, node, traced=False)
        phases = rank_phases(cfg, plan.roles, plan.workload, node.device)
        totals[cfg.trainer.offload] = next(phase.total for phase in phases if phase.name == "save")
    states = {role.spec.name: sum(role.state) for role in plan.roles}
    assert totals == {"optimizer": sum(states.values()), "all": states["policy"]} and states["reference"] > 0


@pytest.mark.parametrize(("engine", "to_host"), [("vllm", 1), ("transformers", 2)])
def test_engines_that_share_gpus_sleep_and_wake_in_each_step(cfg, node, engine, to_host):
    cfg.rollout.engine, cfg.trainer.offload = engine, "none"
    plan = make_plan(cfg, node, traced=False)
    assert copies_of_engine(cfg, plan.engine) == HostCopies(to_host * 2 * NUMBERS, 2 * NUMBERS)
    assert plan.time.phases["sleep"] == pytest.approx((to_host + 1) * 2 * NUMBERS / PCIE)
    assert plan.time.total == pytest.approx(sum(plan.time.phases.values()))
    cfg.rollout.colocate = False
    assert copies_of_engine(cfg, plan.engine) == HostCopies()


def test_weights_on_the_host_cross_pcie_for_each_gather(cfg, node, fast_host):
    """The passes are too small to hide the copies."""
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    cfg.trainer.offload, cfg.rollout.n = "none", 2
    cfg.plan.prompt_tokens = cfg.plan.response_tokens = cfg.rollout.max_prompt_tokens = 4
    cfg.rollout.max_response_tokens = cfg.trainer.max_tokens_per_micro_batch = 4
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 2
    near = make_plan(cfg, node, traced=False)
    cfg.trainer.policy.fsdp.cpu_offload = True
    far = make_plan(cfg, node, traced=False)
    count = far.workload.micro_batches(far.workload.computed_in_update)
    assert count == 3
    near_s, far_s = near.time.phases["update"], far.time.phases["update"]
    gathers, gradients = 2 * count * 4 * NUMBERS / PCIE, 4 * NUMBERS / PCIE
    added = (count - 1) * (gradients + 12 * NUMBERS / HOST)
    steps = 40 * NUMBERS / HOST - 28 * NUMBERS / GPU
    compute = 1e-3  # at most, which the copies hide
    assert far_s - near_s == pytest.approx(gathers + gradients + added + steps, abs=compute)
    sent = 6 * NUMBERS / HOST + 2 * NUMBERS / PCIE
    assert far.time.phases["sync"] - near.time.phases["sync"] == pytest.approx(sent)
    assert "offload" not in far.time.phases


def test_a_reference_on_the_host_is_gathered_from_there_to_score(cfg, node, fast_host):
    cfg.algorithm.kl_coef, cfg.trainer.offload = 0.1, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 4, 4
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 1
    near = make_plan(cfg, node, traced=False).time.phases["scores"]
    cfg.trainer.reference.fsdp.cpu_offload = True
    far = make_plan(cfg, node, traced=False).time.phases["scores"]
    assert far - near == pytest.approx(2 * NUMBERS / PCIE, abs=1e-3)
