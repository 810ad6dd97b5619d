"""Engines with the embedded model, requests to them, and what their completions must agree with."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.config import RolloutConfig
from trainer.generation.engine import Completion, Request, Sampling
from trainer.seeding import derive_seed

ROLLOUT = RolloutConfig(max_prompt_tokens=300, max_response_tokens=64, max_num_seqs=64)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=16, stop_token_ids=())
SAMPLED = Sampling(temperature=0.7, top_p=1.0, top_k=-1, max_tokens=16, stop_token_ids=())


def make_requests(count: int, longest: int = 60) -> list[Request]:
    rng = random.Random(count)
    lengths = [rng.randint(3, longest) for _ in range(count)]
    return [
        Request([rng.randrange(256) for _ in range(length)], derive_seed(1, "completion", 1, str(i), 0), SAMPLED)
        for i, length in enumerate(lengths)
    ]


def with_sampling(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    return [dataclasses.replace(request, sampling=sampling) for request in requests]


@torch.no_grad()
def logits_of(model, request: Request, completion: Completion) -> Tensor:
    """Logits `(tokens, V)` before each token of the completion, from one forward of the trainer's model."""
    ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
    return model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]


def assert_agrees(model, requests: list[Request], completions: list[Completion], temperature: float) -> None:
    """Log-probs are the trainer's within 1e-4, and greedy tokens are its arg max."""
    for request, completion in zip(requests, completions, strict=True):
        logits = logits_of(model, request, completion)
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        tokens = torch.from_numpy(completion.token_ids).long()
        if temperature == 0:
            assert logits.argmax(-1).tolist() == completion.token_ids.tolist()
        torch.testing.assert_close(
            torch.from_numpy(completion.logprobs), expected.gather(-1, tokens[:, None])[:, 0], atol=1e-4, rtol=0
        )


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def contents(completions: list[Completion]) -> list[tuple]:
    """Everything of the completions, to compare to the last bit."""
    return [(c.token_ids.tolist(), c.logprobs.tolist(), c.finish_reason, c.weight_versions) for c in completions]


def assert_same(left: list[Completion], right: list[Completion]) -> None:
    assert tokens_of(left) == tokens_of(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
