"""Whether too many episodes of a batch have failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.data.datasets import name_in_mix, of_source
from trainer.errors import UserError
from trainer.process.signals import CONTINUES

LOG = logging.getLogger(__name__)

_FEWEST_ROWS = 4
"""Of a source, whose failures say that the source is broken and not a row."""
_OUTCOMES = {
    ("reward", "leave_out"): "are left out",
    ("reward", "zero"): "count as 0",
    ("environment", "leave_out"): "have a reward of 0, or are left out if the policy had not replied",
    ("environment", "zero"): "count as 0",
}
"""What becomes of failures, by the section of the config that gives the rewards, and its `on_failure`."""


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

    @property
    def failed(self) -> list[str]:
        return [reason for reason in self.reasons if reason]


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
        _refuse_above(section, most, some, purpose)
        for one in some:
            failed, of = one.failed, of_source(purpose, [one.source])
            if len(failed) == one.total >= _FEWEST_ROWS * one.cfg.rollout.n:
                _refuse_above(section, most, [one], of)
            if failed:
                outcome = _OUTCOMES[section, one.cfg.on_failure]
                share = _share(section, len(failed), one.total, of)
                LOG.warning("%s failed and %s; the first: %s", share, outcome, failed[0])


def _refuse_above(section: str, most: float, sources: Sequence[SourceFailures], purpose: str) -> None:
    """Raise a `UserError` if more than a share `most` of the episodes have failed."""
    count, total = sum(len(one.failed) for one in sources), sum(one.total for one in sources)
    if count <= most * total:
        return
    worst = max(sources, key=lambda one: len(one.failed))
    name = name_in_mix(worst.source)
    mostly = f", {len(worst.failed)} of them for {name}" if name else ""
    raise UserError(
        f"{section}.max_error_rate={most:g}: {_share(section, count, total, purpose)} failed{mostly} (the first: "
        f"{worst.failed[0]}); nothing was trained on them, and once the {section} works, {CONTINUES}"
    )


def _share(section: str, count: int, total: int, purpose: str) -> str:
    kind = "episodes" if section == "environment" else "rewards"
    return f"{count} of {total} {kind} of {purpose or 'a step'} ({count / total:.1%})"
