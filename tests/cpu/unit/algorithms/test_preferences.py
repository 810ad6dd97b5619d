"""Losses over pairs, against the formulas of the papers and the numbers of TRL 1.16 (`DPOTrainer._compute_loss`)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from trainer.algorithms.preferences import DPO_LOSSES, LogRatios, bradley_terry
from trainer.config.data import DPO_LOSSES as NAMES
from trainer.config.data import SMOOTHED
from trainer.import_utils import parameter_names

# Log-probs of policy and reference by answer token: of the chosen answers, and of the rejected ones.
CHOSEN = [([-1.0, -0.5, -0.2], [-1.2, -0.7, -0.4]), ([-0.3, -0.6], [-0.4, -0.4])]
REJECTED = [([-0.9, -1.1], [-0.8, -0.9]), ([-0.7, -0.2, -1.5, -0.1], [-0.5, -0.3, -1.0, -0.2])]
# Of each loss: label smoothing, value and gradient by the first chosen token for beta 0.1, and for beta 0.5.
EXPECTED = {
    "sigmoid": (0.0, (0.661253253, -0.023875759), (0.545693908, -0.097340192)),
    "sigmoid, smoothed": (0.1, (0.667753253, None), (0.578193908, None)),
    "robust": (0.1, (0.653128253, -0.030125759), (0.505068908, -0.128590192)),
    "hinge": (0.0, (0.935, -0.05), (0.675, -0.25)),
    "ipo": (0.0, (22.9390625, -1.55), (0.6390625, -0.216666667)),
    "sigmoid_norm": (0.0, (0.682602255, -0.008187515), (0.642021691, -0.038030109)),
    "apo_zero": (0.0, (0.983753822, -0.012488757), (0.919224267, -0.061114578)),
    "apo_down": (0.0, (0.990006015, 0.000014035), (0.950735945, 0.001674838)),
    "nca_pair": (0.0, (1.370497426, None), (1.316335286, None)),
    "sppo_hard": (0.0, (43.855, None), (1.055, None)),
    "bco_pair": (0.0, (1.354238059, None), (1.234855680, None)),
    "exo_pair": (0.1, (0.475744579, -0.026287040), (0.349358260, -0.103854575)),
}
# Without a reference, of TRL's `cpo_loss`: beta, gamma, value.
SIMPO = [(0.1, 0.5, 0.955272569), (2.0, 0.5, 0.648741572), (2.0, 1.0, 0.916044881)]


def losses(name: str, ratios: LogRatios, beta: float, **options: float) -> Tensor:
    function = DPO_LOSSES[name]
    return function(ratios, beta, **{key: options[key] for key in options.keys() & parameter_names(function)})


def log_ratios(chosen: list[Tensor], rejected: list[Tensor], references=(CHOSEN, REJECTED)) -> LogRatios:
    sums = [
        torch.stack([(policy - torch.tensor(reference[1], dtype=policy.dtype)).sum() for policy, reference in pairs])
        for pairs in (zip(chosen, references[0], strict=True), zip(rejected, references[1], strict=True))
    ]
    counts = [torch.tensor([float(len(policy)) for policy in policies]) for policies in (chosen, rejected)]
    return LogRatios(*sums, *counts)


def tensors(pairs, requires_grad: bool = True) -> list[Tensor]:
    return [torch.tensor(policy, dtype=torch.float64, requires_grad=requires_grad) for policy, _ in pairs]


def test_losses_and_gradients_are_those_of_trl():
    assert set(DPO_LOSSES) == set(NAMES) == {name.partition(",")[0] for name in EXPECTED} | {"simpo"}
    for name, (smoothing, *by_beta) in EXPECTED.items():
        for beta, (value, gradient) in zip((0.1, 0.5), by_beta, strict=True):
            chosen, rejected = tensors(CHOSEN), tensors(REJECTED)
            ratios = log_ratios(chosen, rejected)
            loss = losses(name.partition(",")[0], ratios, beta, label_smoothing=smoothing).mean()
            assert loss.item() == pytest.approx(value, abs=1e-8), (name, beta)
            loss.backward()
            if gradient is not None:
                assert chosen[0].grad[0].item() == pytest.approx(gradient, abs=1e-8), (name, beta)
    zeros = [[([], [0.0] * len(policy)) for policy, _ in pairs] for pairs in (CHOSEN, REJECTED)]
    for beta, gamma, value in SIMPO:
        ratios = log_ratios(tensors(CHOSEN), tensors(REJECTED), zeros)
        assert losses("simpo", ratios, beta, simpo_gamma=gamma).mean().item() == pytest.approx(value, abs=1e-8)
    for name in DPO_LOSSES:  # an option that changes nothing is refused by the config
        ratios = log_ratios(tensors(CHOSEN), tensors(REJECTED))
        few, more = (losses(name, ratios, 0.1, label_smoothing=e, simpo_gamma=0.5) for e in (0.01, 0.2))
        assert torch.equal(few, more) == (name not in SMOOTHED), name


def plain(name: str, c: float, r: float, n_c: int, n_r: int, beta: float, e: float, gamma: float) -> float:
    """The loss of one pair in plain Python."""

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))

    def sigma(x: float) -> float:
        return math.exp(log_sigmoid(x))

    d, mean = c - r, c / n_c - r / n_r
    return {
        "sigmoid": -(1 - e) * log_sigmoid(beta * d) - e * log_sigmoid(-beta * d),
        "robust": (-(1 - e) * log_sigmoid(beta * d) + e * log_sigmoid(-beta * d)) / (1 - 2 * e),
        "hinge": max(0.0, 1 - beta * d),
        "ipo": (mean - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -log_sigmoid(beta * mean),
        "apo_zero": 1 - sigma(beta * c) + sigma(beta * r),
        "apo_down": sigma(beta * c) + 1 - sigma(beta * d),
        "nca_pair": -log_sigmoid(beta * c) - 0.5 * (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)),
        "sppo_hard": (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "bco_pair": -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "exo_pair": sum(
            sigma(x) * (log_sigmoid(x) - math.log(label)) for x, label in ((beta * d, 1 - e), (-beta * d, e))
        ),
        "simpo": -log_sigmoid(beta * mean - gamma),
    }[name]


def test_losses_of_random_ragged_pairs_are_those_of_plain_python():
    rng = random.Random(5)
    for _ in range(20):
        sizes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))]
        values = [(rng.gauss(0, 3), rng.gauss(0, 3), *size) for size in sizes]
        beta, smoothing, gamma = rng.choice((0.05, 0.1, 2.0)), rng.choice((0.01, 0.1, 0.4)), rng.choice((0.0, 1.0))
        ratios = LogRatios(*(torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True)))
        for name in DPO_LOSSES:
            expected = [plain(name, *pair, beta, smoothing, gamma) for pair in values]
            found = losses(name, ratios, beta, label_smoothing=smoothing, simpo_gamma=gamma)
            assert found.tolist() == pytest.approx(expected, abs=1e-9), name


def test_the_loss_of_a_reward_model_is_that_of_trl():
    chosen, rejected = torch.tensor([1.2, 0.3], dtype=torch.float64), torch.tensor([0.4, 0.5], dtype=torch.float64)
    none, margins = torch.zeros(2, dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64)
    for given, coefficient, expected in (
        (none, None, 0.584619768), (none, 0.01, 0.600619768),
        (margins, None, 0.676247057), (margins, 0.01, 0.692247057),
    ):  # fmt: skip
        assert bradley_terry(chosen, rejected, given, coefficient).mean().item() == pytest.approx(expected, abs=1e-8)
