"""Causal attention over packed rows: each sequence of a row attends only to itself.

The attention is registered with transformers under the name `PACKED`, for which transformers builds no mask. The model
passes the boundaries of the sequences on as the keyword argument `packing`, so that recomputed activations and FSDP use
the boundaries of their own micro-batch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import UserError
from trainer.models.attention_op import attention_op
from trainer.models.sdpa_attention import attend_buckets
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing, take

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # before torch 2.10
    _VARLEN_PARAMETERS = frozenset()

_VARLEN = {"scale", "window_size"} <= _VARLEN_PARAMETERS
_ASKS_FOR_GQA = "enable_gqa" in _VARLEN_PARAMETERS
"""Whether the kernel refuses fewer key heads than query heads unless it is told of them, as since torch 2.12. Earlier
versions pass both numbers of heads to the same kernel unchecked."""

PACKED = "packed"
_VARLEN_WIDTHS = range(8, 257, 8)  # head dimensions that the kernel supports
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


def set_attention(lm: PreTrainedModel) -> None:
    """Make `lm` use `packed_attention` if it was built with transformers' `sdpa` and can pack."""
    if lm.config._attn_implementation == "sdpa" and can_pack(lm):
        lm.set_attn_implementation(PACKED)


def can_pack(module: nn.Module) -> bool:
    """Return whether `module` can keep several sequences in one row apart.

    Recurrent layers carry a state from one sequence to the next. Models that do not take their attention from
    transformers' table ignore the boundaries. Both kinds of models get one sequence at a time.
    """
    lm = _language_model(module)
    layers = set(getattr(lm.config.get_text_config(), "layer_types", None) or ()) - _PACKABLE_LAYERS
    return lm._supports_attention_backend and not getattr(lm, "_is_stateful", False) and not layers


def can_share_prefixes(module: nn.Module) -> bool:
    """Return whether sequences in one row can have their first tokens in common (see `Packing`)."""
    return _language_model(module).config._attn_implementation == PACKED


def _language_model(module: nn.Module) -> PreTrainedModel:
    return next(part for part in module.modules() if isinstance(part, PreTrainedModel))


def quadratic_cost(module: nn.Module) -> float:
    """Return q such that a sequence of L tokens costs `L + q L^2`, in units of a token's cost outside the attention.

    A forward pass takes 2 FLOP a token and parameter, and in each layer 4 FLOP a token, earlier token and attended
    dimension, of which there are L / 2 on average (Kaplan et al., 2020, with causal attention).
    """
    config = module.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not can_pack(module) or heads is None:
        return 0.0
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    computed = sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
    if getattr(config, "tie_word_embeddings", False) and isinstance(module, PreTrainedModel):
        computed += config.vocab_size * config.hidden_size
    return config.num_hidden_layers * width / max(computed, 1)


