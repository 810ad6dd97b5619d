"""Packed attention as one operator: the same values and gradients, and one graph for all lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.tables import table
from trainer.models.attention import Scores, attend_buckets, attention_op
from trainer.parallel.packing import Packing

LENGTHS = [3, 11, 2, 7, 7, 1, 14]
ALONE = [0] * len(LENGTHS)
SHARED = [0, 0, 1, 3, 4, 0, 0]


def make_inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2)]


@table("shared", [ALONE, SHARED])
@table("window, softcap", [(None, None), (6, 20.0)])
def test_the_operator_has_the_same_values_and_gradients(window, softcap, shared):
    packing = Packing(LENGTHS, "cpu", prefix_lengths=shared)
    inputs = make_inputs(packing.tokens)
    gradient = torch.randn(1, packing.tokens, 4, 8, generator=torch.Generator().manual_seed(4))

    scores = Scores(0.3, window, softcap)

    def compute(attend, *arguments) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*leaves, *arguments)
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    expected = compute(attend_buckets, packing, scores)
    for ours, theirs in zip(compute(attention_op, packing.sizes, *scores), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_operator_is_described_to_the_compiler_as_it_computes():
    """Shapes, strides and aliases of outputs and gradients, by torch's own check."""
    packing = Packing([3, 5], "cpu")
    inputs = [tensor.requires_grad_() for tensor in make_inputs(packing.tokens)]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(attention_op, (*inputs, packing.sizes, None, None, None), test_utils=checks)


def test_other_lengths_need_no_other_graph():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v, sizes: attention_op(q, k, v, sizes, None, None, None), backend=count)
    for lengths in ([3, 5], [4, 4], [1, 7]):
        packing = Packing(lengths, "cpu")
        inputs = make_inputs(packing.tokens)
        found = compiled(*inputs, packing.sizes)
        assert torch.equal(found, attend_buckets(*inputs, packing, Scores()))
    assert len(graphs) == 1
