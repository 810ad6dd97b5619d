"""What an evaluation measures: values of each row, pass@k, means with intervals.

The unit is the row of the data: the completions of one row are not independent of one another, so the intervals are
computed from one value for each row (Miller, "Adding Error Bars to Evals", 2024, sections 2 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95  # confidence level of the intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, with the bounds of its confidence interval."""

    value: float
    low: float
    high: float
    rows: int  # number of rows that it was computed from


def pass_at_k(successes: int, n: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k completions is a success.

    It is 1 - C(n - successes, k) / C(n, k): the share of the subsets of k of the row's n completions that hold a
    success (Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1).
    """
    assert 0 <= successes <= n and 1 <= k <= n, (successes, n, k)
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def attempts_of(n: int) -> list[int]:
    """Return the k for which n completions give pass@k: the powers of two from 2 to n, and n itself."""
    powers = [2**i for i in range(1, n.bit_length()) if 2**i <= n]
    return sorted({*powers, *([n] if n > 1 else [])})


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value for each row, with its interval.

    Values that are all 0 or 1 get the score interval of Wilson (1927), which also holds where all are equal. Others get
    the interval of Student's t. One row alone says nothing of the spread: its interval is infinite.
    """
    assert values
    if all(value in (0.0, 1.0) for value in values):
        return share_estimate(fmean(values), len(values))
    mean, rows = fmean(values), len(values)
    margin = math.inf if rows < 2 else t_quantile((1 + LEVEL) / 2, rows - 1) * stdev(values) / math.sqrt(rows)
    return Estimate(mean, mean - margin, mean + margin, rows)


def share_estimate(share: float, rows: int) -> Estimate:
    """Return a share of successes among rows, with the score interval of Wilson (1927)."""
    z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    centre = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    margin = math.sqrt(z2 * (share * (1 - share) / rows + z2 / (4 * rows**2))) / (1 + z2 / rows)
    return Estimate(share, max(0.0, centre - margin), min(1.0, centre + margin), rows)


def t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution: exact for 1 and 2 degrees of freedom. For more, it is the
    expansion of Abramowitz and Stegun (1964), 26.7.5, which is within 0.2 % for p up to 0.975."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


RowValues = Mapping[str, Mapping[int, float]]
"""Values by the name of the measure (`accuracy`, `avg@4`, `pass@2`), then by the index of the row. A row is missing
where too few of its rewards are known."""


def row_values(rewards: Sequence[Sequence[float | None]], threshold: float) -> dict[str, dict[int, float]]:
    """Return the values of each row, of whose n completions these are the rewards. None: it failed, and is left out. A
    completion with at least `threshold` is a success."""
    n = max(map(len, rewards), default=0)
    known = {row: [one for one in given if one is not None] for row, given in enumerate(rewards)}
    known = {row: values for row, values in known.items() if values}
    successes = {row: sum(value >= threshold for value in values) for row, values in known.items()}
    values = {
        "accuracy": {row: successes[row] / len(given) for row, given in known.items()},
        f"avg@{n}": {row: fmean(given) for row, given in known.items()},
    }
    for k in attempts_of(n):
        values[f"pass@{k}"] = {
            row: pass_at_k(successes[row], len(given), k) for row, given in known.items() if len(given) >= k
        }
    return values


def means_of(values: RowValues) -> dict[str, float]:
    return {name: fmean(by_row.values()) for name, by_row in values.items() if by_row}
