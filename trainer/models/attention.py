"""Causal attention over packed rows: each sequence of a row attends only to itself.

The attention is registered with transformers under the name `PACKED`, for which transformers builds no mask. The model
passes the boundaries of the sequences to it as the keyword argument `packing`, so that recomputed activations and FSDP
use the boundaries of their own micro-batch.

On CUDA in half precision it is torch's variable-length kernel. Otherwise SDPA is called once for each bucket of
sequences of similar length. The cost of that depends on the lengths, which differ in each micro-batch. So it is also
one operator that `torch.compile` does not trace: a graph of its content would have to be compiled again and again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import UserError
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Bucket, Gather, Packing, index_select
from trainer.parallel.shard import transformer_blocks

_TAKES_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 passes any numbers of heads to the kernel, later versions reject fewer key heads without the flag."""

PACKED = "packed"
_VARLEN_WIDTHS = range(8, 257, 8)  # head dimensions that the kernel supports
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_NEUTRAL = {"is_causal": (True,)}
"""Values of arguments for which any attention function computes the same. Others: False and 0."""
_WITHOUT_EFFECT = {"position_ids"}
"""Arguments that models pass on and that no attention function needs for its scores."""
_SINK_WIDTH = 8  # dimensions that sinks add to a head. Fused kernels need multiples of 8.


class Scores(NamedTuple):
    """How the scores of tokens are computed (see `packed_attention`)."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    """Each token also attends to a sink, whose score its query has (see `with_sink_scores`)."""


def set_attention(lm: PreTrainedModel, implementation: str = "sdpa", pack: bool = True) -> None:
    """Decide whether rows of `lm` have several sequences (see `can_pack`), and make it use `packed_attention` then.

    Recurrent layers carry a state from one sequence to the next. Models that do not use transformers' table of
    attention functions ignore the boundaries. A class may have other masks than `packed_attention`, or build them
    without the positions by which transformers separates sequences. Such models get one sequence at a time.

    Args:
        implementation: `model.attn_implementation`. All but `sdpa` keep the attention that the model was built with.
        pack: `trainer.pack`.
    """
    layers = set(getattr(lm.config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    packs = pack and lm._supports_attention_backend and not is_stateful(lm) and not layers
    visible = visible_tokens(lm) if packs else None
    if implementation == "sdpa":
        packs = packs and all(one.is_causal for one in visible or ())
    elif not implementation.startswith("flash_attention"):  # which gets the boundaries themselves
        packs = packs and visible is not None and all(one.separates for one in visible)
    if packs and implementation == "sdpa":
        lm.set_attn_implementation(PACKED)
        for block, of_block in zip(transformer_blocks(lm), visible or (), strict=False):
            for module in block.modules():
                module.visible_window = of_block.window
    for module in lm.modules():
        if isinstance(module, PreTrainedModel):
            module.packs_rows = packs


def can_pack(module: nn.Module) -> bool:
    """Return whether `module` keeps several sequences in one row apart, after `set_attention`."""
    return _language_model(module).packs_rows


def is_stateful(module: nn.Module) -> bool:
    """Return whether layers of `module` carry a state along a sequence."""
    return getattr(_language_model(module), "_is_stateful", False)


def can_share_prefixes(module: nn.Module) -> bool:
    """Return whether sequences in one row can have a common prefix (see `Packing`)."""
    return _language_model(module).config._attn_implementation == PACKED


def _language_model(module: nn.Module) -> PreTrainedModel:
    return next(child for child in module.modules() if isinstance(child, PreTrainedModel))


def quadratic_cost(module: nn.Module) -> float:
    """Return q such that a sequence of L tokens costs `L + q L^2`, in units of a token's cost without attention.

    A forward pass takes 2 FLOP per token and parameter. In each layer it also takes 4 FLOP per token, earlier token and
    attended dimension. A token has L / 2 earlier tokens on average (Kaplan et al., 2020, with causal attention).
    """
    config = module.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not can_pack(module) or heads is None:
        return 0.0
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    computed = sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
    if getattr(config, "tie_word_embeddings", False) and isinstance(module, PreTrainedModel):
        computed += config.vocab_size * config.hidden_size
    return config.num_hidden_layers * width / max(computed, 1)


def packing_arguments(config: Any, packing: Packing) -> dict[str, Any]:
    """Return the keyword arguments that a model with this `config` needs for the row of `packing`."""
    implementation = config._attn_implementation
    if implementation == PACKED:
        packing.prepare()
        return {"position_ids": packing.shard(packing.position_ids), "packing": packing}
    assert not packing.has_prefixes, "only PACKED attention supports shared prefixes"
    if len(packing.lengths) == 1:
        return {}
    if implementation.startswith("flash_attention"):
        boundaries = {"cu_seq_lens_q": packing.cu_seqlens, "cu_seq_lens_k": packing.cu_seqlens}
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
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed row.

    With context parallelism, each rank passes the tokens of its slice of the row, and gets the result for them. In
    between, it has all tokens for a part of the heads (Jacobs et al., DeepSpeed Ulysses, 2023).

    Args:
        query: `(1, H, N, D)`.
        key, value: `(1, Hkv, N, D)`; H is a multiple of Hkv.
        packing: the sequences of the row.
        scaling: factor of the scores. None: 1 / sqrt(D).
        sliding_window: number of tokens that a token attends to, itself included. The model's own mask, if it has told
            it (`set_attention`), replaces it: some classes have a window in the mask alone.
        softcap: scores become softcap tanh(scores / softcap).
        s_aux: `(H,)`, the score of a token without a value that each token attends to (an attention sink).
        others: what transformers' classes also pass.

    Returns:
        `(1, N, H, D)`, and None instead of attention weights.

    Raises:
        UserError: the model does not pass `packing` on to its attention, or passes what has no effect here.
    """
    if packing is None:
        raise UserError(
            f"model.attn_implementation=sdpa: {type(module).__name__} does not pass on where sequences begin; "
            "choose model.attn_implementation=eager"
        )
    others["attention_mask"] = attention_mask
    if s_aux is not None:
        others["softcap"] = softcap
    for name, given in others.items():  # what would change the result of another attention function
        is_neutral = given is None or (not isinstance(given, Tensor) and given in _NEUTRAL.get(name, (False, 0)))
        if not is_neutral and name not in _WITHOUT_EFFECT:
            raise UserError(
                f"model.attn_implementation=sdpa: {type(module).__name__} passes {name} to its attention, which packed "
                "rows do not support; set trainer.pack=false"
            )
    window = getattr(module, "visible_window", sliding_window)
    if s_aux is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key = with_sink_scores(query, key, s_aux / scaling)
    scores = Scores(scaling, window, softcap, has_sinks=s_aux is not None)
    if packing.cp is None:
        return _attend_row(query, key, value, packing, scores), None
    return _attend_with_ranks(query, key, value, packing, packing.cp, scores), None


