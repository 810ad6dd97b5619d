"""Check and try the environment of the config before anything expensive starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import EnvironmentConfig
from trainer.environments.base import check_options
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.environments.worker import WRONG_VALUE
from trainer.errors import TrialError, UserError, is_unreachable, one_line, remedy_of
from trainer.sandbox.process import run_code

LOG = logging.getLogger(__name__)

_REFUSED = "refused: "
_MOST_CHARACTERS = 1 << 16
"""Of the first messages of a trial. Nobody reads them."""


def check_environment(config: EnvironmentConfig) -> None:
    """Check that the environment can be imported, and takes `environment.kwargs`.

    With `environment.python` this happens in a process of that interpreter.

    Raises:
        UserError: it cannot, or that interpreter cannot run environments.
    """
    assert config.name is not None
    if config.python is None:
        check_options(config.name, config.kwargs)
        return
    done = run_code(
        config.python,
        f"""
import psutil
from trainer.environments.base import check_options
from trainer.errors import UserError
try:
    check_options(*given)
except UserError as error:
    sys.exit({_REFUSED!r} + str(error))
""",
        [config.name, dict(config.kwargs)],
    )
    if done.returncode == 0:
        return
    last = one_line((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    if last.startswith(_REFUSED):
        raise UserError(f"{last.removeprefix(_REFUSED)} (in the interpreter {config.python})")
    problem = f"cannot run environments ({last}); it needs Python 3.11 or newer, and the package psutil"
    raise UserError(f"environment.python={config.python}: {problem}")


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
        for row in rows:
            trial = _Trial(row, seed)
            with pool.round() as tasks:
                tasks.submit([trial])
                meanwhile()
                tasks.wait()
            usual = "`reset` returns the first messages for every row"
            if not trial.failure:
                usual = "`step` returns a StepResult for every reply"
                answer = row.get(answer_key)
                reply = answer if isinstance(answer, str) and answer else "no answer"
                trial.replies.append({"role": "assistant", "content": reply})
                pool.step_all([trial])
                is_of_every_reply = trial.failure.startswith(f"step {WRONG_VALUE}") or is_unreachable(trial.failure)
                if trial.failure and not is_of_every_reply:
                    LOG.warning(
                        "environment.name=%s: fails for the reply %s to a row of the data (%s); with each such "
                        "reply, the episode fails",
                        config.name,
                        one_line(f"{reply!r:.80}"),
                        trial.failure,
                    )
                    return
            if not trial.failure:
                trial.ended = True
                pool.step_all([trial])  # closes it
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


class _Trial(Session):
    """The environment of a trial."""

    retried = frozenset()
