"""The time of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.config import policy_role
from trainer.config.axes import AXES
from trainer.objectives.policy_gradient import PolicyGradient
from trainer.plan.hardware import CALL_RANK_S, CALL_ROW_S, Cluster
from trainer.plan.model_shape import _shapes
from trainer.plan.plan import make_plan
from trainer.plan.timing import _Passes
from trainer.plan.workload import scored_share, workload_of


def seconds(cfg, cluster, phase="update"):
    return make_plan(cfg, cluster).time.phases[phase]


def test_an_update_runs_at_the_share_of_the_peak(cfg, node):
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    plan = make_plan(cfg, node)
    flops = 6 * 596_049_920 * plan.workload.computed_tokens
    reached = flops / plan.time.phases["update"] / node.device.flops_bfloat16
    assert 0.3 < reached < 0.5  # the output layer sees completions alone, attention is not in `flops`


def test_twice_the_ranks_take_half_the_time(cfg, node):
    cfg.model.path = "Qwen/Qwen3-8B"
    times = []
    for cfg.trainer.num_workers in (2, 4):
        cfg.rollout.num_engines = 2
        times.append(seconds(cfg, node))
    assert times[0] / times[1] == pytest.approx(2, rel=0.15)


def test_recomputation_takes_a_third_more(cfg, node):
    before = seconds(cfg, node)
    cfg.trainer.policy.fsdp.activation_checkpointing = "full"
    assert 1.2 < seconds(cfg, node) / before < 4 / 3  # what a call takes stays the same


def test_a_slow_network_is_seen_between_nodes(cfg, node):
    cfg.model.path = "Qwen/Qwen3-32B"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 16
    cfg.trainer.max_tokens_per_micro_batch = 2048
    cfg.trainer.policy.fsdp.reduce_gradients = "mini_batch"  # gathers count
    two = Cluster(2, 8, node.device)
    slow = Cluster(2, 8, replace(node.device, network=node.device.network / 8))
    between = seconds(cfg, slow)
    assert between > 2.5 * seconds(cfg, two)
    cfg.trainer.dp_replicate = 2  # each node holds a copy
    assert seconds(cfg, slow) < between


def test_a_few_completions_take_as_long_as_the_longest(cfg, node):
    cfg.plan.response_tokens = 100
    short = seconds(cfg, node, "rollout")
    cfg.rollout.max_response_tokens = 2048
    assert 3.5 < seconds(cfg, node, "rollout") / short < 4.1


def test_longer_completions_take_longer(cfg, node):
    cfg.plan.response_tokens = 100
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size = 2048, 1024  # many for each engine
    short = seconds(cfg, node, "rollout")
    cfg.plan.response_tokens = 400
    assert 3.5 < seconds(cfg, node, "rollout") / short < 6


def test_engines_that_work_ahead_hide_the_shorter_part(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    one_by_one = make_plan(cfg, node).time
    cfg.rollout.ahead = 1
    ahead = make_plan(cfg, node).time
    rollout = one_by_one.phases["rollout"]
    assert ahead.overlaps and ahead.total == max(rollout, one_by_one.total - rollout) < one_by_one.total
    assert ahead.tokens_per_s == ahead.tokens / ahead.total


def test_ranks_share_cores(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 1
    two = seconds(cfg, cpu)
    cfg.trainer.num_workers = 8
    assert seconds(cfg, cpu) == pytest.approx(two, rel=0.3)


@pytest.mark.parametrize("colocate", [True, False])
def test_weights_take_time_to_the_engines(cfg, node, colocate):
    cfg.rollout.colocate = colocate
    cfg.trainer.offload = "all" if colocate else "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    small = seconds(cfg, node, "sync")
    cfg.model.path = "Qwen/Qwen3-8B"
    assert 3 < seconds(cfg, node, "sync") / small < 20


def test_only_the_adapter_goes_to_engines_that_serve_it(cfg, node):
    """Rank 8 in two layers of 28 blocks: q_proj is 1024 x 2048, v_proj is 1024 x 1024."""
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.target_modules = 8, ["q_proj", "v_proj"]
    size, tensors = 4 * 28 * 8 * (1024 + 2048 + 1024 + 1024), 28 * 4
    gather = size / (0.7 * 450e9) + tensors * 2e-5 * 2
    on_host = 2 * size / 51e9 + 12 * size / (0.7 * 614e9 / 8)
    adapter = seconds(cfg, node, "sync")
    assert adapter == pytest.approx(gather + on_host)
    far = seconds(cfg, Cluster(2, 8, node.device), "sync")
    assert far - adapter == pytest.approx(size / (0.7 * 50e9))
    cfg.rollout.lora_sync = "merged"
    assert seconds(cfg, node, "sync") > 1.5 * adapter


def test_only_the_adapter_goes_to_engines_on_cpu(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.trainer.policy.lora.rank = 1, 1, 8
    plan = make_plan(cfg, cpu, traced=False)
    trained = [parameter.trained for parameter in plan.roles[0].model.parameters]
    moved = 12 * 4 * plan.roles[0].model.trained
    assert plan.time.phases["sync"] == pytest.approx(moved / 1e10 + sum(trained) * 1e-4)


def test_tokens_take_the_time_of_the_experts_that_they_pass_through(cfg, node, save_config):
    experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "hidden_size": 2048}
    times = []
    for experts["num_experts_per_tok"] in (4, 64):
        cfg.model.path = save_config("qwen3_moe", **experts)
        _shapes.clear()  # the directory has another config
        cfg.trainer.num_workers, cfg.rollout.num_engines = 1, 1  # nothing is gathered
        times.append((seconds(cfg, node), seconds(cfg, node, "rollout")))
    assert 5 < times[1][0] / times[0][0] < 16
    assert 1 < times[1][1] / times[0][1] < 16


def test_one_sequence_reads_the_experts_of_its_token_alone(cfg, node, save_config):
    experts = {"num_experts": 64, "moe_intermediate_size": 2048, "hidden_size": 2048}
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.rollout.max_num_seqs = 1, 1, 1
    times = []
    for count in (4, 64):
        cfg.model.path = save_config("qwen3_moe", num_experts_per_tok=count, **experts)
        _shapes.clear()  # the directory has another config
        times.append(seconds(cfg, node, "rollout"))
    assert times[1] > 1.5 * times[0]


def test_a_slow_memory_is_seen_on_cpu(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 1, 1
    slow = replace(cpu, device=replace(cpu.device, bandwidth=cpu.device.bandwidth / 8))
    assert seconds(cfg, slow) > 2 * seconds(cfg, cpu)


def test_a_slow_python_is_seen_on_cpu(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 1, 1
    slow = replace(cpu, device=replace(cpu.device, slowness=1000.0))
    for phase in ("update", "rollout"):
        assert seconds(cfg, slow, phase) > 3 * seconds(cfg, cpu, phase), phase


def test_hooks_of_ranks_that_compute_together_count_on_cpu(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 1
    sharded = seconds(cfg, cpu)
    cfg.trainer.tensor_parallel_size = 2
    assert seconds(cfg, cpu) > sharded


def test_half_precision_speeds_up_products_alone_on_cpu(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 1, 1
    fast = replace(cpu, device=replace(cpu.device, flops_float32=1e18, flops_bfloat16=1e18))
    times = []
    for cfg.trainer.policy.fsdp.param_dtype in ("float32", "bfloat16"):
        times.append(seconds(cfg, fast))
    assert 0.8 < times[1] / times[0] < 1.25  # twice as fast with two bytes for each number


def test_an_engine_that_takes_no_more_requests_waits_for_the_longest_of_each_batch(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 1, 1
    cfg.plan.response_tokens, cfg.rollout.max_num_seqs = 8, 8
    times = []
    for cfg.rollout.engine in ("vllm", "transformers"):
        times.append(seconds(cfg, cpu, "rollout"))
    assert times[1] > 1.5 * times[0]


def test_further_batches_are_generated_one_after_another(cfg, node):
    before = seconds(cfg, node, "rollout")
    cfg.algorithm.dynamic_sampling, cfg.plan.gen_batches = True, 2.5
    assert seconds(cfg, node, "rollout") == pytest.approx(2.5 * before)


def test_baselines_are_completions_of_their_own(cfg, node):
    before = make_plan(cfg, node)
    cfg.algorithm.advantage_estimator = "remax"
    after = make_plan(cfg, node)
    more = after.time.phases["rollout"] / before.time.phases["rollout"] - 1
    assert 1 / cfg.rollout.n < more < 1  # a batch of fewer rows is as long as its longest completion
    assert after.workload.rows == before.workload.rows


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ({}, 0.5),
        ({"old_logprobs": "rollout"}, 0.0),
        ({"rollout_correction": "tis"}, 0.5),
        ({"rollout_correction": "tis", "rollout_correction_level": "geometric"}, 1.0),
        ({"kl_in": "reward"}, 0.5),  # without a reference
        ({"kl_in": "reward", "kl_coef": 0.1}, 1.0),
        ({"advantage_estimator": "tests.cpu.unit.plan.test_timing:of_old_logprobs"}, 1.0),
    ],
)
def test_rows_are_scored_as_the_objective_asks(cfg, overrides, share):
    for name, value in overrides.items():
        setattr(cfg.algorithm, name, value)
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size = 8, 4
    group_ids = np.arange(8).repeat(cfg.rollout.n)
    batch = {"group_ids": group_ids, "lengths": np.ones_like(group_ids), "rollout_logprobs": group_ids}
    scored = [score.rows for score in PolicyGradient(cfg).scores(batch, 1) if score.role == "policy"]
    assert sum(map(len, scored)) / len(group_ids) == share
    assert scored_share(cfg, policy_role(cfg), workload_of(cfg, dict.fromkeys(AXES, 1))) == share


def of_old_logprobs(rewards, old_logprobs):
    raise NotImplementedError


MODEL_17M = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 6}
TWO_BLOCKS = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}


EPYC = {"flops_float32": 112e9, "flops_bfloat16": 438e9, "flops_packed": 250e9, "bandwidth": 39e9}
"""Speeds of a core."""
OLDER_EPYC = {
    "flops_float32": 96e9,
    "flops_bfloat16": 9.8e9,
    "flops_packed": 73e9,
    "bandwidth": 19e9,
    "slowness": 11.7 / 4.8,
}
"""The same of a core without AVX-512."""


def decoding_step(cfg, cpu, rows):
    """The seconds of a decoding step with so many sequences, between 4 and 24 tokens."""
    cfg.rollout.colocate, cfg.trainer.offload, cfg.rollout.max_prompt_tokens = False, "none", 16
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.rollout.n = 1, 1, 2
    cfg.plan.prompt_tokens, cfg.rollout.kv_cache_mb = 16, 600
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = rows // 2
    times = []
    for cfg.plan.response_tokens in (4, 24):
        cfg.rollout.max_response_tokens = cfg.plan.response_tokens
        times.append(make_plan(cfg, cpu, traced=False).time.phases["rollout"])
    return (times[1] - times[0]) / 20


@pytest.mark.parametrize(
    ("shape", "vocabulary", "milliseconds"),
    [
        (MODEL_17M, 8192, (5.6, 7.1, 13.3, 37.7)),
        ({**TWO_BLOCKS, "num_hidden_layers": 8}, 512, (2.2, 2.1, 3.8, 8.3)),
        (TWO_BLOCKS, 512, (0.9, 0.9, 1.7, 3.6)),
        (TWO_BLOCKS, 32768, (1.6, 3.1, 10.1, 57.7)),
    ],
)
def test_a_decoding_step_of_vllm_on_cpu_takes_what_was_measured(cfg, cpu, save_config, shape, vocabulary, milliseconds):
    """Processor time of vLLM 0.32 with 2, 8, 32 and 128 sequences, between 4 and 24 tokens, on one core of an EPYC."""
    cpu = replace(cpu, device=replace(cpu.device, **EPYC))
    cfg.model.path = save_config("qwen3", **shape, vocab_size=vocabulary, head_dim=64, tie_word_embeddings=True)
    for rows, measured in zip((2, 8, 32, 128), milliseconds, strict=True):
        assert 1e3 * decoding_step(cfg, cpu, rows) == pytest.approx(measured, rel=0.4, abs=0.5), rows


@pytest.mark.parametrize(
    ("engine", "shape", "vocabulary", "milliseconds"),
    [
        ("vllm", MODEL_17M, 8192, (11.4, 15.5, 30.5, 90.6)),
        ("vllm", {**MODEL_17M, "num_hidden_layers": 2}, 32768, (7.9, 13.0, 33.9, 130.2)),
        ("vllm", {**TWO_BLOCKS, "num_hidden_layers": 8}, 512, (6.4, 6.8, 8.7, 16.5)),
        ("vllm", TWO_BLOCKS, 512, (2.6, 2.9, 4.1, 8.6)),
        ("vllm", TWO_BLOCKS, 32768, (3.8, 6.6, 27.7, 99.2)),
        ("transformers", MODEL_17M, 8192, (14.6, 19.7, 36.7, 105.2)),
        ("transformers", {**MODEL_17M, "num_hidden_layers": 2}, 32768, (15.1, 22.9, 56.4, 206.2)),
        ("transformers", {**TWO_BLOCKS, "num_hidden_layers": 8}, 512, (5.0, 5.4, 6.6, 12.0)),
        ("transformers", TWO_BLOCKS, 512, (1.9, 2.1, 2.7, 5.0)),
        ("transformers", TWO_BLOCKS, 32768, (4.2, 11.2, 36.7, 135.8)),
    ],
)
def test_a_decoding_step_on_a_slower_core_takes_what_was_measured(
    cfg, cpu, save_config, engine, shape, vocabulary, milliseconds
):
    """The same by `benchmarks.decode`."""
    cpu = replace(cpu, device=replace(cpu.device, **OLDER_EPYC))
    shape = {"num_key_value_heads": 2, **shape}
    cfg.model.path = save_config("qwen3", **shape, vocab_size=vocabulary, head_dim=64, tie_word_embeddings=True)
    cfg.rollout.engine = engine
    for rows, measured in zip((2, 8, 32, 128), milliseconds, strict=True):
        assert 1e3 * decoding_step(cfg, cpu, rows) == pytest.approx(measured, rel=0.4, abs=0.5), rows


@pytest.mark.parametrize(
    ("blocks", "vocabulary", "ratios"),
    [
        (8, 8192, (0.77, 0.76, 0.73, 0.71)),
        (8, 512, (0.82, 0.87, 0.73, 0.69)),
        (2, 32768, (0.81, 0.79, 0.80, 0.85)),
    ],
)
def test_half_precision_shortens_a_decoding_step_on_cpu_as_measured(cfg, cpu, save_config, blocks, vocabulary, ratios):
    """Medians of seven ratios of processor time with 2, 8, 32 and 128 sequences, from engines that took turns."""
    cpu = replace(cpu, device=replace(cpu.device, **EPYC))
    shape = {**MODEL_17M, "num_hidden_layers": blocks, "num_key_value_heads": 2}
    cfg.model.path = save_config("qwen3", **shape, vocab_size=vocabulary, head_dim=64, tie_word_embeddings=True)
    for rows, measured in zip((2, 8, 32, 128), ratios, strict=True):
        steps = []
        for cfg.rollout.dtype in ("float32", "bfloat16"):
            steps.append(decoding_step(cfg, cpu, rows))
        assert steps[1] / steps[0] == pytest.approx(measured, abs=0.12), rows


def test_half_precision_gains_nothing_without_its_instructions(cfg, cpu):
    slow = replace(cpu, device=replace(cpu.device, **{**EPYC, "flops_bfloat16": 20e9}))
    cfg.model.path, cfg.rollout.dtype = None, "bfloat16"
    assert decoding_step(cfg, slow, 128) > decoding_step(cfg, replace(cpu, device=replace(cpu.device, **EPYC)), 128)


def test_the_gpus_of_an_engine_add_up_their_results(cfg, node):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 1, 8
    slow = replace(node, device=replace(node.device, link=node.device.link / 100))
    assert seconds(cfg, slow, "rollout") > 2 * seconds(cfg, node, "rollout")


def test_attention_of_wide_heads_takes_longer(cfg, node, save_config):
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 4, "head_dim": 16}
    latent |= {"qk_rope_head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": 32}
    cfg.model.path = save_config("deepseek_v3", **latent, n_routed_experts=8, n_group=2, topk_group=1)
    planned = make_plan(cfg, node, traced=False)
    passes = _Passes(cfg, node, planned.roles[0], planned.workload)
    w = planned.workload
    squares = (w.prompt + w.response) ** 2 - w.prompt**2 * (w.n - 1) / w.n
    assert passes.forward_flops(w.dp)[1] * w.computed_tokens / w.rows == 2 * 4 * 4 * (48 + 32) / 2 * squares


def test_an_engine_generates_all_turns_of_an_episode(cfg, node):
    before = seconds(cfg, node, "rollout")
    cfg.environment.name = "package:Class"
    cfg.environment.max_tokens, cfg.environment.max_turns = 512 + 4 * 512, 8
    assert 4.5 < seconds(cfg, node, "rollout") / before < 6  # 2,304 tokens one after another, instead of 512


def test_transformers_draws_the_noise_of_each_row_on_the_cpu(cfg, node):
    """2.5 ms for each row and decoding step, with a vocabulary of 151,936 tokens."""
    cfg.rollout.engine = "transformers"
    rows = cfg.trainer.train_batch_size * cfg.rollout.n // cfg.rollout.num_engines
    assert seconds(cfg, node, "rollout") > 2.5e-3 * rows * make_plan(cfg, node).workload.response


def test_the_driver_plans_the_rows_of_all_ranks(cfg, node):
    before = seconds(cfg, node, "update")
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size = (
        8 * size for size in (cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size)
    )
    cfg.trainer.num_workers = cfg.rollout.num_engines = 64
    grown = seconds(cfg, Cluster(8, 8, node.device), "update")
    rows = 7 / 8 * cfg.trainer.train_batch_size * cfg.rollout.n
    assert grown - before > 0.9 * (CALL_ROW_S * rows + 56 * CALL_RANK_S)
