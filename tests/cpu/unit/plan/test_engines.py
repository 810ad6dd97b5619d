"""Memory of engines."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Qwen3Config

from trainer.config import TinyConfig, compose, policy_role
from trainer.config.axes import AXES
from trainer.generation.engine import Request, Sampling
from trainer.generation.transformers_engine import TransformersEngine
from trainer.models.tiny import build_tiny
from trainer.plan.engines import engine_problem, numbers_of_layer, plan_engine
from trainer.plan.hardware import DEVICES, Cluster, prefill_tokens
from trainer.plan.levers import has_gpus
from trainer.plan.meter import MemoryMeter
from trainer.plan.model_shape import shape_of
from trainer.plan.plan import make_plan
from trainer.plan.workload import workload_of

ALONE = dict.fromkeys(AXES, 1)


def engine_of(cfg, cluster):
    return plan_engine(cfg, shape_of(cfg, policy_role(cfg), ALONE), cluster.device, workload_of(cfg, ALONE))


def problem_of(cfg, cluster):
    shape = shape_of(cfg, policy_role(cfg), ALONE)
    return engine_problem(cfg, cluster, engine_of(cfg, cluster), workload_of(cfg, ALONE), shape)


def test_the_cache_takes_what_is_left(cfg, node):
    engine = engine_of(cfg, node)
    assert engine.weights == 2 * 596_049_920 and engine.gpus == 1
    assert engine.budget == pytest.approx(0.6 * node.device.memory, rel=1e-6)
    assert 0.8 * engine.budget < engine.total < engine.budget
    assert engine.tokens > 300_000
    assert problem_of(cfg, node) is None


@pytest.mark.parametrize(
    ("gpu", "tokens"), [("a100", 8192), ("l40s", 8192), ("h100", 16384), ("h200", 16384), ("b200", 16384)]
)
def test_a_prefill_batch_is_that_of_vllm(cfg, gpu, tokens):
    assert prefill_tokens(DEVICES[gpu]) == tokens
    taken = []
    for cfg.rollout.engine_args in ({}, {"max_num_batched_tokens": tokens}, {"max_num_batched_tokens": 2048}):
        taken.append(engine_of(cfg, Cluster(1, 8, DEVICES[gpu])).workspace)
    assert taken[0] == taken[1] > taken[2]


@pytest.mark.parametrize(
    ("path", "tp", "numbers"),
    [
        ("Qwen/Qwen3-0.6B", 1, 3 * 3072 + 4 * 1024),  # gate, up and their product; two inputs and two results
        ("Qwen/Qwen3-8B", 1, 3 * 12288 + 4 * 4096),
        ("Qwen/Qwen3-8B", 2, 3 * 6144 + 4 * 4096),
        ("meta-llama/Llama-3.3-70B-Instruct", 4, 3 * 28672 // 4 + 4 * 8192),
    ],
)
def test_a_prefill_takes_what_vllm_profiles(cfg, node, path, tp, numbers):
    cfg.model.path, cfg.rollout.tensor_parallel_size, cfg.rollout.num_engines = path, tp, 8 // tp
    engine = engine_of(cfg, node)
    assert engine.workspace - engine.graphs == 2 * 16384 * numbers


@pytest.mark.parametrize(
    ("inner", "heads", "measured"), [(3072, 6, 13831), (1152, 6, 6148), (384, 6, 3458), (384, 12, 4611)]
)
def test_a_prefill_of_vllm_on_cpu_takes_what_was_measured(inner, heads, measured):
    """Numbers for each of 2,000 tokens of a prompt, as `MemoryMeter` has counted them in vLLM 0.32."""
    sizes = {"hidden_size": 384, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 2}
    assert numbers_of_layer(Qwen3Config(**sizes, head_dim=64), 1, on_cpu=True) == pytest.approx(measured, rel=0.01)


def test_attention_takes_most_in_models_with_wide_heads(save_config, cfg, node):
    cfg.model.path = save_config("qwen3", head_dim=256, num_attention_heads=4, num_key_value_heads=2)
    engine = engine_of(cfg, node)
    assert engine.workspace - engine.graphs == 2 * 16384 * (3 * 6 * 256 + 3 * 64)


def test_experts_take_buffers_for_each_expert_of_a_token(save_config, cfg, node):
    cfg.model.path = save_config("qwen3_moe", num_experts_per_tok=8, moe_intermediate_size=48)
    engine = engine_of(cfg, node)
    assert engine.workspace - engine.graphs == 2 * 16384 * (8 * (64 + 96) + 4 * 64)


@pytest.mark.parametrize(("tp", "bytes_of_logit"), [(1, 2 + 4), (2, 2 * 2.5 + 4)])
def test_the_logits_of_many_sequences_take_more_than_a_short_prefill(cfg, node, tp, bytes_of_logit):
    cfg.rollout.tensor_parallel_size, cfg.rollout.num_engines = tp, 8 // tp
    cfg.rollout.max_num_seqs, cfg.rollout.engine_args = 1024, {"max_num_batched_tokens": 2048}
    engine = engine_of(cfg, node)
    logits = 1024 * 151_936 * bytes_of_logit
    assert engine.workspace - engine.graphs == 2 * 2048 * 1024 + logits


def test_transformers_holds_the_rows_that_run_together(cfg, node):
    """It takes no share of the GPU: `rollout.gpu_memory_utilization` is not read."""
    cfg.rollout.engine = "transformers"
    engine = engine_of(cfg, node)
    rows = cfg.trainer.train_batch_size * cfg.rollout.n // 8
    assert engine.kv_cache == rows * 1024 * 114_688
    assert engine.sequences(1024) == rows and engine.graphs == 0
    cfg.rollout.max_num_seqs = 4
    few = engine_of(cfg, node)
    assert few.kv_cache == 4 * 1024 * 114_688
    cfg.rollout.gpu_memory_utilization = 0.1
    assert engine_of(cfg, node) == few and problem_of(cfg, node) is None


@pytest.mark.parametrize(
    ("prompt", "response", "rows", "layers"), [(256, 16, 16, 4), (16, 100, 16, 4), (32, 32, 64, 8)]
)
def test_transformers_on_cpu_takes_what_is_planned(tmp_path, cpu, prompt, response, rows, layers):
    """It has no cache of `rollout.kv_cache_mb`. The prompts take most, or the rows that run together."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    build_tiny(TinyConfig(num_layers=layers, **shape), str(tmp_path))
    words = [f"model.path={tmp_path}", "rollout=transformers", "rollout.n=4", f"rollout.max_prompt_tokens={prompt}"]
    words += [f"rollout.max_response_tokens={response}", f"trainer.train_batch_size={rows // 4}"]
    cfg = compose([*words, f"trainer.mini_batch_size={rows // 4}"])
    planned = engine_of(cfg, cpu)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=response, stop_token_ids=())
    requests = [Request(np.arange(prompt) % 250, seed, sampling) for seed in range(rows)]
    engine = TransformersEngine(str(tmp_path), dtype="float32", seed=0, rollout=cfg.rollout, device="cpu")
    with MemoryMeter() as meter:
        engine.generate(requests)
    assert planned.kv_cache + planned.workspace == pytest.approx(meter.peak, rel=0.15)
    cfg.rollout.kv_cache_mb = 10 * cfg.rollout.kv_cache_mb
    assert engine_of(cfg, cpu) == planned and planned.gpus == 0


