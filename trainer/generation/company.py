"""Whether the bits of a request depend on those beside it; whether vLLM can generate each sequence beside another.

On CPU, vLLM computes a batch of one sequence by other kernels, which round in another way. So an engine generates a
second sequence beside one that would be alone (see `trainer.generation.vllm_engine`). Otherwise the requests that run
together would decide the last bits: after a kill those that are missing, and time where requests join others.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from trainer.config import Config, EngineSpec, RolloutConfig
from trainer.import_utils import import_function
from trainer.models.files import load_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOG = logging.getLogger(__name__)

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPU: the attention wants multiples of it."""
_ALONE = (
    "a sequence may be alone, with other last bits: what a kill cut off is generated with its whole batch, and a run "
    "with environment.schedule=stream is not compared bit for bit when it resumes"
)
_ARGUMENTS = {
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory_bytes",
    "block_size",
    "num_gpu_blocks_override",
    "watermark",
}
"""Arguments of vLLM that decide how many sequences an engine can hold."""


def joins_exactly(spec: EngineSpec, cfg: Config, device: str, model_path: str) -> bool:
    """Return whether an engine gives a request the same bits whichever others run with it (see `EngineSpec`).

    Args:
        device: of the engines, `cpu` or `cuda`.
    """
    rule = spec.joins_exactly_if
    if rule is None or not spec.joins_exactly:
        return spec.joins_exactly
    holds = holds_two if rule == holds_two.__name__ else import_function(rule, "rollout.engine")
    return holds(cfg.rollout_of_engines, device, load_config(cfg.model, model_path))


def holds_two(rollout: RolloutConfig, device: str, model: PretrainedConfig) -> bool:
    """Return whether an engine can hold two of the longest sequences, or need not, because it is on a GPU.

    If its KV cache is smaller, vLLM takes sequences out of it and computes them later, so a sequence may be alone.

    Args:
        rollout: the settings of engines.
        model: of the policy.
    """
    if device != "cpu":
        return True
    if rollout.max_num_seqs < 2:
        LOG.info("rollout.max_num_seqs=1: %s", _ALONE)
        return False
    given = _ARGUMENTS.intersection(rollout.engine_args)
    if given:
        LOG.info("rollout.engine_args.%s: %s", min(given), _ALONE)
        return False
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    needed = (2 * math.ceil(longest / CPU_BLOCK) + 1) * CPU_BLOCK * _bytes_of_token(rollout, model)  # one stays empty
    if needed > rollout.kv_cache_mb << 20:
        LOG.info(
            "rollout.kv_cache_mb=%d: two sequences of %d tokens may need %d; with less, %s",
            rollout.kv_cache_mb,
            longest,
            math.ceil(needed / 2**20),
            _ALONE,
        )
        return False
    return True


def _bytes_of_token(rollout: RolloutConfig, model: PretrainedConfig) -> int:
    """Return the bytes that a token takes in the KV cache at most: some layers of some models take fewer."""
    text = model.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * size * (2 if rollout.dtype == "bfloat16" else 4)
