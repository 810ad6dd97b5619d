"""Run an algorithm and its reference on the same tensors, and compare what comes out."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support import reference_algorithms as reference
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from trainer.import_utils import options_of

CASES = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**31))
"""Groups, rows a group, tokens and seed of a `random_case`."""


def random_case(groups: int, per_group: int, width: int, seed: int):
    """Random token tensors with masks that have holes and empty rows, and rubbish where the mask is 0."""
    rng = np.random.default_rng(seed)
    shape = (groups * per_group, width)
    mask = torch.from_numpy((rng.random(shape) < 0.7).astype(np.float64))

    def tensor(scale: float = 1.0, whole: bool = False) -> Tensor:
        values = rng.integers(0, 2, shape).astype(float) if whole else rng.normal(size=shape) * scale
        rubbish = rng.choice([math.inf, -math.inf, math.nan])
        return torch.where(mask > 0, torch.from_numpy(values), torch.tensor(rubbish))

    ids = torch.from_numpy(np.repeat(rng.permutation(groups), per_group))
    return mask, ids, tensor


def padded(rows: list[list[float]], mask: Tensor) -> Tensor:
    """The rows' values where `mask` is 1, and NaN elsewhere."""
    out = torch.full(mask.shape, math.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, mask[i] > 0] = torch.tensor(row, dtype=torch.float64)
    return out


def rows(values: Tensor, mask: Tensor) -> list[list[float]]:
    return [[x for x, m in zip(*pair, strict=True) if m] for pair in zip(values.tolist(), mask.tolist(), strict=True)]


def assert_rows(values: Tensor, mask: Tensor, expected: list[list[float]]) -> None:
    assert torch.isfinite(values).all() and not values[mask == 0].any()
    for row, expected_row in zip(rows(values, mask), expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-9)


def check_advantages(name: str, rewards: Tensor, mask: Tensor, ids: Tensor, values: Tensor, **options: Any) -> None:
    """Check that the advantages and returns of `name` equal the reference. Unknown options are left out."""
    baselines = torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    takes = options_of(ADVANTAGES[name])
    given = {
        "values": values,
        "baselines": baselines,
        "player_baselines": baselines,
        "old_logprobs": values,
        "teacher_logprobs": 2 * values,
        **options,
    }
    advantages, returns = ADVANTAGES[name](rewards, mask, ids, **{n: v for n, v in given.items() if n in takes})
    logprobs = {"old_logprobs": rows(values, mask), "teacher_logprobs": rows(2 * values, mask)}
    reference_options = {"values": rows(values, mask), "baselines": baselines.tolist(), **logprobs, **options}
    formula = getattr(reference, name)
    wanted = {n: v for n, v in reference_options.items() if n in inspect.signature(formula).parameters}
    assert_rows(advantages, mask, formula(rows(rewards, mask), ids.tolist(), **wanted))
    if name == "gae":
        plain = reference.gae(rows(rewards, mask), ids.tolist(), rows(values, mask), options["gamma"], options["lam"])
        both = zip(plain, rows(values, mask), strict=True)
        assert_rows(returns, mask, [[a + v for a, v in zip(*pair, strict=True)] for pair in both])
    elif "gamma" in takes:
        assert_rows(returns, mask, reference.to_go(rows(rewards, mask), options["gamma"]))
    else:
        assert torch.equal(advantages, returns)


def check_loss(
    name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str, **options: Any
) -> dict[str, Tensor]:
    """Check that the loss of `name` equals the reference and has a finite gradient; returns its metrics."""
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = POLICY_LOSSES[name](logprobs, old, advantages, mask, aggregation=aggregation, **options)
    expected = getattr(reference, name)(*(rows(x, mask) for x in (logprobs.detach(), old, advantages)), **options)
    assert loss.item() == pytest.approx(reference.aggregate(expected, aggregation, mask.shape[1]), rel=1e-9, abs=1e-9)
    loss.backward()
    assert torch.isfinite(logprobs.grad).all() and not logprobs.grad[mask == 0].any()
    return metrics
