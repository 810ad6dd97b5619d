"""Check and try the environment of the config before anything expensive starts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import EnvironmentConfig
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.environments.worker import WRONG_VALUE
from trainer.errors import TrialError, is_unreachable, one_line, remedy_of
from trainer.process.signals import SIGNALS

LOG = logging.getLogger(__name__)

_MOST_CHARACTERS = 1 << 16
"""Of the first messages of a trial. Nobody reads them."""


def try_environment(
    config: EnvironmentConfig,
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    answer_key: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Make an environment, call its `reset` for a row of the data and its `step` for one reply, and close it.

    This happens in a process of its own. The reply is the answer of the row if that is a text, else "no answer". It
    fails if it fails for all of `rows`, because one that fails now and then must not keep a job from its restart.
    A warning names one that takes longer than its time limit, because the first call may be the slowest. Another names
    a `step` that raises, unless its service is not there: it may do so for such a reply alone.

    Args:
        answer_key: the column of the answer.
        meanwhile: called while the process starts.

    Raises:
        TrialError: the environment fails.
        WorkerError: its process cannot start.
    """
    failures, remedy = [], ""
    with EnvironmentPool(dataclasses.replace(config, num_processes=1), _MOST_CHARACTERS) as pool:
        meanwhile()
        for row in rows:
            answer = row.get(answer_key)
            reply = answer if isinstance(answer, str) and answer else "no answer"
            with SIGNALS.waiting():
                trial = asyncio.run(_try(pool, row, seed, reply))
            if not trial.failure:
                return
            usual = "`reset` returns the first messages for every row"
            if trial.steps:
                usual = "`step` returns a StepResult for every reply"
                is_of_every_reply = trial.failure.startswith(f"step {WRONG_VALUE}") or is_unreachable(trial.failure)
                if not is_of_every_reply:
                    LOG.warning(
                        "environment.name=%s: fails for the reply %s to a row of the data (%s); with each such "
                        "reply, the episode fails",
                        config.name,
                        one_line(f"{reply!r:.80}"),
                        trial.failure,
                    )
                    return
            failures.append(trial.failure)
            remedy = remedy or remedy_of(trial.failure, usual)
            if trial.status == "timeout":
                break
    problem = f"environment.name={config.name}: fails for the first row of the data"
    if trial.status == "timeout" or config.max_error_rate == 1:
        LOG.warning("%s: %s", problem, failures[-1])
    else:
        others = f", and for the {len(failures) - 1} after it" if len(failures) > 1 else ""
        raise TrialError(f"{problem}{others} ({failures[0]}); {remedy}")


async def _try(pool: EnvironmentPool, row: Mapping[str, Any], seed: int, reply: str) -> Session:
    trial = Session(row, seed)
    trial.most_attempts = 1
    async with pool.calls() as calls:
        await trial.answer(calls)
        if not trial.failure:
            trial.replies.append({"role": "assistant", "content": reply})
            await trial.answer(calls)
        await trial.close(calls)
    return trial
