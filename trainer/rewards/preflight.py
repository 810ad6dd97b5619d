"""Try the rewards before anything expensive starts: one that always fails would train on zeros."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from trainer.config import RewardConfig
from trainer.errors import TrialError, UserError, remedy_of
from trainer.rewards.scoring import RewardPool
from trainer.rewards.terms import Call, Result, RewardFunction, RewardInput, aggregate

LOG = logging.getLogger(__name__)


def try_rewards(
    config: RewardConfig, inputs: Sequence[RewardInput], n: int, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Compute each reward for some inputs, in a process of its own.

    A reward may fail for one of them, and a slow one may need longer than its time limit. A warning names a reward that
    gives 0 or less, and always the same, although the completions are the reference answers. Another names a
    `reward.success_threshold` that all of them exceed.

    Args:
        inputs: plausible ones, one for each of some rows of the data.
        n: completions in a group.
        meanwhile: called while the process starts.

    Raises:
        TrialError: a reward fails for all of them.
        UserError: a reward takes the answer of a group for a list.
    """
    pool = RewardPool(dataclasses.replace(config, num_processes=1))
    n = n if any(function.signature.grouped for function in pool.functions) else 1
    inputs = [item for item in inputs for _ in range(n)]
    with pool:
        meanwhile()
        results = pool.results(inputs, n)
        _check_failures(config, results, len(inputs), n)
        useless = [function for function, calls in results.items() if _is_useless(function, calls)]
        if any("answer" in function.signature.names and function.signature.grouped for function in useless):
            # As TRL calls its rewards.
            listed = [dataclasses.replace(item, answer=[item.answer] * n) for item in inputs]  # type: ignore[arg-type]
            for function, calls in pool.results(listed, n).items():
                if function in useless and function.signature.grouped and any(v > 0 for v in _values(calls)):
                    raise UserError(
                        f"reward.name={function.name}: the function takes `answer` for a list with one answer for "
                        "each completion, and all its rewards would be wrong; here it is the text of the one answer "
                        "of the group: compare each completion with that (docs/rewards.md)"
                    )
    scores, threshold = aggregate(results, len(inputs)), config.success_threshold
    if not any(scores.reasons) and (least := min(scores.rewards)) > threshold + 1e-6 * abs(threshold):
        LOG.warning(
            "reward.success_threshold=%g: each of the first %d reference answers gets %g or more, so val/accuracy "
            "counts worse answers as right, too; set it to what a right answer gets",
            threshold,
            len(inputs) // n,
            least,
        )
    for function in useless:
        LOG.warning(
            "reward.name=%s: gives %g to each of the first %d reference answers as completions; unless it asks for "
            "more than a right answer (a format, a comparison), it is wrong, and the run would learn nothing from it",
            function.name,
            _values(results[function])[0],
            len(inputs) // n,
        )


def _check_failures(
    config: RewardConfig, results: Mapping[RewardFunction, Mapping[Call, Result]], total: int, n: int
) -> None:
    for some in [*({function: calls} for function, calls in results.items()), results]:
        reasons = aggregate(some, total).reasons
        if not all(reasons):
            continue
        key = f"reward.name={next(iter(some)).name}" if len(some) == 1 else config.key()
        tried = f"{key}: fails for the first {total // n} rows of the data with their reference answers as "
        if reasons[0].startswith("took longer than ") or config.max_error_rate == 1:
            LOG.warning("%scompletions: %s", tried, reasons[0])
        else:
            remedy = remedy_of(reasons[0], "a reward gives a number for every completion, 0 for a bad one")
            raise TrialError(f"{tried}completions ({reasons[0]}); {remedy}")


def _is_useless(function: RewardFunction, calls: Mapping[Call, Result]) -> bool:
    """Return whether all reference answers get the same, and nothing above 0. A penalty may be so."""
    values = _values(calls)
    return function.weight > 0 and bool(values) and max(values) <= 0 and min(values) == max(values)


def _values(calls: Mapping[Call, Result]) -> list[float]:
    """Return the rewards of the calls that did not fail."""
    return [sum(value.values()) for result in calls.values() for value in result if not isinstance(value, str)]
