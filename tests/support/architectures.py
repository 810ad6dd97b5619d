"""Small random models of the architectures whose packed rows are checked."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 48
WINDOW = 5  # tokens, of the layers with a sliding window

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform, so that a token that is seen by mistake shows
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2 with a window": Qwen2Config(**SHAPE, **_LAYERS, use_sliding_window=True),
    "qwen3": Qwen3Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "gemma": GemmaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, **_LAYERS, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **_LAYERS, query_pre_attn_scalar=16),
}


def random_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """The same float32 weights whatever the `attention` (transformers' name)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        own = copy.deepcopy(config)  # which implementation attends is written into it
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train()
