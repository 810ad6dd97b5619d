"""The sums of a softmax over slices of the logits, and the gradient of the logits."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.support.compiled import without_kernels
from tests.support.tables import table
from trainer.models import online_softmax
from trainer.models.online_softmax import OnlineSoftmax, gradient_of_logits, kernel

# A C++ compiler takes 20 s for the kernels of these functions, so they guard a release alone.
KERNELS = [False, pytest.param(True, marks=[pytest.mark.processes, pytest.mark.release])]


@pytest.fixture
def compiler(request, monkeypatch) -> None:
    """Compile functions anew: with the kernels of inductor if the parameter says so, else operator by operator."""
    monkeypatch.setattr(online_softmax, "_compiled", functools.cache(online_softmax._compiled.__wrapped__))
    if request.param:
        monkeypatch.setattr(torch._inductor.config, "compile_threads", 1, raising=False)
    else:
        without_kernels(monkeypatch)


def test_no_denormal_numbers_slow_cpus_down():
    """Logits that are far apart: `exp` of their difference would be denormal."""
    z = torch.tensor([[0.0, -90.0, -100.0, -300.0], [200.0, 111.0, 0.0, 199.0]])
    sums = OnlineSoftmax.of(z, torch.zeros(2), with_dot=False)
    assert (z >= torch.finfo(torch.float32).tiny).all()
    torch.testing.assert_close(sums.total, torch.tensor([1.0, 1 + math.exp(-1)]))


@pytest.mark.parametrize("compiler", KERNELS, indirect=True)
def test_sums_of_slices_are_those_of_the_whole(compiler):
    z = 9 * torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for compiled in (False, True):
        parts = [OnlineSoftmax.of(part.clone(), torch.zeros(5), True, compiled) for part in z.split([1, 23, 16], dim=1)]
        found, logp = parts[0].merged(parts[1]).merged(parts[2]), z.log_softmax(-1)
        assert found.dot is not None
        torch.testing.assert_close(found.total.log() + found.maximum, z.logsumexp(-1))
        torch.testing.assert_close(found.total.log() - found.dot / found.total, -(logp.exp() * logp).sum(-1))


@pytest.mark.parametrize("compiler", KERNELS, indirect=True)
@table("first, dtype", [(0, torch.float32), (30, torch.bfloat16)])
def test_a_compiled_gradient_is_that_of_the_operators(first, dtype, compiler):
    """Also of a slice of the vocabulary in which some targets are not."""
    generator = torch.Generator().manual_seed(2)
    z, targets = 5 * torch.randn(6, 40, generator=generator), torch.tensor([0, 20, 30, 35, 39, 69])
    slopes = z.logsumexp(-1), *torch.randn(3, 6, generator=generator).unbind(), 1 / 30
    plain, compiled = (
        kernel(gradient_of_logits, flag)(z.clone(), targets - first, *slopes, dtype, not flag) for flag in (False, True)
    )
    assert compiled.dtype == dtype
    torch.testing.assert_close(compiled, plain, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=1e-2)
