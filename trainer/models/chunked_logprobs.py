"""Log-probs and entropies of tokens from hidden states, without a tensor of all logits.

The logits of a micro-batch, `(N, V)` in float32, are the largest tensor of a step by far: 5 GB for 8,192 tokens and a
vocabulary of 152k, and a plain backward pass holds five tensors of this size. Here they exist for a few hundred tokens
at a time, in the forward pass and again in the backward pass, and only for tokens whose log-probs are read. On CPU they
exist for a part of the vocabulary at a time, which stays in the cache.

`set_head` replaces the model's `forward`, so that the head runs inside it: FSDP gathers the weights of the head once.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import take

_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens whose logits exist at the same time: enough for fast matrix products."""
_CHUNK_LOGITS = 1 << 22
"""With a small vocabulary, the logits of more tokens exist at the same time, up to this many logits. On CPU, no more
exist with a large vocabulary either: 16 MB stay in the cache between one pass over them and the next."""

_ADDS_IN_PLACE = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether a product of half precision can be added to a float32 tensor without a tensor for the product. CUDA only."""


@dataclass(frozen=True)
class Head:
    """What a model does to the logits `z = W h` of its output layer: `softcap tanh(scale z / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None
    """None: the logits are `scale z`."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary whose logits this rank computes."""

    first: int = 0
    peers: AxisGroup | None = None
    """The ranks that have the other parts. None: this rank has the whole vocabulary."""

    def highest(self, values: Tensor) -> Tensor:
        """Return the highest values `(n,)` of all ranks, of those of this rank."""
        return values if self.peers is None else self.peers.highest(values)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return sums `(n,)` over the whole vocabulary, of those of this rank."""
        return sums if self.peers is None else tuple(self.peers.total(torch.stack(sums)))

    def block(self, start: int) -> Vocabulary:
        """Return the part that begins at the place `start` of this one."""
        return Vocabulary(self.first + start)

    def pick(self, z: Tensor, targets: Tensor) -> Tensor:
        """Return the entries `(n,)` of the targets; 0 if the target is in another part."""
        places, own = self._places(z, targets)
        return z.gather(-1, places[:, None])[:, 0].where(own, 0)

    def add(self, z: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values `(n,)` to the entries of the targets that are in this part."""
        places, own = self._places(z, targets)
        z.scatter_add_(-1, places[:, None], values.where(own, 0)[:, None])

    def _places(self, z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        places = targets - self.first
        own = (places >= 0) & (places < z.shape[1])
        return places * own, own


_WHOLE = Vocabulary()


@dataclass(frozen=True)
class Targets:
    """The tokens of a row whose log-probs are wanted."""

    places: Tensor
    """`(n,)`: the index in the row of the token before each of them."""
    targets: Tensor
    """`(n,)`: their ids."""
    temperature: float
    """Divides the logits."""
    entropy: str | None
    """What to compute of the entropies: `value`, `grad` (the value, with gradients) or None (nothing)."""


def set_head(lm: PreTrainedModel) -> bool:
    """Replace the `forward` of `lm`, which will not return logits.

    It takes token ids `(1, N)`, `Targets` and a dict of further arguments of the model. It returns the log-probs `(n,)`
    of the wanted tokens and the entropies `(n,)` of their distributions (or None), in nats, at least float32.

    A model whose head is more than one linear layer, a factor and a soft cap computes all its logits.

    If the weight of the output layer is a DTensor, each rank of its mesh has the rows of a part of the vocabulary.

    Returns:
        whether logits are computed for some tokens at a time.
    """
    head = find_head(lm)
    if head is None:
        lm.forward = functools.partial(_whole_forward, lm, lm.forward)
    else:
        lm.forward = functools.partial(_chunked_forward, lm, head)
    return head is not None


def _chunked_forward(
    lm: PreTrainedModel, head: Head, input_ids: Tensor, wanted: Targets, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    states = lm.base_model(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
    hidden, weight, part = take(states[0], wanted.places), lm.get_output_embeddings().weight, _WHOLE
    if isinstance(weight, DTensor):
        peers = AxisGroup.along(weight.device_mesh)
        hidden, weight = peers.shared(hidden), weight.to_local()
        part = Vocabulary(peers.rank * len(weight), peers)
    return _ChunkedScores.apply(hidden, weight, wanted.targets, head, wanted.temperature, wanted.entropy, part)


def _whole_forward(
    lm: PreTrainedModel, forward: Any, input_ids: Tensor, wanted: Targets, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    logits = forward(input_ids=input_ids, use_cache=False, **arguments).logits[0]
    logp = (take(logits, wanted.places).float() / wanted.temperature).log_softmax(dim=-1)
    logprobs = logp.gather(-1, wanted.targets[:, None])[:, 0]
    if wanted.entropy is None:
        return logprobs, None
    with torch.set_grad_enabled(wanted.entropy == "grad" and torch.is_grad_enabled()):
        return logprobs, -(logp.exp() * logp).sum(dim=-1)


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
        part: Vocabulary = _WHOLE,
    ) -> tuple[Tensor, Tensor | None]:
        n = len(hidden)
        logprobs = hidden.new_empty(n, dtype=_sum_dtype(weight))
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(n, weight)
        blocks = _blocks(chunks, weight)
        room = _room(chunks, blocks, weight)
        for chunk in chunks:
            sums: OnlineSoftmax | None = None
            for block in blocks:
                z = _logits(hidden[chunk], weight[block], head, temperature, room)
                more = OnlineSoftmax.of(z, part.block(block.start).pick(z, targets[chunk]), entropy is not None)
                sums = more if sums is None else sums.joined(more)
            assert sums is not None
            highest = part.highest(sums.highest)
            sums = sums.relative_to(highest)
            if sums.dot is None:
                chosen, total = part.total(sums.chosen, sums.total)
            else:
                chosen, total, dot = part.total(sums.chosen, sums.total, sums.dot)
                entropies[chunk] = total.log() - dot / total
            logprobs[chunk] = chosen - highest - total.log()
            normalizers[chunk] = total.log() + highest
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.options = part, head, temperature, entropy
        if entropy is None:
            return logprobs, None
        if entropy != "grad":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        part, head, temperature, entropy = ctx.options
        factor = -head.scale / temperature
        of_logprobs, of_entropies = (None if grad is None else grad * factor for grad in grads)
        dtype = _sum_dtype(weight)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        chunks = _chunks(len(hidden), weight)
        blocks = _blocks(chunks, weight)
        room = _room(chunks, blocks, weight)
        for chunk, block in itertools.product(chunks, blocks):
            z = _logits(hidden[chunk], weight[block], head, temperature, room)
            slope = None if head.softcap is None else 1 - (z * (temperature / head.softcap)).square_()
            z -= normalizers[chunk, None]  # log p
            _avoid_denormals(z)
            if entropy == "grad":
                p = z.exp()
                z += entropies[chunk, None]
                z *= of_entropies[chunk, None]
                z += of_logprobs[chunk, None]
                z *= p
                del p
            else:
                z.exp_()
                z *= of_logprobs[chunk, None]
            # z is now the gradient, but for the term of the target.
            part.block(block.start).add(z, targets[chunk], -of_logprobs[chunk])
            if slope is not None:
                z *= slope
            d_logits = z.to(weight.dtype)
            if d_hidden is not None:
                _add_product(d_hidden[chunk], d_logits, weight[block])
            if d_weight is not None:
                _add_product(d_weight[block], d_logits.T, hidden[chunk])
        gradients = (None if d is None else d.to(weight.dtype) for d in (d_hidden, d_weight))
        return *gradients, None, None, None, None, None


@dataclass(frozen=True)
class OnlineSoftmax:
    """What the softmax of n tokens needs of a part of the logits `z`. All tensors are `(n,)`."""

    highest: Tensor
    """The highest logits."""
    total: Tensor
    """Sums of `exp(z - highest)`."""
    dot: Tensor | None
    """Sums of `exp(z - highest) (z - highest)`, for the entropy."""
    chosen: Tensor
    """The logits of the targets, 0 where they are in another part."""

    @classmethod
    def of(cls, z: Tensor, chosen: Tensor, with_dot: bool) -> OnlineSoftmax:
        """Return the sums of the logits `(n, v)`, which are overwritten."""
        highest = z.amax(dim=-1)
        z -= highest[:, None]
        _avoid_denormals(z)
        if not with_dot:
            return cls(highest, z.exp_().sum(dim=-1), None, chosen)
        p = z.exp()
        return cls(highest, p.sum(dim=-1), torch.linalg.vecdot(p, z), chosen)

    def joined(self, other: OnlineSoftmax) -> OnlineSoftmax:
        """Return the sums of both parts."""
        highest = torch.maximum(self.highest, other.highest)
        a, b = self.relative_to(highest), other.relative_to(highest)
        dot = None if a.dot is None or b.dot is None else a.dot + b.dot
        return OnlineSoftmax(highest, a.total + b.total, dot, a.chosen + b.chosen)

    def relative_to(self, highest: Tensor) -> OnlineSoftmax:
        """Return the same sums, in which `highest` takes the place of the highest logits."""
        lower = self.highest - highest
        factor = lower.exp()
        dot = None if self.dot is None else factor * (self.dot + lower * self.total)
        return OnlineSoftmax(highest, factor * self.total, dot, self.chosen)


def _avoid_denormals(z: Tensor) -> None:
    """Raise the logarithms of the smallest numbers of their type, in place.

    CPUs take thirty times as long for `exp` if the result is even smaller.
    """
    if not z.is_cuda:
        z.clamp_(min=math.ceil(math.log(torch.finfo(z.dtype).tiny)))


def _chunks(n: int, weight: Tensor) -> list[slice]:
    """Return slices of similar size that cover `n` tokens."""
    most = max(_CHUNK_TOKENS[weight.device.type], _CHUNK_LOGITS // len(weight))
    count = max(1, -(-n // most))
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)] if n else []


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """Return the precision of logits and of sums over tokens: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def _blocks(chunks: list[slice], weight: Tensor) -> list[slice]:
    """Return slices of the vocabulary whose logits of a chunk are computed together: on CUDA, all."""
    size, longest = len(weight), max((chunk.stop - chunk.start for chunk in chunks), default=1)
    width = size if weight.is_cuda else max(1, _CHUNK_LOGITS // longest)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _room(chunks: list[slice], blocks: list[slice], weight: Tensor) -> Tensor | None:
    """Return a tensor for the logits of any chunk and block on CPU, or None.

    All use it in turn, because the pages of a large new tensor cost about as much as what is computed in it. torch
    keeps the memory of tensors on CUDA.
    """
    if weight.is_cuda or not chunks:
        return None
    longest, widest = (max(part.stop - part.start for part in parts) for parts in (chunks, blocks))
    return weight.new_empty(longest * widest, dtype=_sum_dtype(weight))


def _logits(hidden: Tensor, weight: Tensor, head: Head, temperature: float, room: Tensor | None) -> Tensor:
    """Return the logits `(n, v)`, at least float32, divided by the temperature: in `room`, or in a new tensor."""
    dtype = _sum_dtype(weight)
    z = None if room is None else room[: len(hidden) * len(weight)].view(len(hidden), len(weight))
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
    """Add `a @ b` to `total`, which may be more precise."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _ADDS_IN_PLACE:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b


# ---------------------------------------------------------------------------------------------------
# What a model does around its output layer


class _Backbone(nn.Module):
    """Stands in for the model's own, and returns the same hidden states whatever it is given."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class _OutputLayer(nn.Module):
    """Stands in for the model's own, returns the same logits, and remembers what it was given."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits
        self.given: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return self.logits


def find_head(lm: PreTrainedModel) -> Head | None:
    """Find out what `lm`, which may be on the meta device, does to the logits of its output layer.

    Its own `forward` runs with a stand-in for the backbone and one for the output layer, and the results are compared.

    Returns:
        None if it does something that `Head` cannot express.
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
    stand_in = _OutputLayer(logits.clone())
    try:
        setattr(lm, prefix, _Backbone(hidden.clone()))
        setattr(lm, names[0], stand_in)
        with torch.no_grad():
            found = lm(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception:  # code of any model, which may need more of its backbone: then it runs as it is
        return None
    finally:
        setattr(lm, prefix, children[prefix])
        setattr(lm, names[0], layer)
    if stand_in.given is None or not torch.equal(stand_in.given, hidden) or found.shape != logits.shape:
        return None
    softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    ratio = float(found.flatten()[0] / logits.flatten()[0])
    candidates = [Head(), Head(scale=ratio), *([Head(softcap=softcap)] if softcap else [])]
    return next((head for head in candidates if torch.allclose(found, _apply(head, logits), rtol=1e-5)), None)


def _apply(head: Head, logits: Tensor) -> Tensor:
    scaled = head.scale * logits
    return scaled if head.softcap is None else head.softcap * torch.tanh(scaled / head.softcap)
