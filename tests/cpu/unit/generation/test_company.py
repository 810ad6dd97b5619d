"""Whether vLLM can always generate a sequence beside another one."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, Qwen3Config

from trainer.config import RolloutConfig
from trainer.generation.company import holds_two

SMALL = Qwen3Config(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)


def rollout(**settings) -> RolloutConfig:
    return RolloutConfig(**{"max_prompt_tokens": 512, "max_response_tokens": 512, "kv_cache_mb": 512, **settings})


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        ({}, True),
        ({"kv_cache_mb": 455}, True),
        ({"kv_cache_mb": 454}, False),
        ({"kv_cache_mb": 128}, False),
        ({"kv_cache_mb": 228, "dtype": "bfloat16"}, True),
        ({"kv_cache_mb": 128, "max_prompt_tokens": 128, "max_response_tokens": 128}, True),
        ({"max_response_tokens": 1024}, False),
        ({"max_num_seqs": 1}, False),
        ({"engine_args": {"max_num_seqs": 1}}, False),
        ({"engine_args": {"num_gpu_blocks_override": 3}}, False),
        ({"engine_args": {"seed": 3}}, True),
    ],
)
def test_the_cache_must_hold_two_of_the_longest_sequences(settings, holds):
    """Qwen3-0.6B takes 229,376 bytes a token in float32, and vLLM keeps one block of 32 tokens empty."""
    assert holds_two(rollout(**settings), "cpu", SMALL) == holds
    assert holds_two(rollout(**settings), "cuda", SMALL)


def test_a_model_may_have_heads_that_share_nothing():
    model = GPT2Config(n_embd=768, n_layer=12, n_head=12)  # 73,728 bytes a token
    assert holds_two(rollout(kv_cache_mb=147), "cpu", model)
    assert not holds_two(rollout(kv_cache_mb=146), "cpu", model)
