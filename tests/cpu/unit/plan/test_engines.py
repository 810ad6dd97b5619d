"""Memory of engines."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.config import compose, policy_role
from trainer.errors import UserError
from trainer.generation.engine import Request, Sampling
from trainer.generation.transformers_engine import TransformersEngine
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.axes import AXES
from trainer.plan.activations import TensorMemory
from trainer.plan.engines import engine_problem, plan_engine
from trainer.plan.hardware import CONTEXT_BYTES, DEVICES, prefill_tokens
from trainer.plan.model_shape import shape_of
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
    taken = engine.weights + engine.kv_cache + engine.workspace
    assert taken + CONTEXT_BYTES == pytest.approx(0.6 * node.device.memory, rel=1e-6)
    assert engine.bytes_per_token == 28 * 8 * 128 * 2 * 2
    assert problem_of(cfg, node) is None
    cfg.rollout.engine, cfg.rollout.colocate = "server", False
    assert engine_of(cfg, node) is None


def test_a_prefill_takes_what_vllm_profiles(cfg, node):
    for gpu, tokens in (("a100", 8192), ("l40s", 8192), ("h100", 16384), ("h200", 16384), ("b200", 16384)):
        assert prefill_tokens(DEVICES[gpu]) == tokens
    for path, tp, numbers in (
        ("Qwen/Qwen3-0.6B", 1, 3 * 3072 + 4 * 1024),  # gate, up and their product; two inputs and two results
        ("Qwen/Qwen3-8B", 2, 3 * 6144 + 4 * 4096),
        ("meta-llama/Llama-3.3-70B-Instruct", 4, 3 * 28672 // 4 + 4 * 8192),
    ):
        cfg.model.path, cfg.rollout.tensor_parallel_size, cfg.rollout.num_engines = path, tp, 8 // tp
        engine = engine_of(cfg, node)
        assert engine.workspace - engine.graphs == 2 * 16384 * numbers


@pytest.mark.parametrize(("tp", "bytes_of_logit"), [(1, 2 + 4), (2, 2 * 3 + 4)])
def test_the_logits_of_many_sequences_take_more_than_a_short_prefill(cfg, node, tp, bytes_of_logit):
    cfg.rollout.tensor_parallel_size, cfg.rollout.num_engines = tp, 8 // tp
    cfg.rollout.max_num_seqs, cfg.rollout.engine_args = 1024, {"max_num_batched_tokens": 2048}
    engine = engine_of(cfg, node)
    assert engine.workspace - engine.graphs == 2 * 2048 * 1024 + 1024 * 151_936 * bytes_of_logit


@pytest.mark.parametrize(("prompt", "response", "rows", "layers"), [(256, 16, 16, 4), (16, 48, 48, 4)])
def test_transformers_on_cpu_takes_what_is_planned(tmp_path, cpu, prompt, response, rows, layers):
    """It has no cache of a fixed size. The prompts take most, or the rows that run together."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    build_tiny(TinyShape(num_layers=layers, **shape), str(tmp_path))
    words = [f"model.path={tmp_path}", "rollout=transformers", "rollout.n=4", f"rollout.max_prompt_tokens={prompt}"]
    words += [f"rollout.max_response_tokens={response}", f"trainer.train_batch_size={rows // 4}"]
    cfg = compose([*words, f"trainer.mini_batch_size={rows // 4}"])
    planned = engine_of(cfg, cpu)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=response, stop_token_ids=())
    requests = [Request(np.arange(prompt) % 250, seed, sampling) for seed in range(rows)]
    engine = TransformersEngine(str(tmp_path), dtype="float32", seed=0, rollout=cfg.rollout, device="cpu")
    with TensorMemory() as memory:
        engine.generate(requests)
    assert planned.kv_cache + planned.workspace == pytest.approx(memory.peak, rel=0.15)


def test_engines_need_room_for_their_weights_gpus_and_longest_sequence(cfg, node):
    def problem(**values) -> str | None:
        for name, value in values.items():
            setattr(cfg.rollout, name, value)
        return problem_of(cfg, node)

    assert problem(num_engines=9) == "rollout.num_engines=9: there is room for 8 engines of 1 GPUs of one node"
    assert "the longest sequence has 1,000,512 tokens" in problem(num_engines=8, max_response_tokens=1_000_000)
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    assert problem(max_response_tokens=512) == "the weights leave no room for a KV cache"
    assert problem(num_engines=1, tensor_parallel_size=8) is None
    assert engine_of(cfg, node).weights == pytest.approx(2 * 70.55e9 / 8, rel=1e-3)
    assert "a node has 8" in problem(tensor_parallel_size=16)
    cfg.model.path = "Qwen/Qwen2.5-7B"
    assert problem(tensor_parallel_size=8).endswith("must divide the number of attention heads, 28")


LATENT = {
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 32},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 4},
}


def test_layers_keep_what_their_kind_keeps(cfg, node, save_config):
    """Two key heads of 16 dimensions in two bytes, in four layers: 128 bytes of a token in each."""

    def cache(model_type: str, **values):
        cfg.model.path = save_config(model_type, **values)
        return engine_of(cfg, node).cache

    assert cache("qwen3").size(100) == 4 * 128 * 100
    assert cache("mistral", sliding_window=10).size(100) == 4 * 128 * 10
    assert cache("gpt_oss", sliding_window=10, num_local_experts=2).size(100) == 2 * 128 * 110  # every other layer
    assert cache("deepseek_v3", **LATENT).size(100) == 4 * (64 + 16) * 2 * 100
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    state = cache("qwen3_next", **experts)
    assert state.size(100) - state.size(0) == 128 * 100 and state.states > 0  # one layer of four has keys
    with pytest.raises(UserError, match="engines for models of the type gemma3n_text cannot be planned"):
        cache("gemma3n_text", num_kv_shared_layers=2)
