"""KL estimators against their formulas, and the controllers of their weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import reference_algorithms as reference
from tests.support.tables import table
from trainer.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKL,
    FixedKL,
    kl_penalty,
    sampled_reverse_kl,
)


@table("kind", KL_ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(logprob=st.floats(-10, 10), ref=st.floats(-10, 10))
@example(logprob=-1.0, ref=-2.5)
@example(logprob=-2.5, ref=-1.0)
def test_kl_estimators_are_their_formulas(kind, logprob, ref):
    a = torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(a, torch.tensor([[ref]], dtype=torch.float64), kind)
    assert estimate.item() == pytest.approx(reference.kl(kind, logprob, ref), rel=1e-9, abs=1e-9)
    estimate.sum().backward()
    d = logprob - ref
    slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": math.copysign(1, d) if d else 0.0, "k1+": d, "k3+": d}
    assert a.grad.item() == pytest.approx(slope[kind], rel=1e-9, abs=1e-9)


@table("d", [-170.0, -30.0, 30.0, 5000.0])
def test_k3_equals_its_formula_for_extreme_log_probs(d):
    x = torch.tensor([[d]], dtype=torch.float64, requires_grad=True)
    kl_penalty(x, torch.zeros(1, 1, dtype=torch.float64), "k3").backward()
    assert x.grad.item() == pytest.approx(1 - math.exp(-d))
    x = torch.tensor([[d]], dtype=torch.float16, requires_grad=True)
    estimate = kl_penalty(x, torch.zeros_like(x), "k3")
    estimate.backward()
    assert torch.isfinite(estimate) and torch.isfinite(x.grad) and x.grad != 0
    assert estimate.item() >= (d - 1 if d > 0 else 1e9)


@table("kind", KL_ESTIMATORS)
def test_a_token_of_probability_0_under_both_models_has_no_kl(kind):
    logprobs = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    estimate = kl_penalty(logprobs, torch.tensor([[-math.inf, -2.0]]), kind)
    estimate.sum().backward()
    assert estimate[0, 0] == 0 and logprobs.grad[0, 0] == 0 and logprobs.grad[0, 1] != 0


@table("kind", KL_ESTIMATORS)
def test_masked_tokens_have_no_kl_and_no_gradient(kind):
    logprobs = torch.tensor([[-1.0, math.inf, -math.inf]], requires_grad=True)
    estimate = kl_penalty(logprobs, torch.tensor([[-2.0, math.inf, 1.0]]), kind, torch.tensor([[1.0, 0.0, 0.0]]))
    estimate.sum().backward()
    assert not estimate[0, 1:].any() and not logprobs.grad[0, 1:].any() and logprobs.grad[0, 0] != 0


def test_k3_and_k1_estimate_the_same_divergence():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 10, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        estimate = (p.exp() * kl_penalty(p, q, kind)).sum().item()  # the expectation, in full
        assert estimate == pytest.approx(exact, abs=1e-9), kind


def test_the_adaptive_controller_steers_and_restores_its_weight():
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    controller.update(0.06, 100)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    controller.update(0.0, 100)
    assert controller.coef == pytest.approx(0.1 * 1.02 * (1 - 0.02))
    again = AdaptiveKL(0.5, 0.05, 1000)
    again.load_state_dict(controller.state_dict())
    assert again.coef == controller.coef
    fixed = FixedKL(0.3)
    fixed.update(9.0, 100)
    fixed.load_state_dict(fixed.state_dict())
    assert fixed.coef == 0.3


def test_the_kl_controller_takes_its_settings_from_the_config():
    controller = AdaptiveKL(0.1, target=0.5, horizon=100)
    controller.load_state_dict({"kind": "adaptive", "coef": 0.3})
    controller.update(kl=0.55, samples=10)
    assert controller.coef == pytest.approx(0.3 * (1 + 0.1 * 10 / 100))  # the saved weight, the new target and horizon
    assert set(controller.state_dict()) == set(FixedKL(0.1).state_dict()) == {"kind", "coef"}
    adaptive, fixed = AdaptiveKL(0.1, 0.5, 100), FixedKL(0.1)
    adaptive.load_state_dict(FixedKL(0.7).state_dict())
    fixed.load_state_dict(AdaptiveKL(0.7, 0.5, 100).state_dict())
    assert adaptive.coef == fixed.coef == 0.1


def test_the_expected_gradient_of_sampled_tokens_is_that_of_the_reverse_kl():
    """All of six tokens, sampled by the policy itself and by an older one: the gradient of each by its probability."""
    z = torch.tensor([2, 1, 0.3, -1, 0, -0.5], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0, 1, 2, 0.5, -1, 0.2], dtype=torch.float64).log_softmax(-1)[None]
    older = torch.tensor([0.5, 0.5, 1, 0, 0, -1], dtype=torch.float64).log_softmax(-1)[None]
    expected = torch.tensor([0.587996, -0.188447, -0.264428, -0.066587, 0.005125, -0.073658], dtype=torch.float64)
    q = z.log_softmax(-1)[None]
    for old in (q.detach(), older):
        estimate = sampled_reverse_kl(q, old, p, torch.ones(1, 6))
        value = (old.exp() * estimate).sum()
        assert value.item() == pytest.approx(0.996973600, abs=1e-9)
        (gradient,) = torch.autograd.grad(value, z, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert not sampled_reverse_kl(q, older, p, torch.zeros(1, 6)).any()