def _attend_with_ranks(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, cp: AxisGroup, scores: Scores
) -> Tensor:
    """Turn all heads of this rank's tokens, `(1, H, n, D)`, into its heads of all tokens, and the result back. Key and
    value heads are repeated if there are fewer of them than ranks."""
    kv_heads, ranks = key.shape[1], cp.group.size()  # `cp.size` would be a symbol in a compiled graph
    repeats = next(n for n in range(1, ranks + 1) if n * kv_heads % ranks == 0)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    received = (cp.all_to_all(tensor[0].unflatten(0, (ranks, -1))) for tensor in (query, key, value))
    own = [tensor.transpose(0, 1).flatten(1, 2)[None, :, : packing.tokens] for tensor in received]
    out = _attend_row(*own, packing, scores)
    size = packing.local_slice.stop - packing.local_slice.start
    rows = F.pad(out[0], (0, 0, 0, 0, 0, ranks * size - packing.tokens))
    return cp.all_to_all(rows.unflatten(0, (ranks, size))).transpose(0, 1).flatten(1, 2)[None]


def _attend_row(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """Compute the attention of all tokens of the row: `(1, N, H, D)`."""
    assert query.shape[2] == packing.tokens, (query.shape, packing.tokens)
    if not scores.has_sinks and uses_varlen(packing.kernels, query.dtype, query.shape[-1], scores.softcap):
        return attend_varlen(query, key, value, packing, scores.scaling, scores.window)
    if torch.compiler.is_compiling():
        return attention_op(query, key, value, packing.sizes, *scores)
    return attend_buckets(query, key, value, packing, scores)


def uses_varlen(device: str, dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Return whether torch's variable-length kernel computes the attention of heads of `width` dimensions."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device == "cuda" and half and softcap is None and width in _VARLEN_WIDTHS


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Compute the attention of all tokens of the row with torch's variable-length kernel: `(1, N, H, D)`."""
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cu_seqlens_q = cu_seqlens_k = packing.cu_seqlens
    if packing.has_prefixes:  # the kernel needs the keys of each sequence without a gap
        keys, values = index_select(keys, packing.key_indices), index_select(values, packing.key_indices)
        cu_seqlens_k = packing.cu_seqlens_k
    longest = packing.longest
    window_size = (-1, 0) if window is None or window >= longest else (window - 1, 0)
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _TAKES_GQA_FLAG else {}
    out = varlen_attn(  # the last query of a sequence is at the position of its last key
        rows.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        packing.longest_suffix,
        longest,
        scale=scaling,
        window_size=window_size,
        **grouped,
    )
    return out[None]


def attend_buckets(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """Compute causal attention within each sequence, one call of SDPA for each bucket: `(1, N, H, D)`."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    buckets, outputs = packing.buckets, []
    if any(packing.prefix_lengths):
        keys, values = index_select(keys, packing.key_indices), index_select(values, packing.key_indices)
    lengths = [bucket.tokens for bucket in buckets], *[[bucket.keys for bucket in buckets]] * 2
    pieces = (tensor.split(of) for tensor, of in zip((queries, keys, values), lengths, strict=True))
    for query, key, value, bucket, (of_queries, of_keys) in zip(*pieces, buckets, packing.bucket_indices, strict=True):
        longest = bucket.longest + bucket.prefix_length
        rows = _padded(query, bucket, of_queries, bucket.longest)
        out = _attend(rows, *(_padded(one, bucket, of_keys, longest) for one in (key, value)), scores)
        out = out.transpose(1, 2).flatten(0, 1)
        outputs.append(out if bucket.is_even else Gather.apply(out, of_queries))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _padded(tensor: Tensor, bucket: Bucket, indices: Tensor, longest: int) -> Tensor:
    """Turn a bucket's tokens `(n, H, D)` into `(rows, H, longest, D)`."""
    rows = len(bucket.lengths)
    if not bucket.is_even:
        tensor = tensor.new_zeros(rows * longest, *tensor.shape[1:]).index_copy(0, indices, tensor)
    return tensor.unflatten(0, (rows, longest)).transpose(1, 2)


def with_sink_scores(query: Tensor, key: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries `(1, H, N, D)` and keys of more dimensions, in the first of which each query has its head's score.

    A sink's key has a 1 in this dimension and all others a 0. So the fused kernels compute attention with sinks, and
    their gradients.

    Args:
        scores: `(H,)`, before the factor of the scores is applied.
    """
    column = scores.to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = torch.cat([query, F.pad(column, (0, _SINK_WIDTH - 1))], dim=-1)
    return query, F.pad(key, (0, _SINK_WIDTH))


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute causal attention within each row: of the last T tokens, `(b, H, T, D)`, to all S, `(b, Hkv, S, D)`.

    The padding is on the right, so no real token attends to it.
    """
    scaling, window, softcap, has_sinks = scores
    length, all_tokens = query.shape[2], key.shape[2]
    if window is not None and window >= all_tokens:
        window = None
    if softcap is None and window is None and length == all_tokens and not has_sinks:
        return _sdpa(query, key, value, None, scaling)
    positions = torch.arange(all_tokens, device=query.device)
    distance = positions[all_tokens - length :, None] - positions
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if has_sinks:
        sink = key.new_zeros(key.shape[-1])
        sink[-_SINK_WIDTH] = 1
        key = torch.cat([sink.expand(*key.shape[:2], 1, -1), key], dim=2)
        value, visible = F.pad(value, (0, 0, 1, 0)), F.pad(visible, (1, 0), value=True)
    if softcap is None:
        return _sdpa(query, key, value, visible, scaling)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    logits = (torch.tanh(logits / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float | None) -> Tensor:
    """Call SDPA with the mask `visible`; None: causal. On CPU, differentiate bfloat16 as `_HalfAttention` does."""
    halves = query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    if halves and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        bias = None if visible is None else query.new_zeros(visible.shape).masked_fill(~visible, float("-inf"))
        return _HalfAttention.apply(query, key, value, bias, scaling)
    gqa = query.shape[1] != key.shape[1]
    causal = visible is None
    return F.scaled_dot_product_attention(query, key, value, visible, is_causal=causal, scale=scaling, enable_gqa=gqa)


class _HalfAttention(torch.autograd.Function):
    """SDPA in bfloat16 on CPU, whose backward pass takes half the time if it computes in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float | None
    ) -> Tensor:
        ctx.options = 0.0, bias is None
        ctx.scaling = scaling
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attend(query, key, value, *ctx.options, attn_mask=bias, scale=scaling)
        ctx.save_for_backward(query, key, value, out, sums, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sums, bias = (None if saved is None else saved.float() for saved in (*grads, *ctx.saved_tensors))
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = differentiate(*tensors, sums, *ctx.options, attn_mask=bias, scale=ctx.scaling)
        return *(grad.to(grads[0].dtype) for grad in found), None, None


@torch.library.custom_op("trainer::packed_attention", mutates_args=())
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool = False,
) -> Tensor:
    """Compute `attend_buckets` for sequences of these sizes (see `Packing.sizes`)."""
    scores = Scores(scaling, window, softcap, has_sinks)
    return attend_buckets(query, key, value, _packing(*map(tuple, sizes.tolist()), query.device), scores).contiguous()


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("trainer::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    excluded = torch._C._dispatch_tls_local_exclude_set()  # inside an operator, autograd does not record by default
    for dispatch in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(dispatch)  # only these keys: those of autocast must stay excluded
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        out = attend_buckets(
            *inputs, _packing(*map(tuple, sizes.tolist()), query.device), Scores(scaling, window, softcap, has_sinks)
        )
    dq, dk, dv = torch.autograd.grad(out, inputs, grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


attention_op.register_autograd(_differentiate, setup_context=_save)


@functools.lru_cache(maxsize=4)  # all layers of a micro-batch use the same packing
def _packing(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], device: torch.device) -> Packing:
    return Packing(lengths, device, prefix_lengths=prefix_lengths)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


# ---------------------------------------------------------------------------------------------------
# What each block sees, by the masks that the model's own code asks transformers for

_RECORDED = "recorded_mask"
_FIRST, _SECOND = 2, 3  # lengths of the sequences of the packed row
_FAR = 1 << 24  # a distance between tokens that is longer than any window


@dataclass(frozen=True)
class Visible:
    """Which tokens of its row a token of one block sees."""

    is_causal: bool  # it sees all tokens before it, in its sequence and within `window`, and no others
    window: int | None  # the number of tokens that it sees, itself included. None: all before it.
    separates: bool  # it sees none of another sequence of a packed row, whose positions start again


@dataclass(frozen=True)
class _Mask:
    """Stands for a mask that was asked for."""

    function: Callable[..., Any]
    window: int | None

    def sees(self, query: int, key: int) -> bool:
        return bool(self.function(*(torch.tensor(index) for index in (0, 0, query, key))))

    def visible(self, of_packed: _Mask) -> Visible:
        """Return what a token sees by this mask, and by that of a packed row."""
        is_causal, window = self.sees(1, 1) and not self.sees(0, 1), self.window
        if self.sees(_FAR, 0):
            window = None
        else:
            is_causal &= window is not None and not self.sees(window, 0) and (window == 1 or self.sees(window, 1))
        return Visible(is_causal, window, not of_packed.sees(_FIRST + 1, _FIRST - 1))


def visible_tokens(lm: PreTrainedModel) -> list[Visible] | None:
    """Return what a token of each block of `lm` sees. Its parameters may be on the meta device.

    Returns:
        None if the model does not tell: it builds no masks, or hands them to its blocks in its own way.
    """
    packed = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    try:
        alone, together = _masks(lm, torch.arange(_FIRST + _SECOND)), _masks(lm, packed)
        return [mask.visible(of_packed) for mask, of_packed in zip(alone, together, strict=True)]
    except Exception:  # the code of a model may need more than it gets here
        return None


def _masks(lm: PreTrainedModel, positions: torch.Tensor) -> list[_Mask]:
    """Return the masks that the blocks get for a row of tokens at these positions. Raises Exception: the code of the
    model fails, or a block gets no mask."""
    blocks, found = transformer_blocks(lm), {}

    def block_of(number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, _Mask)]
            if len(given) == 1:
                found[number] = given[0]
            return args[0] if args else kwargs["hidden_states"]

        return forward

    with ExitStack() as ends:
        for number, block in enumerate(blocks):
            ends.enter_context(replaced_forward(block, block_of(number)))
        for module in lm.modules():
            if "rotary" in type(module).__name__.lower():
                ends.enter_context(replaced_forward(module, lambda x, *_, **__: (x, x)))
        ends.callback(setattr, lm.config, "_attn_implementation", lm.config._attn_implementation)
        lm.config._attn_implementation = _RECORDED
        ends.enter_context(torch.no_grad())
        ids = torch.zeros(1, len(positions), dtype=torch.long)
        lm.base_model(input_ids=ids, position_ids=positions[None], use_cache=False)
    return [found[number] for number in range(len(blocks))]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module` compute `forward` in the block."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


ALL_MASK_ATTENTION_FUNCTIONS.register(
    _RECORDED, lambda *_, mask_function, local_size=None, **__: _Mask(mask_function, local_size)
)
ALL_ATTENTION_FUNCTIONS.register(_RECORDED, packed_attention)  # no block runs while its mask is asked for
