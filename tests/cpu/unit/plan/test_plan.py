"""Whether runs fit clusters, and how long their steps take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.models import SHAPES, sizes_of
from benchmarks.plan import CONFIGS, JOBS, SHAPE, config_of
from trainer.config import compose, policy_role
from trainer.objectives.policy_gradient import PolicyGradient
from trainer.parallel.axes import AXES
from trainer.plan.hardware import CONTEXT_BYTES, GB, Cluster, Device
from trainer.plan.plan import make_plan
from trainer.plan.ranks import ENGINE_KINDS
from trainer.plan.workload import scored_share, workload_of


def seconds(cfg, cluster, phase="update"):
    return make_plan(cfg, cluster, traced=False).time.phases[phase]


def on_two_halves(cfg):
    """Half of the GPUs for ranks, the others for engines."""
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4


def on_cpu(cfg):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 1


def test_a_small_model_fits_a_node(cfg, node):
    plan = make_plan(cfg, node)
    assert plan.fits and plan.gpus == 8
    (member,) = plan.members
    assert (member.name, member.count) == ("rank and engine", 8)
    assert {phase.name for phase in member.phases} >= {"rollout", "update of the policy"}
    assert member.peak.total < member.capacity == node.device.memory
    sizes = {phase.name: phase.sizes for phase in member.phases}
    engine = {name: [of_phase[kind] for kind in ENGINE_KINDS] for name, of_phase in sizes.items()}
    assert engine["update of the policy"] == [0, 0, plan.engine.graphs] and plan.engine.graphs > 0
    assert engine["weights to engines"] == engine["save"] == [plan.engine.weights, 0, plan.engine.graphs]
    assert engine["rollout"] == [plan.engine.weights, plan.engine.kv_cache, plan.engine.workspace]
    assert sizes["save"]["weights"] + sizes["save"]["optimizer"] == sum(plan.roles[0].state) > 0
    assert plan.time.total * plan.time.steps == pytest.approx(3600 * plan.hours)


def test_an_engine_with_gpus_of_its_own_has_weights_a_cache_and_buffers(cfg, node):
    on_two_halves(cfg)
    plan = make_plan(cfg, node, traced=False)
    (phase,) = plan.members[1].phases
    e = plan.engine
    assert phase.sizes == {
        "weights": e.weights,
        "kv_cache": e.kv_cache,
        "buffers": e.workspace,
        "reserved": CONTEXT_BYTES,
    }


def test_what_has_no_room_is_named(cfg, node, cpu):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    plan = make_plan(cfg, node, traced=False)
    assert any(problem.startswith("rank and engine, update") for problem in plan.problems)
    assert "engine: the weights leave no room for a KV cache" in plan.problems
    assert any(problem.startswith("host memory: ") for problem in plan.problems) == (plan.host > 2000 * GB)
    cfg.model.path = "Qwen/Qwen3-0.6B"
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    plan = make_plan(cfg, node, traced=False)
    assert plan.problems[0].startswith("trainer.num_workers=8: ranks and engines need 16 GPUs, and there are 8")
    on_cpu(cfg)
    assert make_plan(cfg, cpu, traced=False).fits
    cfg.model.path = "Qwen/Qwen3-8B"
    assert any(problem.startswith("host memory: ") for problem in make_plan(cfg, cpu, traced=False).problems)


def test_copies_of_steps_take_shared_memory(cfg, node):
    without = make_plan(cfg, node, traced=False)
    cfg.trainer.copy_steps = True
    plan = make_plan(cfg, node, traced=False)
    states = 2 * 12 * plan.roles[0].model.total
    assert plan.problems == without.problems and states <= plan.host - without.host < 1.1 * states
    small = replace(node, device=replace(node.device, host_memory=16 * GB))
    (problem,) = [one for one in make_plan(cfg, small, traced=False).problems if "copies of steps" in one]
    assert problem.startswith("shared memory: ") and problem.endswith("or choose trainer.copy_steps=false")


def test_supervised_training_has_no_engines(cfg, node):
    cfg.trainer.task, cfg.rollout.colocate, cfg.trainer.offload = "sft", False, "none"
    plan = make_plan(cfg, node, traced=False)
    assert plan.engine is None and [member.name for member in plan.members] == ["rank"]
    assert set(plan.time.phases) == {"update", "other"}


def test_a_model_with_a_state_along_the_row_gets_one_sequence_at_a_time(cfg, node, save_config):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    cfg.model.path = save_config("qwen3_next", **experts)
    plan = make_plan(cfg, node, traced=False)
    assert [row.lengths for row in plan.roles[0].rows] == [(1024,)] * 2


def test_a_disk_holds_the_checkpoints_and_exports_that_are_kept(cfg, node):
    cfg.trainer.total_steps, cfg.trainer.ckpt_interval, cfg.trainer.max_ckpts_to_keep = 21, 10, -1
    disk = make_plan(cfg, node, traced=False).disk
    assert disk.checkpoint == 12 * 596_049_920 and disk.total == 3 * disk.checkpoint
    assert disk.interval_steps == 10
    cfg.trainer.max_ckpts_to_keep, cfg.trainer.hf_save_interval = 2, 7
    disk = make_plan(cfg, node, traced=False).disk
    assert disk.export == 2 * 596_049_920 and disk.total == 2 * disk.checkpoint + 3 * disk.export
    cfg.trainer.policy.lora.rank = 8
    assert make_plan(cfg, node, traced=False).disk.checkpoint < 0.1 * disk.checkpoint


# Time


def test_an_update_runs_at_the_share_of_the_peak(cfg, node):
    cfg.model.path, cfg.trainer.num_workers, cfg.rollout.num_engines = "Qwen/Qwen3-8B", 1, 1
    plan = make_plan(cfg, node, traced=False)
    flops = 6 * 8_190_735_360 * plan.workload.computed_tokens
    reached = flops / plan.time.phases["update"] / node.device.flops_bfloat16
    assert 0.3 < reached < 0.5  # the output layer sees completions alone, attention is not in `flops`
    cfg.trainer.num_workers = 2
    assert seconds(cfg, node) == pytest.approx(plan.time.phases["update"] / 2, rel=0.15)
    cfg.trainer.policy.fsdp.activation_checkpointing = "full"
    assert 1.2 < seconds(cfg, node) / (plan.time.phases["update"] / 2) < 1.4


def test_a_slow_network_is_seen_between_nodes(cfg, node):
    cfg.model.path = "Qwen/Qwen3-32B"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 16
    cfg.trainer.max_tokens_per_micro_batch = 2048
    slow = Cluster(2, 8, replace(node.device, network=node.device.network / 8))
    between = seconds(cfg, slow)
    assert between > 2.5 * seconds(cfg, Cluster(2, 8, node.device))
    cfg.trainer.dp_replicate = 2  # each node holds a copy
    assert seconds(cfg, slow) < between


def test_rollouts_take_as_long_as_their_completions(cfg, node):
    cfg.plan.response_tokens = 100
    short = seconds(cfg, node, "rollout")
    cfg.rollout.max_response_tokens = 2048
    assert 3 < seconds(cfg, node, "rollout") / short < 4.1  # a few take as long as the longest
    cfg.rollout.max_response_tokens = 512
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size = 2048, 1024
    many = seconds(cfg, node, "rollout")
    cfg.plan.response_tokens = 400
    assert 3 < seconds(cfg, node, "rollout") / many < 6


def test_an_engine_generates_all_turns_of_an_episode(cfg, node):
    before = seconds(cfg, node, "rollout")
    cfg.environment.name = "package:Class"
    cfg.environment.max_tokens, cfg.environment.max_turns = 512 + 4 * 512, 8
    assert 4 < seconds(cfg, node, "rollout") / before < 6  # 2,304 tokens one after another, instead of 512


def test_engines_that_work_ahead_hide_the_shorter_part(cfg, node):
    on_two_halves(cfg)
    one_by_one = make_plan(cfg, node, traced=False).time
    cfg.rollout.ahead = 1
    ahead = make_plan(cfg, node, traced=False).time
    rollout = one_by_one.phases["rollout"]
    assert ahead.overlaps and ahead.total == max(rollout, one_by_one.total - rollout) < one_by_one.total
    assert ahead.tokens_per_s == ahead.tokens / ahead.total


def test_weights_and_adapters_take_time_to_the_engines(cfg, node):
    on_two_halves(cfg)
    small = seconds(cfg, node, "sync")
    cfg.trainer.policy.lora.rank = 8
    assert seconds(cfg, node, "sync") < small
    cfg.trainer.policy.lora.rank, cfg.model.path = None, "Qwen/Qwen3-8B"
    assert 3 < seconds(cfg, node, "sync") / small < 20


def test_states_that_move_to_the_host_take_time(cfg, node):
    copies = seconds(cfg, node, "copies")
    cfg.trainer.offload = "optimizer"
    assert 0 < seconds(cfg, node, "copies") < copies
    before = seconds(cfg, node)
    cfg.trainer.policy.fsdp.cpu_offload = True
    assert seconds(cfg, node) > before


def test_tokens_take_the_time_of_the_experts_that_they_pass_through(cfg, node, save_config):
    experts = {"num_experts": 64, "moe_intermediate_size": 2048, "hidden_size": 2048}
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.rollout.max_num_seqs = 1, 1, 1
    times = []
    for count in (4, 64):
        cfg.model.path = save_config("qwen3_moe", num_experts_per_tok=count, **experts)
        times.append((seconds(cfg, node), seconds(cfg, node, "rollout")))
    assert 5 < times[1][0] / times[0][0] < 16
    assert times[1][1] > 1.5 * times[0][1]


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ({}, 0.5),
        ({"old_logprobs": "rollout"}, 0.0),
        ({"rollout_correction": "tis"}, 0.5),
        ({"kl_in": "reward"}, 0.5),  # without a reference
        ({"kl_in": "reward", "kl_coef": 0.1}, 1.0),
    ],
)
def test_rows_are_scored_as_the_objective_asks(cfg, overrides, share):
    for name, value in overrides.items():
        setattr(cfg.algorithm, name, value)
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size = 8, 4
    group_ids = np.arange(8).repeat(cfg.rollout.n)
    batch = {"group_ids": group_ids, "lengths": np.ones_like(group_ids), "rollout_logprobs": group_ids}
    scored = [score.rows for score in PolicyGradient(cfg).computes(batch, 1) if score.role == "policy"]
    assert sum(map(len, scored)) / len(group_ids) == share
    assert scored_share(cfg, policy_role(cfg), workload_of(cfg, dict.fromkeys(AXES, 1))) == share


# Time on CPU, beside seconds of the processor that ranks and jobs took in runs of `benchmarks.plan`


MEMORY = 25_276_510_208
MACHINE = Cluster(1, 2, Device("cpu", MEMORY, 94e9, 9.8e9, 18.7e9, 1.56e9, 1.56e9, 18.7e9, MEMORY, 18.7e9))
"""The speeds that the plan had measured of that machine."""
UPDATES = {"grpo": 3.02, "sharded": 1.68, "tp": 1.99, "cp": 2.09, "recompute": 2.08, "selective": 3.58, "ppo": 3.10}
STEPS = {  # mean tokens of prompts and completions, and of the longest one; seconds of rollout, scores, update
    "demo grpo": ((9, 8, 12), (0.60, 0.22, 0.38)),
    "demo grpo 2 ranks": ((9, 8, 12), (0.69, 0.17, 0.29)),
    "demo ppo": ((9, 8, 12), (0.62, 0.43, 0.82)),
    "17M grpo": ((8, 64, 64), (2.34, 1.11, 3.50)),
}


def test_updates_on_cpu_take_about_what_ranks_took(save_config):
    assert {*UPDATES, "bfloat16"} == CONFIGS.keys()
    path = save_config("qwen3", **sizes_of(SHAPE))
    planned = {name: seconds(config_of(path, name), MACHINE) for name in UPDATES}
    ratios = {name: planned[name] / measured for name, measured in UPDATES.items()}
    assert all(1 / 1.6 < ratio < 1.6 for ratio in ratios.values()), ratios


def test_steps_on_cpu_take_about_what_jobs_took(save_config):
    path = save_config("qwen3", **sizes_of(SHAPES["17M"]))
    ratios = {}
    for name, ((prompt, response, longest), measured) in STEPS.items():
        lengths = [f"plan.prompt_tokens={prompt}", f"plan.response_tokens={response}"]
        words = [word.replace("MODEL", path) for word in JOBS[name]]
        cfg = compose([*words, *lengths, f"rollout.max_response_tokens={longest}"])
        phases = make_plan(cfg, MACHINE, traced=False).time.phases
        for phase, value in zip(("rollout", "scores", "update"), measured, strict=True):
            ratios[name, phase] = phases[phase] / value
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios
