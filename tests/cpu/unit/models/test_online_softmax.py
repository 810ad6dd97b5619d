"""The sums of a softmax over slices of the logits, and the gradient of the logits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tables import table
from trainer.models.online_softmax import OnlineSoftmax, Slopes, Vocabulary, gradient_of_logits


def test_no_denormal_numbers_slow_cpus_down():
    """Logits that are far apart: `exp` of their difference would be denormal."""
    z = torch.tensor([[0.0, -90.0, -100.0, -300.0], [200.0, 111.0, 0.0, 199.0]])
    sums = OnlineSoftmax.of(z, torch.zeros(2), with_dot=False)
    assert (z >= torch.finfo(torch.float32).tiny).all()
    torch.testing.assert_close(sums.total, torch.tensor([1.0, 1 + math.exp(-1)]))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_sums_of_slices_are_those_of_the_whole(compiled, monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1, raising=False)
    z = 9 * torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slices = z.split([1, 23, 16], dim=1)
    parts = [OnlineSoftmax.of(part.clone(), torch.zeros(5), True, compiled) for part in slices]
    found, logp = parts[0].merged(parts[1]).merged(parts[2]), z.log_softmax(-1)
    assert found.dot is not None
    torch.testing.assert_close(found.total.log() + found.maximum, z.logsumexp(-1))
    torch.testing.assert_close(found.total.log() - found.dot / found.total, -(logp.exp() * logp).sum(-1))


@pytest.mark.processes
@table("first, dtype", [(0, torch.float32), (30, torch.bfloat16)])
def test_a_compiled_gradient_is_that_of_the_operators(first, dtype, monkeypatch):
    """Also of a slice of the vocabulary in which some targets are not."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1, raising=False)
    generator = torch.Generator().manual_seed(2)
    z, targets = 5 * torch.randn(6, 40, generator=generator), torch.tensor([0, 20, 30, 35, 39, 69])
    slopes = Slopes(z.logsumexp(-1), *torch.randn(3, 6, generator=generator).unbind(), 1 / 30)
    plain, compiled = (
        gradient_of_logits(z.clone(), targets, Vocabulary(first), slopes, dtype, flag) for flag in (False, True)
    )
    assert compiled.dtype == dtype
    torch.testing.assert_close(compiled, plain, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=1e-2)
