"""Small random models: of the architectures whose packed rows are checked, and of those that files hold otherwise."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    HrmTextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
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
_EXPERTS = {**SHAPE, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALL = ARCHITECTURES | {
    "a window in the mask alone": Qwen2MoeConfig(
        **_EXPERTS, **_LAYERS, num_experts=4, use_sliding_window=True, shared_expert_intermediate_size=32
    ),
    "sinks": GptOssConfig(**SHAPE, **_LAYERS, num_local_experts=4, num_experts_per_tok=2),
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

CONVERTED: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**_EXPERTS, num_experts=5),
    "deepseek_v3": DeepseekV3Config(
        **{**_EXPERTS, "num_key_value_heads": 4, "head_dim": 8},
        **_LATENT,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **_EXPERTS, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_layer_end_index=1, moe_num_shared_experts=1
    ),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": GPTNeoXConfig(**{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}),
    "hrm_text": HrmTextConfig(**{**SHAPE, "num_key_value_heads": 4}),
}
"""Their files have other names or tensors than their modules. Only gpt-oss stacks its experts in both."""

WITH_BUFFERS: dict[str, PretrainedConfig] = {
    "deepseek_v32": DeepseekV32Config(  # its indexers get no gradient
        **{**_EXPERTS, "num_key_value_heads": 4, **_LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "ernie4_5_moe": CONVERTED["ernie4_5_moe"],  # its biases are frozen parameters
    "gemma4": Gemma4TextConfig(**SHAPE, **_LAYERS, global_head_dim=8, hidden_size_per_layer_input=0),
}
"""Their files hold buffers, or parameters that no role trains."""


def random_model(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Return a model with the same float32 weights and buffers whatever the `attention` (transformers' name)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        own = copy.deepcopy(config)  # which implementation attends is written into it
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(0.02 * torch.randn_like(parameter))
            weights = dict(model.named_parameters(remove_duplicate=False))
            for name, buffer in model.state_dict().items():
                if name not in weights:
                    buffer.add_(0.5 * torch.rand_like(buffer))
    return model.train()
