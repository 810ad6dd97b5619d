"""Losses over pairs of answers, one value for each of P pairs: preferences against a reference, and reward models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class LogRatios:
    """What the policy has gained over the reference: log pi - log ref, summed over the tokens of an answer, `(P,)`."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor  # number of tokens of the chosen answers, at least 1
    rejected_tokens: Tensor

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> Tensor:
        """The difference of the means over the tokens."""
        means = self.means
        return means.chosen - means.rejected

    @property
    def means(self) -> LogRatios:
        chosen, rejected = self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens
        return LogRatios(chosen, rejected, self.chosen_tokens, self.rejected_tokens)


def sigmoid(ratios: LogRatios, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigma(beta d) - e log sigma(-beta d), d = c - r and e the label smoothing (DPO, Rafailov et al.,
    2023; with e > 0 conservative DPO, Mitchell, 2023)."""
    logits = beta * ratios.difference
    if label_smoothing == 0:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def robust(ratios: LogRatios, beta: float, label_smoothing: float) -> Tensor:
    """(-(1 - e) log sigma(beta d) + e log sigma(-beta d)) / (1 - 2 e): unbiased if a share e of the labels is flipped
    (Chowdhury et al., 2024)."""
    logits, e = beta * ratios.difference, label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def hinge(ratios: LogRatios, beta: float) -> Tensor:
    """max(0, 1 - beta d) (SLiC, Zhao et al., 2023)."""
    return (1 - beta * ratios.difference).relu()


def ipo(ratios: LogRatios, beta: float) -> Tensor:
    """(c / n_c - r / n_r - 1 / (2 beta))^2, with the numbers of tokens n (Azar et al., 2023, equation 17)."""
    return (ratios.mean_difference - 1 / (2 * beta)) ** 2


def sigmoid_norm(ratios: LogRatios, beta: float) -> Tensor:
    """-log sigma(beta (c / n_c - r / n_r)): DPO normalised by length (Lambert et al., 2024, equation 6)."""
    return -logsigmoid(beta * ratios.mean_difference)


def apo_zero(ratios: LogRatios, beta: float) -> Tensor:
    """1 - sigma(beta c) + sigma(beta r): chosen answers become likelier, rejected ones less likely (D'Oosterlinck et
    al., 2024, equation 7)."""
    return 1 - (beta * ratios.chosen).sigmoid() + (beta * ratios.rejected).sigmoid()


def apo_down(ratios: LogRatios, beta: float) -> Tensor:
    """sigma(beta c) + 1 - sigma(beta d): both become less likely, rejected ones more so (D'Oosterlinck et al., 2024,
    equation 8)."""
    return (beta * ratios.chosen).sigmoid() + 1 - (beta * ratios.difference).sigmoid()


def nca_pair(ratios: LogRatios, beta: float) -> Tensor:
    """-log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2 (NCA, Chen et al., 2024)."""
    chosen, rejected = beta * ratios.chosen, beta * ratios.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def sppo_hard(ratios: LogRatios, beta: float) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (SPPO, Wu et al., 2024)."""
    return (ratios.chosen - 0.5 / beta) ** 2 + (ratios.rejected + 0.5 / beta) ** 2


def bco_pair(ratios: LogRatios, beta: float) -> Tensor:
    """-log sigma(beta c) - log sigma(-beta r): a classifier of single answers, with no shift of the rewards (BCO, Jung
    et al., 2024)."""
    return -logsigmoid(beta * ratios.chosen) - logsigmoid(-beta * ratios.rejected)


def exo_pair(ratios: LogRatios, beta: float, label_smoothing: float) -> Tensor:
    """q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e), q = sigma(beta d): the KL of the policy's preference from
    the smoothed label, e > 0 (EXO, Ji et al., 2024, equation 16)."""
    logits, e = beta * ratios.difference, label_smoothing
    of_chosen, of_rejected = logsigmoid(logits) - math.log1p(-e), logsigmoid(-logits) - math.log(e)
    return logits.sigmoid() * of_chosen + (-logits).sigmoid() * of_rejected


def simpo(ratios: LogRatios, beta: float, simpo_gamma: float) -> Tensor:
    """-log sigma(beta (c / n_c - r / n_r) - gamma), of log-probs in place of log-ratios (SimPO, Meng et al., 2024)."""
    return -logsigmoid(beta * ratios.mean_difference - simpo_gamma)


DPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        *(sigmoid, hinge, ipo, robust, sigmoid_norm, apo_zero, apo_down, nca_pair, sppo_hard),
        *(bco_pair, exo_pair, simpo),
    )
}
"""By the names that `dpo.loss_type` takes. Each gets the log-ratios, `beta`, and the options of `dpo.*` that are
parameters of it."""


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, center_coefficient: float | None) -> Tensor:
    """-log sigma(c - r - m) + k (c + r)^2, c and r the scores (Bradley and Terry, 1952), m the margin of the pair, and
    the second term keeps scores around 0 (Eisenstein et al., 2023, equation 2).

    Args:
        center_coefficient: k. None: 0.
    """
    losses = -logsigmoid(chosen - rejected - margins)
    return losses if center_coefficient is None else losses + center_coefficient * (chosen + rejected) ** 2
