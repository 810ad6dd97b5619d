"""FLOPs of attention, beside masks and torch's own counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from trainer.config.axes import AXES
from trainer.models.attention import uses_varlen
from trainer.plan.attention_flops import attention_flops
from trainer.plan.kv_cache import FULL, STATE, WINDOW
from trainer.plan.model_shape import _shapes, find_config
from trainer.plan.plan import make_plan
from trainer.plan.timing import _Passes
from trainer.plan.workload import workload_of

ALONE = dict.fromkeys(AXES, 1)
PROMPT, RESPONSE, SPAN = 40, 60, 24
WIDTH = 4 * 16
"""Of all heads of the small models."""


@pytest.fixture
def lengths(cfg):
    cfg.plan.prompt_tokens, cfg.plan.response_tokens, cfg.rollout.n = PROMPT, RESPONSE, 4
    return cfg


def flops_of(cfg, path, dtype=torch.bfloat16, tp=1):
    cfg.model.path = path
    text = find_config(cfg, cfg.roles[0]).get_text_config()
    return attention_flops(cfg, text, dtype, "cuda", workload_of(cfg, ALONE), tp)


def pairs(length, allowed):
    """The pairs of tokens that a causal mask leaves. The diagonal counts half, as everywhere in this project."""
    query, key = np.mgrid[:length, :length]
    return np.sum((key <= query) & allowed(query, key)) - length / 2


def of_layer(allowed):
    """FLOPs of scores and values in a layer, for the mean row of four that share the prompt."""
    return 4 * WIDTH * (pairs(PROMPT + RESPONSE, allowed) - 3 / 4 * pairs(PROMPT, allowed))


def everything(query, key):
    return np.ones_like(query, bool)


def window(query, key):
    return query - key < SPAN


@pytest.mark.parametrize(("kind", "allowed"), [(FULL, everything), (WINDOW, window)])
def test_layers_compute_the_pairs_that_their_kind_allows(lengths, save_config, kind, allowed):
    assert uses_varlen("cuda", torch.bfloat16, 16, None)
    types = [FULL, FULL, FULL, kind]
    path = save_config("qwen3", layer_types=types, use_sliding_window=True, sliding_window=SPAN)
    measured = flops_of(lengths, path)
    assert measured == pytest.approx(3 * of_layer(everything) + of_layer(allowed), rel=0.02)
    assert flops_of(lengths, path, tp=2) == measured / 2


def test_masks_compute_what_they_hide(lengths, save_config):
    path = save_config("qwen3", layer_types=[WINDOW] * 4, use_sliding_window=True, sliding_window=SPAN)
    all_pairs = pytest.approx(4 * of_layer(everything), rel=0.02)
    assert flops_of(lengths, path) < 0.7 * 4 * of_layer(everything)
    assert flops_of(lengths, path, torch.float32) == all_pairs
    chunks = {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": SPAN, "num_local_experts": 2}
    assert flops_of(lengths, save_config("llama4_text", **chunks)) >= 4 * of_layer(everything)  # it cannot pack rows
    lengths.model.attn_implementation = "eager"
    alone = 4 * 4 * WIDTH * pairs(PROMPT + RESPONSE, everything)  # rows share no prompts
    assert flops_of(lengths, path) == pytest.approx(alone, rel=0.02)


def test_states_take_the_products_of_their_chunks(lengths, save_config):
    heads, key, value, length = 4, 16, 24, 128
    delta = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": 4}
    delta |= {"linear_key_head_dim": key, "linear_value_head_dim": value, "num_experts": 4, "num_experts_per_tok": 2}
    lengths.rollout.n, lengths.plan.prompt_tokens, lengths.plan.response_tokens = 1, 64, 64
    states = flops_of(lengths, save_config("qwen3_next", **delta, layer_types=[STATE] * 4))
    shape = (1, length, heads)
    tensors = [torch.rand(*shape, width) for width in (key, key, value)]
    with FlopCounterMode(display=False) as counter:
        torch_chunk_gated_delta_rule(*tensors, g=-torch.rand(shape), beta=torch.rand(shape))
    systems = length * heads * 64 * (key + value)  # which the counter does not know
    assert states == 4 * (counter.get_total_flops() + systems)
    lengths.plan.response_tokens = 64 + length
    assert flops_of(lengths, save_config("qwen3_next", **delta, layer_types=[STATE] * 4)) == 2 * states


def test_a_window_shortens_the_passes_of_long_rows(cfg, node, save_config, fast_host):
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 1000, 30_000
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = 1000, 31_000
    times = []
    for types in ([FULL] * 4, [WINDOW] * 4):
        cfg.model.path = save_config("qwen3", layer_types=types, use_sliding_window=True, sliding_window=512)
        _shapes.clear()  # the directory has another config
        times.append(make_plan(cfg, node, traced=False).time.phases["update"])
    assert times[0] > 1.5 * times[1]


@pytest.mark.parametrize(("kind", "share"), [("qwen3", 0.4), ("qwen3_moe", 0.15)])
def test_models_with_experts_reach_less_of_a_gpu(cfg, node, cpu, save_config, kind, share):
    cfg.model.path = save_config(kind)
    plan = make_plan(cfg, node, traced=False)
    assert _Passes(cfg, node, plan.roles[0], plan.workload).speed == share * 989e12
    assert cpu.device.reached(torch.bfloat16, has_experts=True) == cpu.device.reached(torch.bfloat16)
