"""Log-probs of tokens under a language model, and entropies of the next-token distributions."""

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
        model: a model after `set_attention` and `set_head`.
        input_ids: `(1, N)`, the B sequences of `packing`.
        temperature: divides the logits, as in the sampler. 0 (greedy) counts as 1.
        mask: `(B, T)`; 1 for tokens whose log-probs are needed. None: all tokens.

    Returns:
        nats, `(B, T)` float32, with T the length of the longest sequence. Entry t belongs to token t. It is 0 at t = 0,
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
    """Return `token_logprobs`, and the entropy of the distribution at each token.

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
    ids = input_ids[0, packing.token_indices[where]]
    targets = Targets(packing.previous_indices[where], ids, temperature or 1.0, entropy)
    arguments = packing_arguments(model.config, packing)
    if packing.cp is None:
        scores = model(input_ids, targets, arguments)
    else:
        scores = _scores_of_slices(model, input_ids, packing, targets, arguments)
    logprobs, entropies = (None if s is None else s.new_zeros(where.shape).masked_scatter(where, s) for s in scores)
    assert logprobs is not None
    return logprobs, entropies


def _scores_of_slices(
    model: nn.Module, input_ids: Tensor, packing: Packing, targets: Targets, arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Return the scores of all target tokens. Each rank computes those of its slice of the row."""
    assert packing.cp is not None
    local, indices, cp = packing.local_slice, targets.indices, packing.cp
    is_local = (indices >= local.start) & (indices < local.stop)
    local_targets = replace(targets, indices=indices[is_local] - local.start, ids=targets.ids[is_local])

    def gather(scores: Tensor) -> Tensor:
        return cp.all_reduce(scores.new_zeros(len(indices)).masked_scatter(is_local, scores))

    local_scores = model(packing.shard(input_ids), local_targets, arguments)
    return tuple(None if scores is None else gather(scores) for scores in local_scores)
