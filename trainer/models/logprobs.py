"""Log-probs and entropies of tokens from hidden states, without a tensor of all logits.

The logits of a micro-batch, `(N, V)` in float32, are by far the largest tensor of a step: 5 GB for 8,192 tokens and a
vocabulary of 152k, and a plain backward pass holds five tensors of this size. Here, logits exist only for a few hundred
tokens at a time, in the forward pass and again in the backward pass, and only for tokens whose log-probs are needed. On
CPU they exist only for a block of the vocabulary at a time, which fits into the cache.

`set_head` replaces the model's `forward`, so that the head runs inside it: FSDP gathers the weights of the head once.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from trainer.config.algorithm import TeacherConfig
from trainer.models.attention import packing_arguments, replaced_forward
from trainer.models.online_softmax import (
    LikeliestTokens,
    OnlineSoftmax,
    Vocabulary,
    divergence,
    entries_of,
    gradient_of_logits,
    kernel,
    log_softmax,
)
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing, index_select


def token_logprobs(
    model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Return the log-prob of each token given the previous tokens of its sequence (see `token_scores`)."""
    logprobs = token_scores(model, input_ids, packing, temperature, mask)[0]
    assert logprobs is not None
    return logprobs


def token_scores(
    model: nn.Module,
    input_ids: Tensor,
    packing: Packing,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    entropy: str | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the log-prob of each token given the previous tokens of its sequence, the entropy of the distribution at
    each token, and its divergence from the teacher's.

    Args:
        model: a model after `set_attention` and `set_head`.
        input_ids: `(1, N)`, the B sequences of `packing`.
        temperature: divides the logits, as in the sampler. 0 (greedy) counts as 1.
        mask: `(B, T)`; 1 for tokens whose log-probs are needed. None: all tokens.
        entropy: see `Targets`.
        teacher: its distributions at the same tokens. None: there is no divergence.

    Returns:
        nats, each `(B, T)` float32, with T the length of the longest sequence; None: not computed. Entry t belongs to
        token t. It is 0 at t = 0, in the padding, and where `mask` is 0.
    """
    where, targets = _targets(input_ids, packing, temperature, mask, entropy, teacher)
    scores, is_own = _of_own_slice(model, input_ids, packing, targets)
    if packing.cp is not None and is_own is not None:
        scores = tuple(
            None if own is None else packing.cp.all_reduce(own.new_zeros(is_own.shape).masked_scatter(is_own, own))
            for own in scores
        )
    return tuple(None if s is None else s.new_zeros(where.shape).masked_scatter(where, s) for s in scores)


@torch.no_grad()
def distributions(
    model: nn.Module, input_ids: Tensor, packing: Packing, mask: Tensor, settings: TeacherConfig
) -> Distributions:
    """Return the distributions of a frozen model where `mask` is 1, which the update of another model compares.

    They share the weight of the head with the model, so that must stay as it is meanwhile: gathered.
    """
    _, targets = _targets(input_ids, packing, 1.0, mask, _STATES)
    (states, *_), _ = _of_own_slice(model, input_ids, packing, targets)
    forward: Any = model.forward
    if forward.func is not _chunked_forward:
        return Distributions(states, None, Head(), settings)
    weight = model.get_output_embeddings().weight
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    return Distributions(states, weight, forward.args[1], settings)


def _targets(
    input_ids: Tensor, packing: Packing, temperature: float, mask: Tensor | None, *wanted: Any
) -> tuple[Tensor, Targets]:
    """Return where the targets are, `(B, T)`, and the targets, with further fields of them."""
    where = packing.has_previous if mask is None else packing.has_previous & (mask > 0)
    ids = input_ids[0, packing.token_indices[where]]
    return where, Targets(packing.previous_indices[where], ids, temperature or 1.0, *wanted)


def _of_own_slice(
    model: nn.Module, input_ids: Tensor, packing: Packing, targets: Targets
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Return what `model` computes for the targets in this rank's slice of the row, and `(n,)`, which those are; None:
    this rank has the whole row."""
    arguments = packing_arguments(model.config, packing)
    if packing.cp is None:
        return model(input_ids, targets, arguments), None
    local, indices = packing.local_slice, targets.indices
    is_own = (indices >= local.start) & (indices < local.stop)
    teacher = targets.teacher.select(is_own) if isinstance(targets.teacher, LikeliestTokens) else targets.teacher
    own = replace(targets, indices=indices[is_own] - local.start, ids=targets.ids[is_own], teacher=teacher)
    return model(packing.shard(input_ids), own, arguments), is_own


_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens whose logits exist at the same time: enough for fast matrix products."""
_CHUNK_LOGITS = 1 << 22
"""With a small vocabulary, a chunk has more tokens, up to this many logits. On CPU, this is also the limit with a large
vocabulary: 16 MB stay in the cache between one pass over them and the next."""
_DIVERGENCE_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits of each model that exist at the same time for a divergence; its formula holds several tensors of that size."""
_STATES = "states"


@dataclass(frozen=True)
class Head:
    """What a model computes from the logits `z = W h` of its output layer: `softcap tanh(scale z / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None  # None: the logits are `scale z`

    def apply(self, logits: Tensor) -> Tensor:
        scaled = self.scale * logits
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


_FULL = Vocabulary()


@dataclass(frozen=True)
class Distributions:
    """The distributions of a teacher at n targets, before the logits are computed."""

    states: Tensor  # `(n, h)`: the input of the head. Without a weight `(n, v)`: the logits.
    weight: Tensor | None  # `(v, h)`, of the head; with tensor parallelism this rank's slice
    head: Head
    settings: TeacherConfig

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits of some targets, at least float32."""
        states = self.states[chunk]
        return states if self.weight is None else self.head.apply(_logits(states, self.weight))


Teacher = Distributions | LikeliestTokens


@dataclass(frozen=True)
class Targets:
    """The tokens of a row whose log-probs are needed."""

    indices: Tensor  # `(n,)`: the index in the row of the token before each target
    ids: Tensor  # `(n,)`: the token ids of the targets
    temperature: float  # divides the logits
    entropy: str | None
    """Whether to compute entropies: their `value`, their `gradient`, too, or None (no entropies). `states`: the input
    of the head is returned in place of log-probs."""
    teacher: Teacher | None = None  # compute the divergence from these distributions, too


def set_head(lm: PreTrainedModel) -> bool:
    """Replace the `forward` of `lm` by one that returns no logits.

    It has the arguments token ids `(1, N)`, `Targets`, and a dict of further arguments of the model. It returns the
    log-probs `(n,)` of the targets and the entropies `(n,)` of their distributions (or None), in nats, at least
    float32.

    A model whose head is more than one linear layer, a factor and a soft cap computes all its logits.

    If the weight of the output layer is a DTensor, each rank of its mesh has the rows of a slice of the vocabulary.

    Returns:
        whether logits are computed in chunks of tokens.
    """
    head = find_head(lm)
    if head is None:
        lm.forward = functools.partial(_unchunked_forward, lm, lm.forward)
    else:
        lm.forward = functools.partial(_chunked_forward, lm, head)
    return head is not None


def compile_head(lm: nn.Module) -> None:
    """Compile what is done to the logits of `lm` if its head computes them in chunks. Call it after `set_head`."""
    forward = getattr(lm, "forward", None)
    if isinstance(forward, functools.partial) and forward.func is _chunked_forward:
        lm.forward = functools.partial(forward, compiled=True)


def _chunked_forward(
    lm: PreTrainedModel,
    head: Head,
    input_ids: Tensor,
    targets: Targets,
    arguments: dict[str, Any],
    compiled: bool = False,
) -> tuple[Tensor | None, ...]:
    states = lm.base_model(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
    hidden, weight, vocabulary = index_select(states[0], targets.indices), lm.get_output_embeddings().weight, _FULL
    if targets.entropy == _STATES:
        return hidden, None, None
    if isinstance(weight, DTensor):
        axis = AxisGroup.along(weight.device_mesh)
        hidden, weight = axis.all_reduce_grad(hidden), weight.to_local()
        vocabulary = Vocabulary(axis.rank * len(weight), axis)
    scores = _ChunkedScores.apply(
        hidden, weight, targets.ids, head, targets.temperature, targets.entropy, vocabulary, compiled
    )
    if targets.teacher is None:
        return *scores, None
    return *scores, _ChunkedDivergence.apply(hidden, weight, head, targets.teacher, vocabulary)


def _unchunked_forward(
    lm: PreTrainedModel, forward: Any, input_ids: Tensor, targets: Targets, arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    logits = forward(input_ids=input_ids, use_cache=False, **arguments).logits[0]
    logits = index_select(logits, targets.indices).float()
    if targets.entropy == _STATES:
        return logits, None, None
    logp = (logits / targets.temperature).log_softmax(dim=-1)
    logprobs, entropies = logp.gather(-1, targets.ids[:, None])[:, 0], None
    if targets.entropy is not None:
        with torch.set_grad_enabled(targets.entropy == "gradient" and torch.is_grad_enabled()):
            entropies = -(logp.exp() * logp).sum(dim=-1)
    if targets.teacher is None:
        return logprobs, entropies, None
    return logprobs, entropies, _divergences(logits, Head(), targets.teacher, slice(None), _FULL)


class _ChunkedScores(torch.autograd.Function):
    """Log-probs and entropies of a softmax over `W h`, in chunks of tokens.

    With `p = softmax(z / temperature)`, the log-prob `l = log p_target` and the entropy `H = -sum p log p`:

        dl/dz_j = (1[j = target] - p_j) / temperature
        dH/dz_j = -p_j (log p_j + H) / temperature

    The backward pass computes the logits of each chunk again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
        temperature: float,
        entropy: str | None,
        vocabulary: Vocabulary = _FULL,
        compiled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = hidden.new_empty(len(hidden), dtype=_sum_dtype(weight))
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks, blocks, buffer = _pieces(len(hidden), weight)
        for chunk in chunks:
            sums: OnlineSoftmax | None = None
            for block in blocks:
                z = _logits(hidden[chunk], weight[block], head, temperature, buffer)
                of_targets = entries_of(z, targets[chunk] - vocabulary.first - block.start)
                of_block = OnlineSoftmax.of(z, of_targets, entropy is not None, compiled)
                del z  # before those of the next chunk are computed
                sums = of_block if sums is None else sums.merged(of_block)
            assert sums is not None
            maximum = vocabulary.maximum(sums.maximum)
            sums = sums.relative_to(maximum)
            if sums.dot is None:
                of_targets, total = vocabulary.total(sums.of_targets, sums.total)
            else:
                of_targets, total, dot = vocabulary.total(sums.of_targets, sums.total, sums.dot)
                entropies[chunk] = total.log() - dot / total
            logprobs[chunk] = of_targets - maximum - total.log()
            normalizers[chunk] = total.log() + maximum
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.options = vocabulary, head, temperature, entropy, compiled
        if entropy is None:
            return logprobs, None
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        vocabulary, head, temperature, entropy, compiled = ctx.options
        factor = -head.scale / temperature
        of_logprobs, of_entropies = (None if grad is None else grad * factor for grad in grads)
        dtype = _sum_dtype(weight)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        chunks, blocks, buffer = _pieces(len(hidden), weight)
        gradient = kernel(gradient_of_logits, compiled)
        has_slope = entropy == "gradient"
        inverse_bound = None if head.softcap is None else temperature / head.softcap
        for chunk, block in itertools.product(chunks, blocks):
            z = _logits(hidden[chunk], weight[block], head, temperature, buffer)
            columns = targets[chunk] - vocabulary.first - block.start
            of_tokens = (entropies[chunk], of_entropies[chunk]) if has_slope else (None, None)
            slopes = normalizers[chunk], of_logprobs[chunk], *of_tokens
            d_logits = gradient(z, columns, *slopes, inverse_bound, weight.dtype, not compiled)
            del z
            if d_hidden is not None:
                _add_product(d_hidden[chunk], d_logits, weight[block])
            if d_weight is not None:
                _add_product(d_weight[block], d_logits.T, hidden[chunk])
            del d_logits
        gradients = (None if d is None else d.to(weight.dtype) for d in (d_hidden, d_weight))
        return *gradients, None, None, None, None, None, None


class _ChunkedDivergence(torch.autograd.Function):
    """Divergences `(n,)` of a teacher from the softmax over `W h`, in chunks of tokens.

    The backward pass computes the logits of each chunk again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: Head, teacher: Teacher, vocabulary: Vocabulary
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.options = head, teacher, vocabulary
        result = hidden.new_empty(len(hidden), dtype=_sum_dtype(weight))
        for chunk in _divergence_chunks(hidden, weight):
            logits = _logits(hidden[chunk], weight)
            result[chunk] = _divergences(logits, head, teacher, chunk, vocabulary)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), (head, teacher, vocabulary) = ctx.saved_tensors, ctx.options
        dtype = _sum_dtype(weight)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for chunk in _divergence_chunks(hidden, weight):
            logits = _logits(hidden[chunk], weight).requires_grad_()
            with torch.enable_grad():
                values = _divergences(logits, head, teacher, chunk, vocabulary)
            (d_logits,) = torch.autograd.grad(values, logits, grads[0][chunk])
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                _add_product(d_hidden[chunk], d_logits, weight)
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[chunk])
        gradients = (None if d is None else d.to(weight.dtype) for d in (d_hidden, d_weight))
        return *gradients, None, None, None


def _divergences(logits: Tensor, head: Head, teacher: Teacher, chunk: slice, vocabulary: Vocabulary) -> Tensor:
    """Return the divergences of some targets from the logits `W h` of the policy. A teacher may have more columns."""
    settings = teacher.settings
    of_policy = log_softmax(head.apply(logits) / settings.temperature, vocabulary)
    if isinstance(teacher, LikeliestTokens):
        return teacher.select(chunk).divergence(of_policy)
    first = vocabulary.first if teacher.weight is None else 0  # else they are of this rank's slice already
    of_teacher = teacher.logits(chunk)[:, first : first + logits.shape[1]]
    of_teacher = log_softmax(of_teacher / settings.temperature, vocabulary)
    (total,) = vocabulary.total(divergence(of_teacher, of_policy, settings.divergence, settings.beta))
    return total


def _divergence_chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _DIVERGENCE_LOGITS[weight.device.type] // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def logits_at_a_time(rows: int, targets: int, device: str) -> int:
    """Return how many logits exist at the same time; on a GPU, with up to so many targets.

    Args:
        rows: tokens of the vocabulary that the rank has.
        targets: tokens whose log-probs are needed.
        device: `cpu` or `cuda`.
    """
    most = max(_CHUNK_TOKENS[device], _CHUNK_LOGITS // rows)
    if device == "cuda":  # the largest chunks are not those of the most targets
        return min(targets, most) * rows
    longest = -(-targets // max(1, -(-targets // most)))
    return longest * min(rows, max(1, _CHUNK_LOGITS // max(longest, 1)))


def _pieces(n: int, weight: Tensor) -> tuple[list[slice], list[slice], Tensor | None]:
    """Return slices of similar size that cover `n` tokens, slices of the vocabulary whose logits are computed together
    for each (on CUDA one), and a tensor for the logits of any of both on CPU, or None on CUDA.

    All chunks reuse it, because the pages of a large new tensor cost about as much as the computation in it. On CUDA,
    torch itself reuses memory.
    """
    size = len(weight)
    count = max(1, -(-n // max(_CHUNK_TOKENS[weight.device.type], _CHUNK_LOGITS // size)))
    chunks = [slice(n * i // count, n * (i + 1) // count) for i in range(count)] if n else []
    longest = max((chunk.stop - chunk.start for chunk in chunks), default=1)
    width = size if weight.is_cuda else max(1, _CHUNK_LOGITS // longest)
    blocks = [slice(start, min(start + width, size)) for start in range(0, size, width)]
    if weight.is_cuda or not chunks:
        return chunks, blocks, None
    return chunks, blocks, weight.new_empty(longest * min(width, size), dtype=_sum_dtype(weight))


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """Return the precision of logits and of sums over tokens: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def _logits(
    hidden: Tensor, weight: Tensor, head: Head = Head(), temperature: float = 1.0, buffer: Tensor | None = None
) -> Tensor:
    """Return the logits `(n, v)`, at least float32, divided by the temperature: in `buffer`, or in a new tensor."""
    dtype = _sum_dtype(weight)
    z = None if buffer is None else buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
    if z is not None and weight.dtype == dtype:
        torch.mm(hidden, weight.T, out=z)
    elif z is not None:
        z.copy_(hidden @ weight.T)
    elif weight.dtype != dtype:
        z = torch.mm(hidden, weight.T, out_dtype=dtype)
    else:
        z = hidden @ weight.T
    if head.softcap is not None:
        z.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / temperature)
    elif head.scale != temperature:
        z *= head.scale / temperature
    return z


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`, which may have a higher precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


# ---------------------------------------------------------------------------------------------------
# What a model computes around its output layer


@torch.no_grad()
def find_head(lm: PreTrainedModel) -> Head | None:
    """Determine what `lm`, which may be on the meta device, computes from the logits of its output layer.

    The model's `forward` runs with replaced backbone and output layer, and its result is compared with candidates.

    Returns:
        None if `Head` cannot express it.
    """
    layer = lm.get_output_embeddings()
    children = dict(lm.named_children())
    backbone, is_child = children.get(lm.base_model_prefix), any(child is layer for child in children.values())
    if not is_child or backbone is None or type(layer) is not nn.Linear or layer.bias is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, layer.in_features, generator=generator)
    logits = 5 * torch.randn(1, 3, layer.out_features, generator=generator)
    inputs: list[Tensor] = []
    # A mixture of experts reads the `router_logits` of its backbone.
    states = MoeModelOutputWithPast(last_hidden_state=hidden.clone())

    def record(given: Tensor) -> Tensor:
        inputs.append(given)
        return logits.clone()

    try:
        with replaced_forward(backbone, lambda *_, **__: states), replaced_forward(layer, record):
            result = lm(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception:  # the code of the model may need more of its backbone; then the model runs unchanged
        return None
    if not inputs or not torch.equal(inputs[-1], hidden) or result.shape != logits.shape:
        return None
    softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    ratio = float(result.flatten()[0] / logits.flatten()[0])
    candidates = [Head(), Head(scale=ratio), *([Head(softcap=softcap)] if softcap else [])]
    return next((head for head in candidates if torch.allclose(result, head.apply(logits), rtol=1e-5)), None)
