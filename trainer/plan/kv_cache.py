"""What an inference engine keeps of a sequence while it generates: keys and values of tokens, or states of layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import Config
from trainer.errors import UserError
from trainer.plan.model_shape import ModelShape

FULL, WINDOW, STATE = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers, as `layer_types` of transformers calls them: they attend to all tokens, attend to the last ones, or
keep a state."""
_LATENT_TYPES = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"}
"""Types of models whose latent attention vLLM stores compressed."""
_STATE_BLOCKS = 2
"""Blocks in which vLLM keeps a state of a sequence, because it caches prefixes: the present one, and one before it."""
_TOKENS_ALIGNED = 16
"""vLLM makes the blocks of models with states as large as a state, in steps of so many tokens."""
_FEW_MORE = 1.5
"""vLLM puts layers of different kinds into groups of the same size: as many as the rarest kind has, or as the most
frequent kind, if those are less than so many times as many. The last group of a kind may have room for more."""


@dataclass(frozen=True)
class SequenceCache:
    """What an engine keeps of a sequence on each of its devices, in bytes."""

    token: int
    """Of each token, in the layers that attend to all tokens."""
    window: int = 0
    """Tokens to which the other layers attend."""
    window_token: int = 0
    """Of each token in the window, in these layers."""
    states: int = 0
    """Of the layers that keep a state."""
    block: int = 1
    """Tokens for which the engine takes memory at a time."""

    def size(self, tokens: float, in_flight: int = 0) -> int:
        """Return the bytes of a sequence.

        Args:
            tokens: of the sequence.
            in_flight: tokens that are computed at a time, which layers with a window keep meanwhile.
        """
        whole = math.ceil(tokens / self.block) * self.block
        return int(whole * self.token + min(tokens, self.window + in_flight) * self.window_token + self.states)


def cache_of(cfg: Config, model: ModelShape, itemsize: int, tp: int) -> SequenceCache:
    """Return what vLLM keeps of a sequence on one of `tp` devices. transformers keeps as much, or a little less, and
    computes keys and values of latent attention anew in each step (see `expanded_bytes`).

    Args:
        model: the complete model, without tensor parallelism.
        itemsize: bytes of a number.

    Raises:
        UserError: the config of the model does not say what its layers keep.
    """
    text = model.config.get_text_config()
    layers = _layers(cfg, model)
    if getattr(text, "kv_lora_rank", None):
        if text.model_type not in _LATENT_TYPES or set(layers) != {FULL}:
            raise _refusal(cfg, model, "its latent attention is not known")
        return SequenceCache(layers[FULL] * (text.kv_lora_rank + text.qk_rope_head_dim) * itemsize)  # on each device
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        heads = 1
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * max(1, heads // tp) * width * itemsize
    if not layers[STATE]:
        window = text.sliding_window if layers[WINDOW] else 0
        return SequenceCache(layers[FULL] * token, window, layers[WINDOW] * token)
    state = _state_bytes(text, itemsize, tp)
    block = math.ceil(state / token / _TOKENS_ALIGNED) * _TOKENS_ALIGNED
    return SequenceCache(layers[FULL] * token, states=layers[STATE] * _STATE_BLOCKS * block * token, block=block)


def expanded_bytes(text: Any, itemsize: int) -> int:
    """Return the bytes for each token of a sequence that transformers takes in a layer to expand latent attention."""
    if not getattr(text, "kv_lora_rank", None):
        return 0
    keys = text.qk_nope_head_dim + text.qk_rope_head_dim
    product = text.qk_nope_head_dim + text.v_head_dim
    return text.num_attention_heads * (product + keys + text.v_head_dim) * itemsize  # values are copied, too


def layer_types(text: Any) -> list[str]:
    """Return the kind of each layer of a language model, as `layer_types` of transformers calls it."""
    if types := getattr(text, "layer_types", None):
        return list(types)
    return [WINDOW if getattr(text, "sliding_window", None) else FULL] * text.num_hidden_layers


def _layers(cfg: Config, model: ModelShape) -> Counter[str]:
    """Return how many layers of each kind the engine has memory for."""
    text = model.config.get_text_config()
    layers = Counter(layer_types(text))
    others = sorted(set(layers) - {FULL, WINDOW, STATE})
    if others:
        raise _refusal(cfg, model, f"what layers of the kind {others[0]} keep is not known")
    if model.is_stateful != bool(layers[STATE]) or layers[STATE] and not hasattr(text, "linear_num_value_heads"):
        raise _refusal(cfg, model, "the size of the states of its layers is not known")
    if layers[STATE] and (layers[WINDOW] or not layers[FULL]):
        raise _refusal(cfg, model, "states are planned beside full attention alone")
    if getattr(text, "num_kv_shared_layers", 0) or text.to_dict().get("per_layer_config"):
        raise _refusal(cfg, model, "its layers share keys and values, or differ in their heads")
    fewest, most = min(layers.values()), max(layers.values())
    group = most if most < _FEW_MORE * fewest else fewest
    return Counter({kind: math.ceil(count / group) * group for kind, count in layers.items()})


def _state_bytes(text: Any, itemsize: int, tp: int) -> int:
    """Return the bytes of the state of a gated delta net (Yang et al., 2024) on one of `tp` devices.

    It has a matrix for each head, and the last inputs of a convolution over queries, keys and values.
    """
    keys, values = text.linear_num_key_heads // tp, text.linear_num_value_heads // tp
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    inputs = (text.linear_conv_kernel_dim - 1) * (2 * keys * key + values * value) * itemsize
    dtype = getattr(text, "mamba_ssm_dtype", None)
    size = itemsize if dtype is None else getattr(torch, dtype).itemsize
    return inputs + values * value * key * size


def _refusal(cfg: Config, model: ModelShape, reason: str) -> UserError:
    role = cfg.roles[0]
    return UserError(
        f"{role.key}={role.path or cfg.model.path}: engines for models of the type {model.config.model_type} cannot be "
        f"planned, because {reason}; choose another model, or plan trainer.task=sft"
    )
