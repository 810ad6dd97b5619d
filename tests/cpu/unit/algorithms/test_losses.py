"""Policy losses and the critic's against float64 loops written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.algorithm_checks import CASES, check_loss, padded
from tests.support.algorithm_checks import random_case as case
from tests.support.tables import table
from trainer.algorithms import AGGREGATIONS, POLICY_LOSSES, Totals, aggregate, value_loss
from trainer.import_utils import options_of

SPLIT_DEPENDENT = ("clip_cov", "kl_cov")  # their selection is per piece, and says so

OPTIONS = {
    "clip_low": st.floats(0.01, 0.5),
    "clip_high": st.floats(0.01, 0.5),
    "tau_pos": st.floats(0.5, 3),
    "tau_neg": st.floats(0.5, 3),
    "max_weight": st.floats(0.5, 20),
    "cov_frac": st.floats(0, 0.5),
    "cov_kl_coef": st.floats(0, 2),
    "dual_clip": st.none() | st.floats(1.1, 5),
}


@table("name", sorted(POLICY_LOSSES))
@settings(max_examples=30, deadline=None)
@given(
    shape=CASES,
    aggregation=st.sampled_from(AGGREGATIONS),
    spread=st.sampled_from([0.1, 20.0]),  # ratios up to e^100, for float64 is not cut off before e^177
    data=st.data(),
)
def test_losses_are_their_formulas_with_finite_gradients(name, shape, aggregation, spread, data):
    mask, _, tensor = case(*shape)
    options = {n: data.draw(s) for n, s in OPTIONS.items() if n in options_of(POLICY_LOSSES[name])}
    metrics = check_loss(name, tensor(spread), tensor(spread), tensor(), mask, aggregation, **options)
    assert 0 <= metrics["clip_frac"].item() <= 1 and metrics["approx_kl"].item() >= 0


# Completions of one to six tokens whose ratios lie below, between and above the bounds, as do those of whole
# completions, with advantages of both signs; and the tokens whose gradient a bound takes away or changes.
LOG_RATIOS = [[-0.7], [-0.5, -0.1, 0.0], [-0.4, 0.05], [0.1, -0.02, 0.03, 0.2, 0.9, 0.4], [0.3, 0.5, -0.05], [0.6]]

GAINS = [[1.0], [-2.0, -1.0, 0.5], [1.5, -0.5], [1.0, 1.0, -0.5, -2.0, 0.7, -1.0], [2.0, -1.0, 0.5], [-1.0]]

HELD_BACK = {
    "clip": 3,  # -0.5 with -2.0; 0.9 with 0.7 and 0.3 with 2.0
    "gspo": 6,  # the mean of -0.5, -0.1, 0.0 with -2.0 and -1.0; of -0.4, 0.05 with -0.5; of the six with 1.0, 1.0, 0.7
    "cispo": 8,  # three below, five above
    "sapo": 3,  # 0.9 with 0.7, where 2 (r - 1) is above 1.76; 0.5 and 0.6 with -1.0, where 3 (r - 1) is
    "clip_cov": 7,  # those of clip, and four with a covariance from 0.1 to 1.05
    "kl_cov": 4,
    "reinforce": 0,
    "importance_weighted_ce": 5,
}


@table("aggregation", AGGREGATIONS)
@table("name", sorted(POLICY_LOSSES))
def test_losses_of_ratios_outside_both_clips(name, aggregation):
    tokens = torch.tensor([len(row) for row in GAINS])
    mask = ((torch.arange(8) > 0) & (torch.arange(8) <= tokens[:, None])).double()
    new = [[-1.0 - 0.3 * t - 0.1 * i for t in range(n)] for i, n in enumerate(tokens.tolist())]
    old = [[x - r for x, r in zip(*pair, strict=True)] for pair in zip(new, LOG_RATIOS, strict=True)]
    tensors = [padded(x, mask) for x in (new, old, GAINS)]
    check_loss(name, *tensors, mask, aggregation)
    options = {
        "max_weight": 1.3,
        "cov_frac": 0.25,
        "tau_pos": 2.0,
        "tau_neg": 3.0,
        "cov_low": 0.1,
        "cov_high": 1.05,
        "clip_low": 0.1,
        "clip_high": 0.3,
    }
    options = {n: v for n, v in options.items() if n in options_of(POLICY_LOSSES[name])}
    metrics = check_loss(name, *tensors, mask, aggregation, **options)
    flat = [r for row in LOG_RATIOS for r in row]
    assert metrics["approx_kl"].item() == pytest.approx(sum(math.exp(r) - 1 - r for r in flat) / 16)
    assert metrics["clip_frac"].item() * 16 == pytest.approx(HELD_BACK[name])


@table("name", sorted(set(POLICY_LOSSES) - set(SPLIT_DEPENDENT)))
@settings(max_examples=25, deadline=None)
@given(
    shape=CASES,
    aggregation=st.sampled_from(AGGREGATIONS),
    pieces=st.integers(1, 6),
)
def test_micro_batches_add_up_to_the_loss_and_gradient_of_the_batch(name, shape, aggregation, pieces):
    mask, _, tensor = case(*shape)
    logprobs, old, advantages = tensor(0.3), tensor(0.3), tensor()
    totals = Totals.of(mask)

    def gradient(splits) -> tuple[list[float], torch.Tensor]:
        x = logprobs.clone().requires_grad_()
        results = [
            POLICY_LOSSES[name](x[s], old[s], advantages[s], mask[s], aggregation=aggregation, totals=totals)
            for s in splits
        ]
        loss = sum(loss for loss, _ in results)
        loss.backward()
        sums = [float(sum(m[metric] for _, m in results)) for metric in ("clip_frac", "approx_kl")]
        return [loss.item(), *sums], x.grad

    whole, parts = gradient([slice(None)]), gradient(torch.arange(mask.shape[0]).tensor_split(pieces))
    assert parts[0] == pytest.approx(whole[0], abs=1e-9)
    assert torch.allclose(parts[1], whole[1], atol=1e-9, rtol=0)


@table("name", sorted(set(POLICY_LOSSES) - {"cispo", "gspo", "importance_weighted_ce"}))
def test_gradients_equal_finite_differences_where_the_loss_is_smooth(name):
    """The others stop gradients on purpose: their gradient is checked by hand below."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    new = (old + 0.05 * torch.randn(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    options = {"cov_frac": 0.0} if "cov_frac" in options_of(POLICY_LOSSES[name]) else {}
    mask = torch.ones(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: POLICY_LOSSES[name](x, old, advantages, mask, **options)[0], new)


