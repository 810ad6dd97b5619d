"""Try the rewards before anything expensive starts: one that always fails would train on zeros."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from trainer.config import RewardConfig
from trainer.errors import UserError
from trainer.rewards.components import RewardInput
from trainer.rewards.pool import RewardPool
from trainer.rewards.scores import add_up

LOG = logging.getLogger(__name__)


def try_rewards(config: RewardConfig, attempts: Sequence[RewardInput], n: int) -> None:
    """Compute each reward for some attempts, in a process of its own.

    A reward may fail for one of them, and a slow one may need longer than its time limit.

    Args:
        attempts: plausible ones, one for each of some rows of the data.
        n: completions in a group.

    Raises:
        UserError: a reward fails for all of them.
    """
    pool = RewardPool(dataclasses.replace(config, num_processes=1))
    n = n if any(component.calling.grouped for component in pool.components) else 1
    attempts = [attempt for attempt in attempts for _ in range(n)]
    with pool:
        results = pool.judge(attempts, n, "")
    for some in [*({component: calls} for component, calls in results.items()), results]:
        failures = add_up(some, len(attempts)).failures
        if failures.count < len(attempts):
            continue
        key = f"reward.name={next(iter(some)).name}" if len(some) == 1 else config.key()
        tried = f"{key}: fails for the first {len(attempts) // n} rows of the data with their reference answers as "
        if failures.first.startswith("took longer than ") or config.max_failure_frac == 1:
            LOG.warning("%scompletions: %s", tried, failures.first)
        else:
            raise UserError(
                f"{tried}completions ({failures.first}); a reward gives a number for every completion, 0 for a bad one"
            )
