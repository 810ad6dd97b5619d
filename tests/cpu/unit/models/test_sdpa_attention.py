"""Attention of packed rows against a loop over queries, in float64: lengths, prefixes, windows and soft caps."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.tables import table
from trainer.models.attention import Scores, attend_buckets
from trainer.parallel.packing import Packing

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def make_inputs(tokens: int) -> list[Tensor]:
    """Queries, keys and values `(1, H, N, D)`."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expected(
    inputs: list[Tensor],
    lengths: list[int],
    prefixes: list[int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The definition: each query attends to the tokens of its sequence up to itself."""
    query, key, value = (tensor[0] for tensor in inputs)
    start, leader, rows = 0, [], []
    for length, prefix in zip(lengths, prefixes, strict=True):
        own = list(range(start, start + length - prefix))
        places = leader[:prefix] + own  # of the sequence's tokens in the row
        leader = leader if prefix else places
        for position, place in enumerate(own, start=prefix):
            seen = places[: position + 1]
            seen = seen if window is None else seen[max(0, len(seen) - window) :]
            for head in range(HEADS):
                keys, values = (tensor[head * KEY_HEADS // HEADS][seen] for tensor in (key, value))
                scores = keys @ query[head, place] * (WIDTH**-0.5 if scaling is None else scaling)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                rows.append(scores.softmax(-1) @ values)
        start += length - prefix
    return torch.stack(rows).view(1, start, HEADS, WIDTH)


@table("prefixes", [[0] * 5, [0, 0, 1, 3, 0]])
@table(
    "scaling, window, softcap",
    [(None, None, None), (0.3, None, None), (None, 3, None), (None, None, 2.0), (0.5, 4, 1.5), (None, 99, None)],
)
@table("short", [64, 3])
def test_each_token_attends_to_its_sequence_up_to_itself(scaling, window, softcap, prefixes, short, monkeypatch):
    monkeypatch.setattr("trainer.parallel.packing._SHORT", short)
    lengths = [3, 11, 2, 7, 1]
    packing = Packing(lengths, "cpu", prefix_lengths=prefixes)
    inputs = make_inputs(packing.tokens)
    found = attend_buckets(*inputs, packing, Scores(scaling, window, softcap))
    tolerance = 1e-12 if softcap is None else 1e-6  # with a soft cap, the softmax is float32
    reference = expected(inputs, lengths, prefixes, scaling, window, softcap)
    torch.testing.assert_close(found, reference, atol=tolerance, rtol=0)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_gradients_are_those_of_the_definition(lengths):
    packing = Packing(lengths, "cpu")
    inputs = make_inputs(packing.tokens)
    gradient = torch.randn(1, packing.tokens, HEADS, WIDTH, dtype=torch.float64)
    grads = []
    for compute in (
        lambda leaves: attend_buckets(*leaves, packing, Scores()),
        lambda leaves: expected(leaves, lengths, [0] * len(lengths), None, None, None),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        grads.append(torch.autograd.grad(compute(leaves), leaves, gradient))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert math.isfinite(float(ours.sum()))


@table("window", [None, 20])
@table("prefixes", [[0, 0], [0, 50]])
def test_gradients_in_bfloat16_are_near_those_of_the_same_numbers_in_float64(prefixes, window):
    """SDPA's own backward pass on CPU is twice as far away."""
    packing = Packing([141, 100], "cpu", prefix_lengths=prefixes)
    inputs = [tensor.bfloat16() for tensor in make_inputs(packing.tokens)]
    gradient = torch.randn(1, packing.tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = attend_buckets(*leaves, packing, Scores(None, window))
        grads.append(torch.autograd.grad(out, leaves, gradient.to(dtype)))
    for ours, exact in zip(*grads, strict=True):
        assert ours.dtype == torch.bfloat16
        distance = float((ours - exact).norm() / exact.norm())
        assert distance < 3e-3