def gradient(name: str, new: list[float], old: list[float], advantages: list[float], **options) -> list[float]:
    x = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([v], dtype=torch.float64) for v in (old, advantages, [1.0] * len(new)))
    POLICY_LOSSES[name](x, *others, aggregation="seq_mean_token_sum", **options)[0].backward()
    return x.grad[0].tolist()


@table("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@table("name", sorted(POLICY_LOSSES))
@table("sign", [-1.0, 1.0])
def test_extreme_ratios_have_finite_gradients_in_every_type(name, dtype, sign):
    far = -12.0 if dtype == torch.float16 else -700.0  # float16 ends at e^11, whatever is computed in between
    new = torch.tensor([[-0.5, far, -12.0, -50.0, -0.1]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[far, -0.5, -0.5, -0.1, -0.2]], dtype=dtype)
    loss, metrics = POLICY_LOSSES[name](new, old, sign * torch.ones_like(old), torch.ones_like(old))
    loss.backward()
    assert torch.isfinite(new.grad).all() and torch.isfinite(metrics["approx_kl"])
    assert new.grad.any() or (name, sign) == ("gspo", -1.0), "below the lower bound bad sequences are clipped"


@table("name", sorted(POLICY_LOSSES))
def test_only_the_new_log_probs_get_a_gradient(name):
    mask, _, _ = case(2, 2, 4, 0)
    new, advantages = -torch.rand(mask.shape, dtype=torch.float64), torch.randn(mask.shape, dtype=torch.float64)
    gradients = []
    for same in (True, False):
        x, a = new.clone().requires_grad_(), advantages.clone().requires_grad_()
        POLICY_LOSSES[name](x, x if same else new, a, mask)[0].backward()
        assert a.grad is None
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].any()


def test_clip_frac_counts_clamped_ratios():
    new, old, bad = torch.tensor([[30.0, 0.0]]), torch.zeros(1, 2), torch.tensor([[-1.0, 0.0]])
    for name in ("clip", "clip_cov", "kl_cov"):
        options = {"cov_frac": 0.0} if "cov" in name else {}
        assert POLICY_LOSSES[name](new, old, bad, torch.ones(1, 2), **options)[1]["clip_frac"] == 0.5


