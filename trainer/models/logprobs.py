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
from trainer.models.attention import packing_arguments
from trainer.models.online_softmax import (
    LikeliestTokens,
    OnlineSoftmax,
    Slopes,
    Vocabulary,
    divergence,
    gradient_of_logits,
    log_softmax,
)
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing, index_select


def token_logprobs(
    model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Return the log-prob of each token given the previous tokens of its sequence.

    Args:
        model: a model after `set_attention` and `set_head`.
        input_ids: `(1, N)`, the B sequences of `packing`.
        temperature: divides the logits, as in the sampler. 0 (greedy) counts as 1.
        mask: `(B, T)`; 1 for tokens whose log-probs are needed. None: all tokens.

    Returns:
        nats, `(B, T)` float32, with T the length of the longest sequence. Entry t belongs to token t. It is 0 at t = 0,
        in the padding, and where `mask` is 0.
    """
    (logprobs, _) = _scores(model, input_ids, packing, temperature, mask, None)
    assert logprobs is not None
    return logprobs


def logprobs_and_entropy(
    model: nn.Module,
    input_ids: Tensor,
    packing: Packing,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and the entropy of the distribution at each token.

    Args:
        entropy_grad: compute gradients of the entropies.

    Returns:
        log-probs and entropies in nats, both `(B, T)` float32.
    """
    logprobs, entropy = _scores(model, input_ids, packing, temperature, mask, "grad" if entropy_grad else "value")
    assert logprobs is not None and entropy is not None
    return logprobs, entropy


def logprobs_and_divergence(
    model: nn.Module,
    input_ids: Tensor,
    packing: Packing,
    temperature: float,
    mask: Tensor,
    entropy: str | None,
    teacher: Teacher,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probs and entropies (see `logprobs_and_entropy`), and the divergence from the teacher at each token.

    Args:
        entropy: see `Targets`.
        teacher: its distributions at the same tokens (see `distributions` and `likeliest_tokens`).
    """
    logprobs, entropies, divergences = _scores(model, input_ids, packing, temperature, mask, entropy, teacher)
    assert logprobs is not None and divergences is not None
    return logprobs, entropies, divergences


@torch.no_grad()
def distributions(
    model: nn.Module, input_ids: Tensor, packing: Packing, mask: Tensor, settings: TeacherConfig
) -> Distributions:
    """Return the distributions of a frozen model where `mask` is 1, which the update of another model compares.

    They share the weight of the head with the model, so that must stay as it is meanwhile: gathered.
    """
    targets = _targets(input_ids, packing, 1.0, mask, _STATES)
    arguments = packing_arguments(model.config, packing)
    if packing.cp is not None:
        targets, _ = _local_targets(packing, targets)
        input_ids = packing.shard(input_ids)
    states, _ = model(input_ids, targets, arguments)
    forward: Any = model.forward
    if forward.func is not _chunked_forward:
        return Distributions(states, None, Head(), settings)
    weight = model.get_output_embeddings().weight
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    return Distributions(states, weight, forward.args[1], settings)


def _targets(
    input_ids: Tensor, packing: Packing, temperature: float, mask: Tensor | None, entropy: str | None
) -> Targets:
    where = _where(packing, mask)
    ids = input_ids[0, packing.token_indices[where]]
    return Targets(packing.previous_indices[where], ids, temperature or 1.0, entropy)


def _where(packing: Packing, mask: Tensor | None) -> Tensor:
    return packing.has_previous if mask is None else packing.has_previous & (mask > 0)


def _scores(
    model: nn.Module,
    input_ids: Tensor,
    packing: Packing,
    temperature: float,
    mask: Tensor | None,
    entropy: str | None,
    teacher: Teacher | None = None,
) -> tuple[Tensor | None, ...]:
    where = _where(packing, mask)
    targets = replace(_targets(input_ids, packing, temperature, mask, entropy), teacher=teacher)
    arguments = packing_arguments(model.config, packing)
    if packing.cp is None:
        scores = model(input_ids, targets, arguments)
    else:
        scores = _scores_of_slices(model, input_ids, packing, targets, arguments)
    return tuple(None if s is None else s.new_zeros(where.shape).masked_scatter(where, s) for s in scores)


def _scores_of_slices(
    model: nn.Module, input_ids: Tensor, packing: Packing, targets: Targets, arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Return the scores of all target tokens. Each rank computes those of its slice of the row."""
    assert packing.cp is not None
    cp, count = packing.cp, len(targets.indices)
    local_targets, is_local = _local_targets(packing, targets)

    def gather(scores: Tensor) -> Tensor:
        return cp.all_reduce(scores.new_zeros(count).masked_scatter(is_local, scores))

    local_scores = model(packing.shard(input_ids), local_targets, arguments)
    return tuple(None if scores is None else gather(scores) for scores in local_scores)


def _local_targets(packing: Packing, targets: Targets) -> tuple[Targets, Tensor]:
    """Return the targets of this rank's slice of the row, and `(n,)`, which of all targets they are."""
    local, indices = packing.local_slice, targets.indices
    is_local = (indices >= local.start) & (indices < local.stop)
    teacher = targets.teacher.select(is_local) if isinstance(targets.teacher, LikeliestTokens) else targets.teacher
    own = replace(targets, indices=indices[is_local] - local.start, ids=targets.ids[is_local], teacher=teacher)
    return own, is_local


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
    softcap: float | None = None
    """None: the logits are `scale z`."""


_FULL = Vocabulary()


@dataclass(frozen=True)
class Distributions:
    """The distributions of a teacher at n targets, before the logits are computed."""

    states: Tensor
    """`(n, h)`: the input of the head. Without a weight `(n, v)`: the logits."""
    weight: Tensor | None
    """`(v, h)`, of the head; with tensor parallelism this rank's slice."""
    head: Head
    settings: TeacherConfig

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits of some targets, at least float32."""
        states = self.states[chunk]
        return states if self.weight is None else _apply(self.head, _logits(states, self.weight, Head(), 1.0, None))


Teacher = Distributions | LikeliestTokens


@dataclass(frozen=True)
class Targets:
    """The tokens of a row whose log-probs are needed."""

    indices: Tensor
    """`(n,)`: the index in the row of the token before each target."""
    ids: Tensor
    """`(n,)`: the token ids of the targets."""
    temperature: float
    """Divides the logits."""
    entropy: str | None
    """Whether to compute entropies: `value`, `grad` (the value, with gradients) or None (no entropies). `states`: the
    input of the head is returned in place of log-probs."""
    teacher: Teacher | None = None
    """Compute the divergence from these distributions, too."""


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
        return hidden, None
    if isinstance(weight, DTensor):
        axis = AxisGroup.along(weight.device_mesh)
        hidden, weight = axis.all_reduce_grad(hidden), weight.to_local()
        vocabulary = Vocabulary(axis.rank * len(weight), axis)
    scores = _ChunkedScores.apply(
        hidden, weight, targets.ids, head, targets.temperature, targets.entropy, vocabulary, compiled
    )
    if targets.teacher is None:
        return scores
    return *scores, _ChunkedDivergence.apply(hidden, weight, head, targets.teacher, vocabulary)


def _unchunked_forward(
    lm: PreTrainedModel, forward: Any, input_ids: Tensor, targets: Targets, arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    logits = forward(input_ids=input_ids, use_cache=False, **arguments).logits[0]
    logits = index_select(logits, targets.indices).float()
    if targets.entropy == _STATES:
        return logits, None
    logp = (logits / targets.temperature).log_softmax(dim=-1)
    logprobs, entropies = logp.gather(-1, targets.ids[:, None])[:, 0], None
    if targets.entropy is not None:
        with torch.set_grad_enabled(targets.entropy == "grad" and torch.is_grad_enabled()):
            entropies = -(logp.exp() * logp).sum(dim=-1)
    if targets.teacher is None:
        return logprobs, entropies
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
        n = len(hidden)
        logprobs = hidden.new_empty(n, dtype=_sum_dtype(weight))
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(n, weight)
        blocks = _blocks(chunks, weight)
        buffer = _logits_buffer(chunks, blocks, weight)
        for chunk in chunks:
            sums: OnlineSoftmax | None = None
            for block in blocks:
                z = _logits(hidden[chunk], weight[block], head, temperature, buffer)
                of_targets = vocabulary.block(block.start).pick(z, targets[chunk])
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
        if entropy != "grad":
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
        chunks = _chunks(len(hidden), weight)
        blocks = _blocks(chunks, weight)
        buffer = _logits_buffer(chunks, blocks, weight)
        for chunk, block in itertools.product(chunks, blocks):
            z = _logits(hidden[chunk], weight[block], head, temperature, buffer)
            slopes = Slopes(
                normalizers[chunk],
                of_logprobs[chunk],
                entropies[chunk] if entropy == "grad" else None,
                of_entropies[chunk] if entropy == "grad" else None,
                None if head.softcap is None else temperature / head.softcap,
            )
            of_block = vocabulary.block(block.start)
            d_logits = gradient_of_logits(z, targets[chunk], of_block, slopes, weight.dtype, compiled)
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
            logits = _logits(hidden[chunk], weight, Head(), 1.0, None)
            result[chunk] = _divergences(logits, head, teacher, chunk, vocabulary)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), (head, teacher, vocabulary) = ctx.saved_tensors, ctx.options
        dtype = _sum_dtype(weight)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for chunk in _divergence_chunks(hidden, weight):
            logits = _logits(hidden[chunk], weight, Head(), 1.0, None).requires_grad_()
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
    of_policy = log_softmax(_apply(head, logits) / settings.temperature, vocabulary)
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
    if device == "cuda":  # the largest chunks are not those of the most targets
        return min(targets, _most_tokens(rows, device)) * rows
    longest = -(-targets // _count_chunks(targets, rows, device)) if targets else 0
    return longest * min(rows, max(1, _CHUNK_LOGITS // max(longest, 1)))


def _chunks(n: int, weight: Tensor) -> list[slice]:
    """Return slices of similar size that cover `n` tokens."""
    count = _count_chunks(n, len(weight), weight.device.type)
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)] if n else []


def _count_chunks(n: int, rows: int, device: str) -> int:
    return max(1, -(-n // _most_tokens(rows, device)))


def _most_tokens(rows: int, device: str) -> int:
    """Return the most tokens of a chunk."""
    return max(_CHUNK_TOKENS[device], _CHUNK_LOGITS // rows)


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """Return the precision of logits and of sums over tokens: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def _blocks(chunks: list[slice], weight: Tensor) -> list[slice]:
    """Return slices of the vocabulary whose logits are computed together for a chunk. On CUDA: one slice."""
    size, longest = len(weight), max((chunk.stop - chunk.start for chunk in chunks), default=1)
    width = size if weight.is_cuda else max(1, _CHUNK_LOGITS // longest)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _logits_buffer(chunks: list[slice], blocks: list[slice], weight: Tensor) -> Tensor | None:
    """Return a tensor for the logits of any chunk and block on CPU, or None on CUDA.

    All chunks reuse it, because the pages of a large new tensor cost about as much as the computation in it. On CUDA,
    torch itself reuses memory.
    """
    if weight.is_cuda or not chunks:
        return None
    longest, widest = (max(piece.stop - piece.start for piece in pieces) for pieces in (chunks, blocks))
    return weight.new_empty(longest * widest, dtype=_sum_dtype(weight))


def _logits(hidden: Tensor, weight: Tensor, head: Head, temperature: float, buffer: Tensor | None) -> Tensor:
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


class _Backbone(nn.Module):
    """Replaces the model's backbone, and returns the same hidden states for any input."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)  # a mixture of experts reads its `router_logits`


class _OutputLayer(nn.Module):
    """Replaces the model's output layer, returns the same logits, and records its input."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits
        self.input: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.input = hidden
        return self.logits


def find_head(lm: PreTrainedModel) -> Head | None:
    """Determine what `lm`, which may be on the meta device, computes from the logits of its output layer.

    The model's `forward` runs with replaced backbone and output layer, and its result is compared with candidates.

    Returns:
        None if `Head` cannot express it.
    """
    layer = lm.get_output_embeddings()
    children = dict(lm.named_children())
    names = [name for name, child in children.items() if child is layer]
    prefix = lm.base_model_prefix
    if not names or prefix not in children or type(layer) is not nn.Linear or layer.bias is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, layer.in_features, generator=generator)
    logits = 5 * torch.randn(1, 3, layer.out_features, generator=generator)
    output_layer = _OutputLayer(logits.clone())
    try:
        setattr(lm, prefix, _Backbone(hidden.clone()))
        setattr(lm, names[0], output_layer)
        with torch.no_grad():
            result = lm(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception:  # the code of the model may need more of its backbone; then the model runs unchanged
        return None
    finally:
        setattr(lm, prefix, children[prefix])
        setattr(lm, names[0], layer)
    if output_layer.input is None or not torch.equal(output_layer.input, hidden) or result.shape != logits.shape:
        return None
    softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    ratio = float(result.flatten()[0] / logits.flatten()[0])
    candidates = [Head(), Head(scale=ratio), *([Head(softcap=softcap)] if softcap else [])]
    return next((head for head in candidates if torch.allclose(result, _apply(head, logits), rtol=1e-5)), None)


def _apply(head: Head, logits: Tensor) -> Tensor:
    scaled = head.scale * logits
    return scaled if head.softcap is None else head.softcap * torch.tanh(scaled / head.softcap)
