"""Advantages, losses and KL against plain float64 loops written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms import ADVANTAGES, POLICY_LOSSES, Totals, aggregate, kl_penalty, value_loss
from trainer.algorithms.aggregation import AGGREGATIONS

CASES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**31))


def case(groups: int, per_group: int, width: int, seed: int):
    """Random token tensors with masks that have holes and empty rows, and rubbish where the mask is 0."""
    rng = np.random.default_rng(seed)
    shape = (groups * per_group, width)
    mask = torch.from_numpy((rng.random(shape) < 0.7).astype(np.float64))

    def tensor(scale: float = 1.0) -> torch.Tensor:
        values = torch.from_numpy(rng.normal(size=shape) * scale)
        return torch.where(mask > 0, values, torch.tensor(math.inf if rng.random() < 0.5 else math.nan))

    ids = torch.from_numpy(np.repeat(rng.permutation(groups), per_group))
    return mask, ids, tensor


@settings(max_examples=60, deadline=None)
@given(CASES, st.booleans())
def test_grpo_is_its_formula(shape, normalize):
    mask, ids, tensor = case(*shape)
    rewards = tensor()
    advantages, returns = ADVANTAGES["grpo"](rewards, mask, ids, normalize_std=normalize)
    totals = [sum(r for r, m in zip(rs, ms, strict=True) if m) for rs, ms in
              zip(rewards.tolist(), mask.tolist(), strict=True)]  # fmt: skip
    for i, group in enumerate(ids.tolist()):
        members = [t for t, g in zip(totals, ids.tolist(), strict=True) if g == group]
        mean = sum(members) / len(members)
        expected = 0.0 if max(members) == min(members) else totals[i] - mean
        if normalize and expected:
            expected /= math.sqrt(sum((t - mean) ** 2 for t in members) / (len(members) - 1)) + 1e-6
        for t in range(mask.shape[1]):
            assert advantages[i, t].item() == pytest.approx(expected if mask[i, t] else 0.0, abs=1e-9)
    assert torch.equal(advantages, returns)


@settings(max_examples=60, deadline=None)
@given(CASES, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_formula_and_steps_over_masked_tokens(shape, gamma, lam):
    mask, ids, tensor = case(*shape)
    rewards, values = tensor(), tensor()
    advantages, returns = ADVANTAGES["gae"](rewards, mask, ids, values=values, gamma=gamma, lam=lam)
    for i in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        carried = 0.0
        for k in reversed(range(len(tokens))):
            t = tokens[k]
            following = values[i, tokens[k + 1]].item() if k + 1 < len(tokens) else 0.0
            carried = rewards[i, t].item() + gamma * following - values[i, t].item() + gamma * lam * carried
            assert advantages[i, t].item() == pytest.approx(carried, abs=1e-9)
            assert returns[i, t].item() == pytest.approx(carried + values[i, t].item(), abs=1e-9)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


@settings(max_examples=60, deadline=None)
@given(CASES, st.sampled_from(AGGREGATIONS), st.sampled_from([0.1, 30.0]))
def test_clip_is_its_formula_with_finite_gradients(shape, aggregation, spread):
    mask, _, tensor = case(*shape)
    logprobs, old, advantages = tensor(spread).requires_grad_(), tensor(spread), tensor()
    loss, metrics = POLICY_LOSSES["clip"](
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3, aggregation=aggregation
    )
    rows, counts = [], []
    for i in range(mask.shape[0]):
        terms = []
        for t in range(mask.shape[1]):
            if mask[i, t]:
                ratio = math.exp(max(-20.0, min(20.0, logprobs[i, t].item() - old[i, t].item())))
                a = advantages[i, t].item()
                terms.append(-min(ratio * a, max(0.8, min(1.3, ratio)) * a))
        rows.append(sum(terms))
        counts.append(len(terms))
    sequences = max(1, sum(c > 0 for c in counts))
    expected = {
        "token_mean": sum(rows) / max(1, sum(counts)),
        "seq_mean_token_mean": sum(r / max(1, c) for r, c in zip(rows, counts, strict=True)) / sequences,
        "seq_mean_token_sum": sum(rows) / sequences,
        "seq_mean_token_sum_norm": sum(rows) / sequences / mask.shape[1],
    }[aggregation]
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    loss.backward()
    assert torch.isfinite(logprobs.grad).all() and not logprobs.grad[mask == 0].any()
    assert 0 <= metrics["clip_frac"].item() <= 1


@settings(max_examples=60, deadline=None)
@given(CASES, st.sampled_from(AGGREGATIONS), st.integers(1, 6))
def test_pieces_of_a_batch_add_up_to_its_loss_and_gradient(shape, aggregation, pieces):
    mask, _, tensor = case(*shape)
    logprobs, old, advantages = tensor(0.3), tensor(0.3), tensor()
    totals = Totals.of(mask)

    def gradient(splits) -> tuple[float, torch.Tensor]:
        x = logprobs.clone().requires_grad_()
        loss = sum(
            POLICY_LOSSES["clip"](x[s], old[s], advantages[s], mask[s], aggregation=aggregation, totals=totals)[0]
            for s in splits
        )
        loss.backward()
        return loss.item(), x.grad

    whole, parts = gradient([slice(None)]), gradient(torch.arange(mask.shape[0]).tensor_split(pieces))
    assert parts[0] == pytest.approx(whole[0], abs=1e-9)
    assert torch.allclose(parts[1], whole[1], atol=1e-9, rtol=0)


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(st.floats(-10, 10), st.floats(-10, 10))
def test_kl_estimators_are_their_formulas(logprob, ref):
    a, b = torch.tensor([[logprob]], dtype=torch.float64), torch.tensor([[ref]], dtype=torch.float64)
    d = logprob - ref
    for kind, expected in {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}.items():
        assert kl_penalty(a, b, kind).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_k3_and_k1_estimate_the_same_divergence():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 10, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        estimate = (p.exp() * kl_penalty(p, q, kind)).sum().item()  # the expectation, in full
        assert estimate == pytest.approx(exact, abs=1e-9), kind


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="token_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")
