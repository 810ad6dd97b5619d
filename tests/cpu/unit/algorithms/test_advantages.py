"""Advantage estimators against plain float64 loops written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.algorithm_checks import CASES, check_advantages, padded
from tests.support.algorithm_checks import random_case as case
from tests.support.tables import table
from trainer.algorithms import ADVANTAGES, MovingAverages
from trainer.import_utils import options_of


@table("name", sorted(ADVANTAGES))
@settings(max_examples=30, deadline=None)
@given(
    shape=CASES,
    whole=st.booleans(),
    normalize_std=st.booleans(),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    pass_k=st.integers(1, 4),
)
def test_advantages_are_their_formulas(name, shape, whole, **options):
    mask, ids, tensor = case(*shape)
    check_advantages(name, tensor(whole=whole), mask, ids, tensor(), **options)


# Groups of four, three and two, their rows mixed; completions of one to five tokens.
IDS = torch.tensor([4, 9, 4, 2, 9, 4, 2, 9, 4])
SCORES = [1.0, -0.5, 0.0, 2.0, 1.5, 1.0, -1.0, 0.25, -2.0]
TOKENS = torch.tensor([1, 5, 3, 2, 4, 2, 5, 1, 3])


@table(
    "name, options",
    [
        ("gae", {"gamma": 0.9, "lam": 0.8, "normalize_std": False}),
        ("gae", {"gamma": 1.0, "lam": 0.5, "normalize_std": True}),
        ("reward", {}),
        ("zero", {}),
        ("reverse_kl", {}),
        ("grpo", {}),
        ("grpo", {"normalize_std": False}),
        ("rloo", {}),
        ("reinforce_plus_plus", {"gamma": 0.9}),
        ("reinforce_plus_plus_baseline", {}),
        ("remax", {"gamma": 0.9}),
        ("remax", {"gamma": 0.9, "normalize_std": True}),
        ("rae", {}),
        ("maxrl", {}),
        ("opo", {}),
        ("grpo_passk", {"pass_k": 1}),
        ("grpo_passk", {"pass_k": 2}),
        ("grpo_passk", {"pass_k": 3}),
    ],
)
def test_advantages_of_unequal_lengths_in_groups_of_several_sizes(name, options):
    mask = (torch.arange(6) > 0) & (torch.arange(6) <= TOKENS[:, None])
    mask[4, 2] = False  # tool output
    lengths = mask.sum(dim=1).tolist()
    # The last token earns most of it, and each one before it a little.
    rewards = [[0.01] * (n - 1) + [score - 0.01 * (n - 1)] for n, score in zip(lengths, SCORES, strict=True)]
    values = [[0.3 * (-1) ** t + 0.1 * t + 0.05 * n for t in range(n)] for n in lengths]
    check_advantages(name, padded(rewards, mask), mask.double(), IDS, padded(values, mask), **options)


def test_group_advantages_by_hand():
    """Rewards 3, 1, 1, 0, -0.5 of completions of 1, 2, 1, 4, 2 tokens; their mean is 0.9."""
    scores, tokens, ids = torch.tensor([3.0, 1.0, 1.0, 0.0, -0.5]), [1, 2, 1, 4, 2], torch.zeros(5, dtype=torch.long)
    mask = (torch.arange(4) < torch.tensor(tokens)[:, None]).double()
    rewards = torch.zeros(5, 4, dtype=torch.float64)
    rewards[:, 0] = scores
    centred = [2.1, 0.1, 0.1, -0.9, -1.4]
    std = math.sqrt((2.1**2 + 2 * 0.1**2 + 0.9**2 + 1.4**2) / 4)
    baseline = (3 + 2 + 1 + 0 - 1) / 10
    of_two = math.sqrt(0.9 * 0.1)  # one pair of the ten has no right one
    wrong = (0.1 - 1 / 4) / of_two  # and one of the four that a wrong one is in
    expected = {
        "grpo": [x / (std + 1e-6) for x in centred],
        "rloo": [1.25 * x for x in centred],
        "maxrl": [x / 0.9 for x in centred],
        "opo": [x - baseline for x in scores.tolist()],
        "grpo_passk": [0.1 / of_two] * 3 + [wrong] * 2,
    }
    for name, values in expected.items():
        advantages, _ = ADVANTAGES[name](rewards, mask, ids)
        assert advantages[:, 0].tolist() == pytest.approx(values, rel=1e-9), name


@table("name", ["grpo", "rloo", "maxrl", "opo", "grpo_passk"])
def test_groups_of_one_and_groups_of_equal_rewards_have_advantage_0(name):
    # 0.1 + 0.2 summed in another order is another number: rounding must not become an advantage.
    rewards = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.1, 0.2], [5.0, 0.0]])
    advantages, _ = ADVANTAGES[name](rewards, torch.ones(4, 2), torch.tensor([3, 3, 3, 1]))
    assert not advantages.any()


@table("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_equal_values_gives_0(name):
    mask = torch.ones(7, 3)
    rewards = torch.zeros(7, 3)
    rewards[:, -1] = 0.3
    assert not ADVANTAGES[name](rewards, mask, torch.arange(7))[0].any()


@table("name", sorted(set(ADVANTAGES) - {"zero", "reverse_kl"}))
def test_advantages_have_no_gradient_and_the_widest_type_of_their_inputs(name):
    """Rewards that are counted as integers, values that a critic has just computed."""
    options = options_of(ADVANTAGES[name])
    baselines, values = torch.tensor([0.5, 0.5]), torch.full((2, 1), 0.5, requires_grad=True)
    known = {"baselines": baselines, "player_baselines": baselines, "values": values, "pass_k": 1}
    given = {n: v for n, v in known.items() if n in options}
    ids, mask = torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.long)
    results = [
        ADVANTAGES[name](torch.tensor([[1], [0]], dtype=dtype), mask, ids, **given)
        for dtype in (torch.int64, torch.bfloat16, torch.float32)
    ]
    for advantages, returns in results:
        assert advantages.dtype == returns.dtype == torch.float32
        assert not advantages.requires_grad and not returns.requires_grad
        assert advantages[0] > 0 and torch.equal(advantages, results[-1][0])
        assert advantages[1] == 0 if name == "reward" else advantages[1] < 0  # `reward` has no baseline
    empty = {"baselines": torch.zeros(0), "player_baselines": torch.zeros(0), "values": torch.zeros(0, 3), "pass_k": 1}
    options = {option: empty[option] for option in given}
    advantages, _ = ADVANTAGES[name](torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), **options)
    assert advantages.shape == (0, 3)


def test_the_moving_average_of_a_player_is_read_before_its_reward():
    averages = MovingAverages()
    baselines, after = averages.read(["x", "o", "x", "o", "x"], [1.0, -2.0, 1.0, None, -1.0])
    advantages, _ = ADVANTAGES["rae"](
        torch.tensor([[1.0], [1.0], [-1.0]]),
        torch.ones(3, 1),
        torch.zeros(3),
        player_baselines=torch.tensor(baselines[::2]),
    )
    assert advantages[:, 0].tolist() == pytest.approx([1, 0.95, -1.0975]) and baselines[1::2] == pytest.approx(
        [0, -0.1]
    )
    assert after == pytest.approx({"x": 0.042625, "o": -0.1}), "a reward that is not known changes nothing"
    assert averages.state_dict() == {}, "only the end of the step moves them"