def test_clip_frac_counts_tokens_that_the_dual_clip_changes():
    """Ratios of 5 and 2 with a negative advantage: beyond the bound of 3, and below it."""
    new, bad = torch.tensor([[5.0, 2.0]]).log(), torch.tensor([[-1.0, -1.0]])
    found = POLICY_LOSSES["clip"](new, torch.zeros(1, 2), bad, torch.ones(1, 2), dual_clip=3.0)
    assert (found[0], found[1]["clip_frac"]) == (pytest.approx((3 + 2) / 2), 0.5)
    plain = POLICY_LOSSES["clip"](new, torch.zeros(1, 2), bad, torch.ones(1, 2))
    assert (plain[0], plain[1]["clip_frac"]) == (pytest.approx((5 + 2) / 2), 0.0)


def test_tensors_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"of the same shape \(B, T\), not of \[\(2,\), \(2, 2\)\]"):
        POLICY_LOSSES["clip"](torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2), torch.ones(2, 2))


def test_tokens_are_counted_without_rounding():
    mask = torch.ones(3, 3001, dtype=torch.bfloat16)
    assert Totals.of(mask).tokens == 9003
    assert Totals.of(torch.ones(2, 60_000, dtype=torch.float16)).tokens == 120_000
    for kind in AGGREGATIONS[:2]:
        assert aggregate(torch.ones(3, 3001), mask, kind).item() == pytest.approx(1.0, abs=1e-6)


def test_stopped_gradients_are_those_of_the_papers():
    new, old, gains = [-1.0, -2.0], [-1.5, -1.9], [2.0, -3.0]
    r = [math.exp(0.5), math.exp(-0.1)]
    assert gradient("cispo", new, old, gains, clip_high=0.2) == pytest.approx([-1.2 * 2.0, r[1] * 3.0])
    assert gradient("importance_weighted_ce", new, old, gains, max_weight=1.1) == pytest.approx([-1.1 * 2, r[1] * 3])
    s = math.exp((0.5 - 0.1) / 2)
    assert gradient("gspo", new, old, gains, clip_low=0.9, clip_high=0.9) == pytest.approx([-s * 2.0, s * 3.0])
    assert gradient("gspo", new, old, gains, clip_low=0.1, clip_high=0.1) == pytest.approx([0.0, s * 3.0])
    assert gradient("reinforce", new, old, gains) == pytest.approx([-2.0, 3.0])


def test_tokens_of_high_covariance_are_detached_or_get_a_kl_penalty():
    new, old, gains = [-0.5, -3.0, -2.9, -3.1], [-0.51, -3.0, -2.9, -3.1], [4.0, -1.0, -1.1, -0.9]
    plain = gradient("clip", new, old, gains)
    detached = gradient("clip_cov", new, old, gains, cov_frac=0.25, cov_low=1.0, cov_high=50.0)
    assert detached == [0.0, *plain[1:]] and plain[0] != 0
    penalised = gradient("kl_cov", new, old, gains, cov_frac=0.25, cov_kl_coef=0.7)
    assert penalised == pytest.approx([plain[0] + 0.7, *plain[1:]])


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_value_loss_is_its_formula(shape):
    mask, _, tensor = case(*shape)
    values, old, returns = tensor(), tensor(), tensor()
    loss, _ = value_loss(values, old, returns, mask, value_clip=0.2)
    terms = []
    for v, o, r, m in zip(*(x.flatten().tolist() for x in (values, old, returns, mask)), strict=True):
        if m:
            terms.append(max((v - r) ** 2, (max(o - 0.2, min(o + 0.2, v)) - r) ** 2) / 2)
    assert loss.item() == pytest.approx(sum(terms) / max(1, len(terms)), abs=1e-9)


def test_value_loss_regresses_on_returns_as_on_constants():
    values, mask = torch.tensor([[0.1, 0.7]], requires_grad=True), torch.ones(1, 2)
    value_loss(values, values, values + 1, mask)[0].backward()
    assert values.grad.tolist() == [[-0.5, -0.5]]


def test_value_loss_gradient_equals_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    values = (old + 0.1 * torch.randn(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = (torch.rand(3, 5, generator=generator) < 0.8).double()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, mask, value_clip=1.0)[0], values)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, mask, value_clip=0.01)[0], values)


@table("name", sorted(POLICY_LOSSES))
def test_losses_default_to_the_mean_of_their_papers(name):
    aggregation = "seq_mean_token_mean" if name in ("gspo", "sapo") else "token_mean"
    mask, _, tensor = case(3, 2, 5, 1)
    given = tensor(0.3), tensor(0.3), tensor(), mask
    assert POLICY_LOSSES[name](*given)[0] == POLICY_LOSSES[name](*given, aggregation=aggregation)[0]
