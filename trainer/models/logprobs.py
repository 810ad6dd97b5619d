"""Log-probs of tokens under a language model, and the entropy of what they are drawn from."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def token_logprobs(
    model: nn.Module, input_ids: Tensor, temperature: float = 1.0, *, position_ids: Tensor | None = None
) -> Tensor:
    """Log-prob of each token given those before it.

    Rows are padded on the right, so the causal mask alone keeps padding out of every real token's sight.

    Args:
        input_ids: `(B, T)`.
        temperature: divides the logits, as the sampler's does; 0 (greedy) counts as 1.
        position_ids: `(B, T)`, restarting at 0 for each example of a packed row; omitted: one per row.

    Returns:
        nats, `(B, T)` float32; entry t belongs to token t and is 0 at t = 0.
    """
    logits = _logits(model, input_ids, temperature, position_ids)
    return _of_chosen(logits, torch.logsumexp(logits, dim=-1), input_ids)


def logprobs_and_entropy(
    model: nn.Module, input_ids: Tensor, temperature: float = 1.0, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy of the distribution that each token came from.

    Args:
        entropy_grad: let gradients flow through the entropies (costs another `(B, T, V)` tensor).

    Returns:
        log-probs and entropies in nats, both `(B, T)` float32; entry t belongs to token t and is 0 at t = 0.
    """
    logits = _logits(model, input_ids, temperature)
    log_normalizer = torch.logsumexp(logits, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = log_normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
    return _of_chosen(logits, log_normalizer, input_ids), F.pad(entropy, (1, 0))


def _logits(model: nn.Module, input_ids: Tensor, temperature: float, position_ids: Tensor | None = None) -> Tensor:
    positions = {} if position_ids is None else {"position_ids": position_ids}
    logits = model(input_ids=input_ids, use_cache=False, **positions).logits[:, :-1].float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _of_chosen(logits: Tensor, log_normalizer: Tensor, input_ids: Tensor) -> Tensor:
    chosen = logits.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return F.pad(chosen - log_normalizer, (1, 0))