def packing_arguments(config: Any, packing: Packing) -> dict[str, Any]:
    """Return the keyword arguments that a model with this `config` needs for the row of `packing`."""
    implementation = config._attn_implementation
    if implementation == PACKED:
        packing.prepare()
        return {"position_ids": packing.own(packing.position_ids), "packing": packing}
    assert not packing.shares, "only PACKED attention knows of shared tokens"
    if len(packing.lengths) == 1:
        return {}
    if implementation.startswith("flash_attention"):
        boundaries = {"cu_seq_lens_q": packing.boundaries, "cu_seq_lens_k": packing.boundaries}
        longest = {"max_length_q": packing.longest, "max_length_k": packing.longest}
        return {"position_ids": packing.position_ids, **boundaries, **longest}
    return {"position_ids": packing.position_ids}  # transformers builds a dense mask from the positions


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed row.

    On CUDA in half precision this is torch's variable-length kernel. Otherwise it is one call of SDPA for each bucket
    of sequences of similar length, so that the cost is close to the sum of the squared lengths.

    If several ranks share the row, each passes the tokens of its part, and gets the result of these. In between, it
    has all tokens and a part of the heads (Jacobs et al., DeepSpeed Ulysses, 2023).

    Args:
        query: `(1, H, N, D)`.
        key, value: `(1, Hkv, N, D)`; H is a multiple of Hkv.
        packing: the sequences of the row.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sliding_window: number of tokens that a token attends to, itself included.
        softcap: scores become softcap tanh(scores / softcap).

    Returns:
        `(1, N, H, D)`, and None instead of attention weights.

    Raises:
        UserError: the model does not pass `packing` on to its attention.
    """
    if packing is None:
        raise UserError(
            f"model.attn_implementation=sdpa: {type(module).__name__} does not hand on where sequences begin; "
            "choose model.attn_implementation=eager"
        )
    assert attention_mask is None, "the packing says what a token attends to"
    if packing.context is None:
        return _attend_row(query, key, value, packing, scaling, sliding_window, softcap), None
    query, key, value = _heads_of_all_tokens(query, key, value, packing, packing.context)
    out = _attend_row(query, key, value, packing, scaling, sliding_window, softcap)
    return _tokens_of_all_heads(out, packing, packing.context), None


def _heads_of_all_tokens(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, context: AxisGroup
) -> tuple[Tensor, ...]:
    """Turn the heads of this rank's tokens, `(1, H, n, D)`, into this rank's heads of all tokens.

    Each key and value head is repeated as often as ranks have queries of it.
    """
    kv_heads, ranks = key.shape[1], context.group.size()  # `context.size` would be a symbol in a compiled graph
    repeats = next(n for n in range(1, ranks + 1) if n * kv_heads % ranks == 0)

    def exchange(tensor: Tensor) -> Tensor:
        parts = context.exchange(tensor[0].unflatten(0, (ranks, -1)))
        return parts.transpose(0, 1).flatten(1, 2)[None, :, : packing.tokens]

    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return exchange(query), exchange(key), exchange(value)


def _tokens_of_all_heads(out: Tensor, packing: Packing, context: AxisGroup) -> Tensor:
    """Turn this rank's heads of all tokens, `(1, N, h, D)`, into the heads of this rank's tokens, `(1, n, H, D)`."""
    size, ranks = packing.part.stop - packing.part.start, context.group.size()
    rows = F.pad(out[0], (0, 0, 0, 0, 0, ranks * size - packing.tokens))
    return context.exchange(rows.unflatten(0, (ranks, size))).transpose(0, 1).flatten(1, 2)[None]


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute the attention of all tokens of the row: `(1, N, H, D)`."""
    assert query.shape[2] == packing.tokens, (query.shape, packing.tokens)
    if uses_varlen(query.device.type, query.dtype, query.shape[-1], softcap):
        return _varlen(query, key, value, packing, scaling, sliding_window)
    if torch.compiler.is_compiling():
        return attention_op(query, key, value, packing.sizes, scaling, sliding_window, softcap)
    return attend_buckets(query, key, value, packing, scaling, sliding_window, softcap)


def uses_varlen(device: str, dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Return whether torch's variable-length kernel computes the attention of heads of `width` dimensions."""
    half = dtype in (torch.bfloat16, torch.float16)
    return _VARLEN and device == "cuda" and half and softcap is None and width in _VARLEN_WIDTHS


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    boundaries = key_boundaries = packing.boundaries
    if packing.shares:  # the kernel wants the keys of each sequence in one piece
        keys, values = take(keys, packing.key_places), take(values, packing.key_places)
        key_boundaries = packing.key_boundaries
    longest = packing.longest
    sight = (-1, 0) if window is None or window >= longest else (window - 1, 0)
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS_FOR_GQA else {}
    out = varlen_attn(  # the last query of a sequence belongs to its last key
        rows.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        boundaries,
        key_boundaries,
        packing.longest_own,
        longest,
        scale=scaling,
        window_size=sight,
        **grouped,
    )
    return out[None]


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