def test_weights_are_split_over_the_gpus_of_an_engine(cfg, node):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    assert problem_of(cfg, node) == "the weights leave no room for a KV cache"
    cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 1, 8
    engine = engine_of(cfg, node)
    assert engine.weights == pytest.approx(2 * 70.55e9 / 8, rel=1e-3)
    assert problem_of(cfg, node) is None


def test_the_gpus_of_an_engine_divide_the_attention_heads(cfg, node):
    cfg.model.path = "Qwen/Qwen2.5-7B"
    cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 1, 4
    assert problem_of(cfg, node) is None
    cfg.rollout.tensor_parallel_size = 8
    problem = problem_of(cfg, node)
    assert problem == "rollout.tensor_parallel_size=8 must divide the number of attention heads, 28"


def test_the_gpus_of_an_engine_are_on_one_node(cfg, node):
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 8, 1, 8
    assert problem_of(cfg, node) is None
    half = Cluster(2, 4, node.device)
    problem = problem_of(cfg, half)
    assert problem == "rollout.tensor_parallel_size=8: the GPUs of an engine are on one node, and a node has 4"
    assert not make_plan(cfg, half).fits


@pytest.mark.parametrize(("size", "needs"), [(1, "a GPU"), (2, "2 GPUs of one node")])
def test_too_many_engines_are_refused_with_what_each_needs(cfg, node, size, needs):
    cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 9, size
    sentence = f"rollout.num_engines=9: each needs {needs}, and with 8 GPUs a node there are GPUs that ranks have for "
    assert problem_of(cfg, node) == f"{sentence}{8 // size}"


@pytest.mark.parametrize("colocate", [True, False])
def test_whole_engines_fill_each_node(cfg, node, colocate):
    """Nodes of six GPUs have room for one engine of four, although three engines need no more GPUs than there are."""
    cfg.trainer.num_workers = 12 if colocate else 2
    cfg.rollout.colocate, cfg.trainer.offload = colocate, "all" if colocate else "none"
    cfg.rollout.num_engines, cfg.rollout.tensor_parallel_size = 3, 4
    cluster = Cluster(2 if colocate else 3, 6, node.device)
    problem = problem_of(cfg, cluster)
    assert (problem is None) != colocate and has_gpus(cfg, cluster) != colocate
    cfg.rollout.num_engines, cfg.trainer.num_workers = (2, 12) if colocate else (4, 2)
    assert (problem_of(cfg, cluster) is None) == has_gpus(cfg, cluster) == colocate


def test_the_longest_sequence_must_fit(cfg, node):
    cfg.rollout.max_response_tokens = 1_000_000
    problem = problem_of(cfg, node)
    assert problem is not None and "the longest sequence has 1,000,512" in problem


def test_an_engine_on_cpu_has_the_cache_of_the_config(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate = None, False
    engine = engine_of(cfg, cpu)
    assert engine.kv_cache == 128 * 2**20 and engine.gpus == 0
    assert engine.bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_servers_take_nothing_of_the_job(cfg, node):
    cfg.rollout.engine, cfg.rollout.colocate = "server", False
    assert engine_of(cfg, node) is None
