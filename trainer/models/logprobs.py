"""Log-probs of tokens under a language model, and the entropy of its distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trainer.models.attention import packing_arguments
from trainer.models.chunked_logprobs import Targets
from trainer.parallel.packing import Packing


def token_logprobs(
    model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Return the log-prob of each token given the previous tokens of its sequence.

    Args:
        model: with `set_attention` and `set_head`.
        input_ids: `(1, N)`, the B sequences of `packing`.
        temperature: divides the logits, as in the sampler; 0 (greedy) counts as 1.
        mask: `(B, T)`; tokens where it is 0 are left out. None: all tokens count.

    Returns:
        nats, `(B, T)` float32, with T the length of the longest sequence. Entry t belongs to token t; it is 0 at t = 0,
        in the padding, and where `mask` is 0.
    """
    return _scores(model, input_ids, packing, temperature, mask, None)[0]


def logprobs_and_entropy(
    model: nn.Module,
    input_ids: Tensor,
    packing: Packing,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and the entropy of the distribution of each token.

    Args:
        entropy_grad: compute gradients of the entropies.

    Returns:
        log-probs and entropies in nats, both `(B, T)` float32.
    """
    logprobs, entropy = _scores(model, input_ids, packing, temperature, mask, "grad" if entropy_grad else "value")
    assert entropy is not None
    return logprobs, entropy


def _scores(
    model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float, mask: Tensor | None, entropy: str | None
) -> tuple[Tensor, Tensor | None]:
    where = packing.has_previous if mask is None else packing.has_previous & (mask > 0)
    targets = input_ids[0, packing.places[where]]
    wanted = Targets(packing.previous_places[where], targets, temperature or 1.0, entropy)
    arguments = packing_arguments(model.config, packing)
    if packing.context is None:
        scores = model(input_ids, wanted, arguments)
    else:
        scores = _scores_of_parts(model, input_ids, packing, wanted, arguments)
    logprobs, entropies = (None if s is None else s.new_zeros(where.shape).masked_scatter(where, s) for s in scores)
    assert logprobs is not None
    return logprobs, entropies


def _scores_of_parts(
    model: nn.Module, input_ids: Tensor, packing: Packing, wanted: Targets, arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Return the scores of all wanted tokens, of which each rank computes those in its part of the row."""
    assert packing.context is not None
    part, places, context = packing.part, wanted.places, packing.context
    own = (places >= part.start) & (places < part.stop)
    wanted_here = replace(wanted, places=places[own] - part.start, targets=wanted.targets[own])

    def of_all(scores: Tensor) -> Tensor:
        return context.total(scores.new_zeros(len(places)).masked_scatter(own, scores))

    parts = model(packing.own(input_ids), wanted_here, arguments)
    return tuple(None if scores is None else of_all(scores) for scores in parts)
