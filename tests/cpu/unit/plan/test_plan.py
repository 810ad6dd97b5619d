"""Whether runs fit clusters."""

from __future__ import annotations

import pytest

from trainer.plan.hardware import CONTEXT_BYTES, GB, Cluster
from trainer.plan.plan import make_plan
from trainer.plan.ranks import ENGINE_KINDS


def test_a_small_model_fits_a_node(cfg, node):
    plan = make_plan(cfg, node)
    assert plan.fits and plan.gpus == 8
    (member,) = plan.members
    assert (member.name, member.count) == ("rank and engine", 8)
    assert {phase.name for phase in member.phases} >= {"rollout", "update of the policy"}
    assert member.peak.total < member.capacity == node.device.memory
    engine = {phase.name: [phase.sizes[kind] for kind in ENGINE_KINDS] for phase in member.phases}
    assert engine["update of the policy"] == [0, 0, plan.engine.graphs] and plan.engine.graphs > 0
    assert engine["weights to engines"] == [plan.engine.weights, 0, plan.engine.graphs]
    assert engine["rollout"] == [plan.engine.weights, plan.engine.kv_cache, plan.engine.workspace]
    assert sum(engine["rollout"]) == plan.engine.budget - CONTEXT_BYTES


def test_a_save_needs_the_states_beside_the_weights_that_an_engine_has_just_got(cfg, node):
    cfg.trainer.offload = "all"
    plan = make_plan(cfg, node, traced=False)
    (member,) = plan.members
    (save,) = (phase for phase in member.phases if phase.name == "save")
    assert save.sizes["weights"] + save.sizes["optimizer"] == sum(plan.roles[0].state) > 0
    assert [save.sizes[kind] for kind in ENGINE_KINDS] == [plan.engine.weights, 0, plan.engine.graphs]


def test_an_engine_with_gpus_of_its_own_has_weights_a_cache_and_buffers(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    plan = make_plan(cfg, node, traced=False)
    (phase,) = plan.members[1].phases
    e = plan.engine
    expected = {"weights": e.weights, "kv_cache": e.kv_cache, "buffers": e.workspace, "reserved": CONTEXT_BYTES}
    assert phase.sizes == expected and phase.total == e.budget


def test_hours_count_the_waits_for_saves(cfg, node):
    cfg.trainer.ckpt_interval, cfg.plan.storage_gb_s = 1, 0.01
    plan = make_plan(cfg, node, traced=False)
    assert plan.saves.write_s > 2 * plan.time.total
    in_order = plan.time.steps * plan.saves.save_s  # the next save begins when one has ended
    assert plan.hours == pytest.approx((plan.time.total + in_order) / 3600)
    cfg.trainer.ckpt_async = False
    waits = make_plan(cfg, node, traced=False)
    assert waits.hours == pytest.approx((plan.time.steps * plan.time.total + in_order) / 3600)


@pytest.mark.parametrize(("interval", "count"), [(-1, 0), (10, 3), (7, 3), (30, 1)])
def test_hours_count_the_exports(cfg, node, interval, count):
    cfg.trainer.total_steps, cfg.trainer.hf_save_interval, cfg.plan.storage_gb_s = 21, interval, 0.01
    plan = make_plan(cfg, node, traced=False)
    assert plan.saves.exports_s == pytest.approx(count * plan.saves.export / 0.01e9)
    assert 3600 * plan.hours == pytest.approx(21 * plan.time.total + plan.saves.waits_s + plan.saves.exports_s)


def test_a_large_model_does_not_fit_one_gpu(cfg, node):
    cfg.model.path = "Qwen/Qwen3-8B"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    plan = make_plan(cfg, Cluster(1, 1, node.device))
    assert not plan.fits
    assert plan.problems[0].startswith("rank and engine, ")
    assert plan.members[0].peak.total > 16 * 8.19e9


def test_a_model_with_a_state_along_the_row_gets_one_sequence_at_a_time(cfg, node, save_config):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    cfg.model.path = save_config("qwen3_next", **experts)
    plan = make_plan(cfg, node, traced=False)
    assert [row.lengths for row in plan.roles[0].rows] == [(1024,)] * 2


def test_too_few_gpus_are_named(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    plan = make_plan(cfg, node)
    assert plan.problems[0].startswith("trainer.num_workers=8: ranks and engines need 16 GPUs, and there are 8")


def test_roles_on_ranks_of_their_own_need_more_gpus(cfg, node):
    cfg.trainer.colocate_roles = False
    cfg.algorithm.kl_coef = 0.1
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 3, 2
    plan = make_plan(cfg, node)
    assert plan.fits and plan.gpus == 8
    assert [member.name for member in plan.members] == ["rank of the policy", "rank of the reference", "engine"]


def test_host_memory_counts(cfg, node):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    plan = make_plan(cfg, node)
    assert any(problem.startswith("host memory: ") for problem in plan.problems) == (plan.host > 2000 * GB)
    assert plan.host > 12 * 70.5e9


def test_this_machine_is_limited_by_its_memory(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 1
    plan = make_plan(cfg, cpu)
    assert plan.fits and plan.shared.weights > 0
    assert [member.name for member in plan.members] == ["rank", "engine"]
    cfg.model.path = "Qwen/Qwen3-8B"
    assert any(problem.startswith("host memory: ") for problem in make_plan(cfg, cpu).problems)


def test_supervised_training_has_no_engines(cfg, node):
    cfg.trainer.task, cfg.rollout.colocate, cfg.trainer.offload = "sft", False, "none"
    plan = make_plan(cfg, node)
    assert plan.engine is None and [member.name for member in plan.members] == ["rank"]
    assert set(plan.time.phases) == {"update", "other"}
