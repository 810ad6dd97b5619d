"""What engines keep of a sequence, beside what vLLM 0.32 keeps of small models."""

from __future__ import annotations

import pytest

from trainer.config import Config, policy_role
from trainer.config.axes import AXES
from trainer.errors import UserError
from trainer.plan.kv_cache import SequenceCache, cache_of
from trainer.plan.model_shape import _shapes, shape_of
from trainer.plan.plan import make_plan

SMALL = {"hidden_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}
LATENT = {
    **{"num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 3, "kv_lora_rank": 64, "q_lora_rank": 32},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
STATES = {
    **{"head_dim": 32, "num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
MEASURED = [
    ("gemma3_text", {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 128}, 17.81),
    ("mistral", {"head_dim": 32, "sliding_window": 128}, 31.03),
    ("deepseek_v3", LATENT, 68.27),
    ("qwen3_next", STATES, 46.55),
]
"""Types of models, their shapes, and how many sequences of 1,024 tokens vLLM says that 64 MiB hold, in float32."""


def cache(path: str, itemsize: int = 4, tp: int = 1) -> SequenceCache:
    cfg = Config()
    cfg.model.path = path
    return cache_of(cfg, shape_of(cfg, policy_role(cfg), dict.fromkeys(AXES, 1)), itemsize, tp)


@pytest.mark.parametrize(("model_type", "values", "sequences"), MEASURED)
def test_as_many_sequences_fit_as_vllm_says(save_config, model_type, values, sequences):
    found = cache(save_config(model_type, **{**SMALL, **values}))
    assert 64 * 2**20 / found.size(1024, in_flight=8192) == pytest.approx(sequences, rel=0.05)


def test_a_token_has_keys_and_values_in_each_layer():
    assert cache("Qwen/Qwen3-0.6B", 2).size(1) == 2 * 28 * 8 * 128 * 2 == 114_688
    assert cache("Qwen/Qwen3-0.6B", 2, 4).size(1) == 114_688 / 4
    assert cache("Qwen/Qwen3-0.6B", 2, 16) == cache("Qwen/Qwen3-0.6B", 2, 8)  # each GPU has a whole head


def test_latent_attention_keeps_a_vector_and_a_key_on_each_gpu(save_config):
    path = save_config("deepseek_v3", **{**SMALL, **LATENT})
    assert cache(path, 2) == cache(path, 2, 4) == SequenceCache(3 * (64 + 16) * 2)


def test_layers_with_a_window_keep_its_tokens(save_config):
    path = save_config("gemma3_text", **SMALL, num_hidden_layers=12, sliding_window=128)  # two of them have none
    token = 2 * 2 * 16 * 4
    assert cache(path).size(100) == 12 * 100 * token
    assert cache(path).size(1000) == (2 * 1000 + 10 * 128) * token
    assert cache(path).size(1000, in_flight=50) == (2 * 1000 + 10 * 178) * token


def test_groups_of_layers_have_the_same_size(save_config):
    path = save_config("gemma3_text", **SMALL, num_hidden_layers=17, sliding_window=128)
    assert cache(path).window_token / cache(path).token == 16 / 2  # 15 layers have a window, and two have none


def test_layers_with_states_keep_as_much_of_short_sequences(save_config):
    path = save_config("qwen3_next", **{**SMALL, **STATES})
    found = cache(path, 2)
    assert found.size(1) == found.size(found.block) == found.states + 2 * found.block * 2 * 2 * 32 * 2
    assert found.states == 6 * 2 * found.block * 2 * 2 * 32 * 2 > 6 * 2 * 2 * 4 * 32 * 32


def test_a_model_that_trains_with_eager_attention_alone_is_planned_with_it(save_config, node, cfg):
    cfg.model.path, cfg.model.attn_implementation = save_config("gpt_oss", num_local_experts=4), "eager"
    engine = make_plan(cfg, node, traced=False).engine
    assert engine.cache.window == 128 and engine.cache.window_token == engine.cache.token


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("granitemoehybrid", {}, "the size of the states of its layers is not known"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "what layers of the kind conv keep is not known"),
        ("minicpm3", {}, "its latent attention is not known"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence(save_config, node, cfg, model_type, values, reason):
    cfg.model.path = save_config(model_type, **values)
    with pytest.raises(
        UserError, match=rf"^model\.path=\S+: engines for models of the type {model_type} [^\n]*{reason}"
    ):
        make_plan(cfg, node, traced=False)


def test_short_windows_leave_room_for_more_sequences(save_config, node, cfg):
    sequences = []
    for window in (64, 4096):
        cfg.model.path = save_config("gemma3_text", num_hidden_layers=12, sliding_window=window)
        _shapes.clear()  # the directory has another config
        engine = make_plan(cfg, node, traced=False).engine
        sequences.append(engine.sequences(1024))
    assert sequences[0] > 3 * sequences[1]


def test_vllm_starts_only_with_room_for_a_sequence_without_windows(save_config, cpu, cfg):
    """While it computes a prompt, layers with a window keep all of its tokens."""
    cfg.rollout.max_response_tokens = 128
    cfg.model.path = save_config("gemma3_text", num_hidden_layers=12, sliding_window=64)
    cfg.rollout.colocate, cfg.trainer.offload, cfg.rollout.kv_cache_mb = False, "none", 1
    plans = []
    for cfg.rollout.max_prompt_tokens in (128, 512):
        plans.append(make_plan(cfg, cpu, traced=False))
    assert plans[0].fits and not plans[1].fits and plans[1].engine.sequences(640) > 1
    assert "the longest sequence has 640 tokens, which may take 2 MiB" in plans[1].problems[0]


def test_vllm_has_no_states_on_cpu(save_config, cpu, cfg):
    """It caches prefixes there only with prefills in chunks, and a seeded request in chunks kills it."""
    cfg.model.path = save_config("qwen3_next", **{**SMALL, **STATES})
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    assert "choose rollout=transformers" in make_plan(cfg, cpu, traced=False).problems[0]
    cfg.rollout.engine = "transformers"
    assert make_plan(cfg, cpu, traced=False).fits
