"""Log-probs of tokens under a language model, and the entropy of its distributions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.models.attention import packing_arguments
from trainer.parallel.packing import Packing


def token_logprobs(model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each token given the previous tokens of its sequence.

    Args:
        input_ids: `(1, N)`, the B sequences of `packing`.
        temperature: divides the logits, as in the sampler; 0 (greedy) counts as 1.

    Returns:
        nats, `(B, T)` float32, with T the length of the longest sequence. Entry t belongs to token t; it is 0 at t = 0
        and in the padding.
    """
    logits = _logits(model, input_ids, packing, temperature)
    return _of_chosen(logits, torch.logsumexp(logits, dim=-1), input_ids, packing)


def logprobs_and_entropy(
    model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float = 1.0, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and the entropy of the distribution of each token.

    Args:
        entropy_grad: compute gradients of the entropies (this costs another `(1, N, V)` tensor).

    Returns:
        log-probs and entropies in nats, both `(B, T)` float32; entry t belongs to token t and is 0 at t = 0.
    """
    logits = _logits(model, input_ids, packing, temperature)
    log_normalizer = torch.logsumexp(logits, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = log_normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
    return _of_chosen(logits, log_normalizer, input_ids, packing), packing.rows_of_next(entropy)


def _logits(model: nn.Module, input_ids: Tensor, packing: Packing, temperature: float) -> Tensor:
    arguments = packing_arguments(model.config, packing)
    logits = model(input_ids=input_ids, use_cache=False, **arguments).logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _of_chosen(logits: Tensor, log_normalizer: Tensor, input_ids: Tensor, packing: Packing) -> Tensor:
    next_ids = input_ids.gather(1, packing.next_places)
    chosen = logits.gather(-1, next_ids.unsqueeze(-1)).squeeze(-1)
    return packing.rows_of_next(chosen - log_normalizer)
