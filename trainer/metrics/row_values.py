"""What an evaluation measures of each row of a validation set. A metric of the set is the mean over its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from trainer.metrics.estimates import attempts_of, pass_at_k

RowValues = Mapping[str, Mapping[int, float]]
"""Values by the name of the measure (`accuracy`, `avg@4`, `pass@2`), then by the index of the row. A row is missing
where too few of its rewards are known."""


def row_values(rewards: Sequence[Sequence[float | None]], threshold: float) -> dict[str, dict[int, float]]:
    """Return the values of each row.

    Args:
        rewards: of the n completions of each row. None: the reward failed, and is left out.
        threshold: a completion with at least this reward is a success.
    """
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
    """Return the mean of each measure over the rows that have it."""
    return {name: fmean(by_row.values()) for name, by_row in values.items() if by_row}
