"""Whether too many episodes of a batch have failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.data.datasets import name_in_mix, of_source
from trainer.errors import UserError
from trainer.rewards.scores import Failures

LOG = logging.getLogger(__name__)

_FEWEST_ROWS = 4
"""Of a source, whose failures say that the source is broken and not a row."""


@dataclass(frozen=True)
class SourceFailures:
    """The failures among the episodes of one source in a batch."""

    source: str
    """As `Prompt.source` names it."""
    cfg: Config
    """Of a run on this source alone."""
    reasons: Sequence[str]
    """Why episodes have failed; empty for those that have not."""
    total: int
    """Number of episodes, with those that the journal had."""


def error_limit(cfg: Config) -> tuple[str, float]:
    """Return the section, `environment` or `reward`, that gives the rewards, and its `max_error_rate`."""
    if cfg.environment.name:
        return "environment", cfg.environment.max_error_rate
    return "reward", cfg.reward.max_error_rate


def judge_failures(sources: Sequence[SourceFailures], purpose: str) -> None:
    """Log the failures of a batch.

    Failures are a share of the whole batch, not of a source, of which the batch may hold two episodes. Sources with an
    environment and those with a reward are judged apart, as are sources with limits of their own. A source with several
    rows whose episodes have all failed is not hidden by the others.

    Args:
        purpose: names what the episodes are for.

    Raises:
        UserError: more than `max_error_rate` of the episodes have failed, or all of a source.
    """
    by_limit: dict[tuple[str, float], list[SourceFailures]] = {}
    for one in sources:
        by_limit.setdefault(error_limit(one.cfg), []).append(one)
    for (section, most), some in by_limit.items():
        failures = [Failures.among(one.reasons, section) for one in some]
        names = [name_in_mix(one.source) for one in some]
        problem = Failures.together(names, failures).problem(sum(one.total for one in some), most, purpose)
        if problem is not None:
            raise UserError(problem)
        for one, failed in zip(some, failures, strict=True):
            of = of_source(purpose, [one.source])
            is_broken = failed.count == one.total >= _FEWEST_ROWS * one.cfg.rollout.n
            if is_broken and (problem := failed.problem(one.total, most, of)) is not None:
                raise UserError(problem)
            for line in failed.lines(one.total, one.cfg.on_failure, of):
                LOG.warning(line)
