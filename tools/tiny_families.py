"""Small random models of families of text models, as directories."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer.models.tiny import TinyShape, build_tiny

VOCABULARY = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.15,
}  # fmt: skip
_OWN = _COMMON | {"hidden_size": 64, "head_dim": 32}  # the config has its own dimension of a head: vLLM wants 32
_DERIVED = _COMMON | {"hidden_size": 128}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
    "initializer_range": 0.15,
}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.15}
_TIED = {"tie_word_embeddings": True}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
           "first_k_dense_replace": 1}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 32}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
           "v_head_dim": 64}  # fmt: skip
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # vLLM reads what published configs have
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
           "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.1}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", _OWN | _EXPERTS | _WINDOW | {"num_dense_layers": 1, "num_shared_experts": 1, "n_group": 1,
              "topk_group": 1, "score_func": "sigmoid", "route_norm": True, "route_scale": 1.0}),
    "apertus": ("Apertus", _DERIVED),
    "arcee": ("Arcee", _OWN),
    "bloom": ("Bloom", _BLOOM),
    "cohere": ("Cohere", _DERIVED | _TIED | {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", _OWN | _TIED | _WINDOW | {"logit_scale": 0.5}),
    "deepseek_v2": ("DeepseekV2", _DERIVED | _LATENT | _ROUTED | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3", _DERIVED | _LATENT | _ROUTED | _SIGMOID | {"q_lora_rank": 32, "n_group": 2,
                                                                            "topk_group": 1, "moe_layer_freq": 1}),
    "dots1": ("Dots1", _OWN | _ROUTED | _SIGMOID | {"n_group": 1, "topk_group": 1}),
    "ernie4_5": ("Ernie4_5", _OWN),
    "ernie4_5_moe": ("Ernie4_5_Moe", _OWN | {"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1,
                     "moe_num_shared_experts": 1}),
    "exaone4": ("Exaone4", _OWN | _WINDOW),
    "falcon": ("Falcon", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
               "num_attention_heads": 2, "initializer_range": 0.15, "new_decoder_architecture": True,
               "num_kv_heads": 1, "alibi": False, "bias": False, "parallel_attn": True}),
    "falcon_h1": ("FalconH1", _OWN | _MAMBA | {"mamba_d_ssm": 128, "mamba_expand": 2}),
    "falcon_mamba": ("FalconMamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
                                     "state_size": 16, "initializer_range": 0.15}),
    "flex_olmo": ("FlexOlmo", _DERIVED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", _OWN | _TIED),
    "gemma2": ("Gemma2", _OWN | _TIED | _WINDOW | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0,
                                                   "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3Text", _OWN | _TIED | _WINDOW | {"query_pre_attn_scalar": 64}),
    "gemma3n": ("Gemma3nText", _OWN | _TIED | _WINDOW | {"hidden_size_per_layer_input": 32, "laurel_rank": 8,
                "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, "intermediate_size": [96] * 2,
                "activation_sparsity_pattern": [0.0] * 2}),
    "gemma4": ("Gemma4Text", _OWN | _TIED | _WINDOW | {"global_head_dim": 32, "hidden_size_per_layer_input": 0,
                                                       "num_kv_shared_layers": 0}),
    "gemma4 (embeddings of layers)": ("Gemma4Text", _OWN | _TIED | _WINDOW | {"global_head_dim": 32,
                                      "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 32,
                                      "vocab_size_per_layer_input": VOCABULARY}),
    "glm": ("Glm", _OWN),
    "glm4": ("Glm4", _OWN),
    "glm4_moe": ("Glm4Moe", _OWN | _ROUTED | {"n_group": 1, "topk_group": 1, "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLite", _DERIVED | _LATENT | _ROUTED | _SIGMOID | {"q_lora_rank": 32}),
    "gpt2": ("GPT2", _GPT),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in _DERIVED.items() if k != "num_key_value_heads"}),
    "gpt_oss": ("GptOss", _OWN | _WINDOW | _LOCAL),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 16}),
    "granite": ("Granite", _DERIVED | _SCALES | _TIED),
    "granitemoe": ("GraniteMoe", _DERIVED | _SCALES | _LOCAL),
    "granitemoehybrid": ("GraniteMoeHybrid", _DERIVED | _SCALES | _LOCAL | _MAMBA | {"mamba_n_heads": 16,
                         "layer_types": ["mamba", "attention"], "mamba_expand": 2, "shared_intermediate_size": 32}),
    "granitemoeshared": ("GraniteMoeShared", _DERIVED | _SCALES | _LOCAL | {"shared_intermediate_size": 32}),
    "helium": ("Helium", _OWN | {"hidden_size": 128}),
    "hunyuan_dense": ("HunYuanDenseV1", _OWN),
    "hunyuan_moe": ("HunYuanMoEV1", _OWN | {"num_experts": 4, "moe_topk": 2}),
    "jamba": ("Jamba", _DERIVED | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}),
    "lfm2": ("Lfm2", _DERIVED | _TIED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
                                         "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128}),
    "lfm2_moe": ("Lfm2Moe", _DERIVED | _TIED | _EXPERTS | {"layer_types": ["conv", "full_attention"],
                                                           "num_dense_layers": 1}),
    "llama": ("Llama", _OWN),
    "llama (llama3 rope)": ("Llama", _OWN | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                 original_max_position_embeddings=64)),
    "llama (dynamic rope)": ("Llama", _OWN | {"max_position_embeddings": 32} | _rope("dynamic", factor=4.0)),
    "llama4": ("Llama4Text", _OWN | {"intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
               "interleave_moe_layer_step": 1, "attention_chunk_size": 32, "no_rope_layers": [1, 0]}),
    "longcat": ("LongcatFlash", _DERIVED | _LATENT | {"num_layers": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "moe_topk": 2,
                "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2,
                "mla_scale_q_lora": True, "mla_scale_kv_lora": True}),
    "mamba": ("Mamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16,
                        "initializer_range": 0.15}),
    "mamba2": ("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16,
               "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "initializer_range": 0.15}),
    "mimo_v2": ("MiMoV2Flash", _OWN | {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
                "v_head_dim": 32, "swa_head_dim": 32, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2, "sliding_window": 16}),
    "minicpm3": ("MiniCPM3", _DERIVED | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
                 "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}),
    "minimax_m2": ("MiniMaxM2", _OWN | _LOCAL | {"num_local_experts": 8, "rotary_dim": 16, "scoring_func": "sigmoid",
                   "attn_type_list": [1, 1], "use_routing_bias": True, "use_qk_norm": True, "num_mtp_modules": 0,
                   "qk_norm_type": "per_layer", "mtp_transformer_layers": 0}),
    "ministral3": ("Ministral3", _OWN | {"sliding_window": None}),
    "mistral": ("Mistral", _OWN | {"sliding_window": 16}),
    "mixtral": ("Mixtral", _OWN | _LOCAL | {"sliding_window": None}),
    "nemotron": ("Nemotron", _OWN),
    "nemotron_h": ("NemotronH", _OWN | {"layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 8,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}),
    "olmo": ("Olmo", _DERIVED),
    "olmo2": ("Olmo2", _DERIVED),
    "olmo3": ("Olmo3", _DERIVED | _WINDOW),
    "olmoe": ("Olmoe", _DERIVED | {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": ("OPT", {"vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 512, "word_embed_proj_dim": 64, "init_std": 0.15}),
    "phi": ("Phi", _DERIVED | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", _DERIVED | {"sliding_window": 16, "original_max_position_embeddings": 512}),
    "phi3 (longrope)": ("Phi3", _DERIVED | {"sliding_window": None, "original_max_position_embeddings": 32}
                        | _rope("longrope", short_factor=[1.0] * 16, original_max_position_embeddings=32,
                                long_factor=[1.0 + 0.5 * i for i in range(16)])),
    "phimoe": ("Phimoe", _DERIVED | _LOCAL | {"lm_head_bias": True, "attention_bias": True, "sliding_window": None}),
    "qwen2": ("Qwen2", _DERIVED),
    "qwen2_moe": ("Qwen2Moe", _DERIVED | _EXPERTS | _SHARED),
    "qwen3": ("Qwen3", _OWN | _TIED),
    "qwen3 (yarn)": ("Qwen3", _OWN | _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen3_5": ("Qwen3_5Text", _OWN | _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeText", _OWN | _LINEAR | _EXPERTS | _SHARED),
    "qwen3_moe": ("Qwen3Moe", _OWN | _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_next": ("Qwen3Next", _OWN | _LINEAR | _EXPERTS | _SHARED),
    "seed_oss": ("SeedOss", _OWN | {"residual_dropout": 0.1, "attention_dropout": 0.1}),
    "smollm3": ("SmolLM3", _DERIVED | {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "solar_open": ("SolarOpen", _OWN | {k: v for k, v in _ROUTED.items() if k != "first_k_dense_replace"}),
    "stablelm": ("StableLm", _DERIVED),
    "starcoder2": ("Starcoder2", _DERIVED | {"sliding_window": 16, "residual_dropout": 0.1, "embedding_dropout": 0.1,
                                             "attention_dropout": 0.1}),
}  # fmt: skip
"""The class of each config, without its `Config`, and its fields."""
_MOVED = re.compile(r"bias|correction|layer_scalar|sinks|(^|\.)D$")
"""Buffers that a trained model has other values of than a new one."""


def write_family(name: str, path: str) -> str:
    """Write the model of a family with a byte tokenizer to the directory `path`; returns the name of its class.

    Norms, biases and buffers have other values than those of a new model, so that one that is lost shows.
    """
    shutil.rmtree(path, ignore_errors=True)
    tiny = TinyShape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    build_tiny(tiny, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    os.remove(os.path.join(path, "model.safetensors"))
    kind, fields = FAMILIES[name]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**fields | ends)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point() and _MOVED.search(key) and (key not in parameters or "correction" in key):
                tensor.add_(0.5 * torch.randn_like(tensor))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    return type(model).__name__
