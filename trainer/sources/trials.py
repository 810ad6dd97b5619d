"""Try the environments and rewards of the sources before anything expensive starts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.config import Config, DataConfig, EnvironmentConfig, RewardConfig
from trainer.data.datasets import as_messages, load_rows, read_examples
from trainer.environments.episode_runner import EnvironmentPool, Session
from trainer.environments.worker import WRONG_VALUE
from trainer.errors import TrialError, UserError, as_list, is_unreachable, one_line, remedy_of
from trainer.models.files import import_configs
from trainer.process.signals import SIGNALS
from trainer.process.startup import stage
from trainer.rewards.functions import REMOTE
from trainer.rewards.scorer import RewardInput
from trainer.rewards.scoring import Call, Result, Results, RewardPool, aggregate
from trainer.seeding import environment_seed
from trainer.sources.routes import with_keys_of

LOG = logging.getLogger(__name__)

_ROWS = 3  # rows of the data that rewards are tried with, and an environment until it works
_MOST_CHARACTERS = 1 << 16
"""Of the first messages of a trial. Nobody reads them."""


def try_sources(cfg: Config, sources: Iterable[str], asks_servers: bool) -> None:
    """Try each environment and each reward of the sources once. An agent does not begin: it would ask the policy.

    Args:
        sources: as `Prompt.source` names them.
        asks_servers: also try what may ask a server, which may cost money.

    Raises:
        TrialError: some of them fail.
        UserError: a reward takes the answer of a group for a list.
    """
    tried, failed = set(), []
    for source in sources:
        own = cfg.of_source(source)
        environment, has_train = own.environment, bool(source) or not cfg.data.mix  # a mix has no data of its own
        used = repr(environment if environment.name else own.reward)
        if used in tried or not (has_train or environment.name):
            continue
        tried.add(used)
        try:
            _try_source(own, "train" if has_train else "val", asks_servers)
        except TrialError as error:
            failed.append(with_keys_of(source, cfg, str(error)))
        except UserError as error:
            raise UserError(with_keys_of(source, cfg, str(error))) from error
    if failed:
        raise TrialError(as_list("the run cannot start:", failed))


def _try_source(cfg: Config, split: str, asks_servers: bool) -> None:
    """Try the environment of a source, or its rewards with some reference answers."""
    environment = cfg.environment
    if environment.name and not environment.is_agent and asks_servers:
        with stage("trying the environment"):
            rows = [prompt.row for prompt in load_rows(_first_rows(cfg.data), split).prompts]
            try_environment(environment, rows, environment_seed(cfg.trainer.seed, "trial"), cfg.data.answer_key)
    has_functions = cfg.task.reward_functions and not cfg.reward.is_model
    if not environment.name and has_functions and (asks_servers or REMOTE not in cfg.reward.names()):
        with stage("trying the rewards"):
            inputs = []
            for example in read_examples(_first_rows(cfg.data), "train"):
                chat, answer = as_messages(example["prompt"], cfg.data.system_prompt), example["answer"]
                messages = [*chat, {"role": "assistant", "content": answer}]
                row = example.get("row", example)
                inputs.append(RewardInput(answer, answer, chat[-1]["content"], messages, row))
            try_rewards(cfg.reward, inputs, cfg.rollout.n)


def _first_rows(data: DataConfig) -> DataConfig:
    """Return the config of the first rows of data. A size below 0 means all rows that there are."""
    sizes = {name: getattr(data, name) for name in ("train_size", "val_size")}
    return dataclasses.replace(data, **{name: _ROWS if s < 0 else min(_ROWS, s) for name, s in sizes.items()})


def try_environment(config: EnvironmentConfig, rows: Sequence[Mapping[str, Any]], seed: int, answer_key: str) -> None:
    """Make an environment, call its `reset` for a row of the data and its `step` for one reply, and close it.

    This happens in a process of its own. The reply is the answer of the row if that is a text, else "no answer". It
    fails if it fails for all of `rows`, because one that fails now and then must not keep a job from its restart.
    A warning names a `step` that raises, unless its service is not there: it may do so for such a reply alone.

    Args:
        answer_key: the column of the answer.

    Raises:
        TrialError: the environment fails.
        WorkerError: its process cannot start.
    """
    failures, remedy = [], ""
    with EnvironmentPool(dataclasses.replace(config, num_processes=1), _MOST_CHARACTERS) as pool:
        import_configs()  # while the process starts
        for row in rows:
            answer = row.get(answer_key)
            reply = answer if isinstance(answer, str) and answer else "no answer"
            trial = Session(row, seed)
            trial.most_attempts = 1
            with SIGNALS.waiting():
                asyncio.run(_run_trial(pool, trial, reply))
            failure = trial.failure
            if not failure:
                return
            if trial.steps and not (failure.startswith(f"step {WRONG_VALUE}") or is_unreachable(failure)):
                LOG.warning(
                    "environment.name=%s: fails for the reply %s to a row of the data (%s); with each such reply, the "
                    "episode fails",
                    config.name,
                    one_line(f"{reply!r:.80}"),
                    failure,
                )
                return
            usual = "`step` returns a StepResult for every reply"
            usual = usual if trial.steps else "`reset` returns the first messages for every row"
            remedy = remedy or remedy_of(failure, usual)
            failures.append(failure)
            if trial.status == "timeout":
                break
    others = f", and for the {len(failures) - 1} after it" if len(failures) > 1 else ""
    problem = f"environment.name={config.name}: fails for the first row of the data{others}"
    _refuse(problem, failures[0], remedy, config.max_error_rate, is_slow=trial.status == "timeout")


async def _run_trial(pool: EnvironmentPool, trial: Session, reply: str) -> None:
    async with pool.calls() as calls:
        await trial.answer(calls)
        if not trial.failure:
            trial.replies.append({"role": "assistant", "content": reply})
            await trial.answer(calls)
        await trial.close(calls)


def _refuse(problem: str, reason: str, remedy: str, max_error_rate: float, is_slow: bool) -> None:
    """Refuse what fails in a trial, unless it may fail, or is slow: the first call may be the slowest."""
    if not is_slow and max_error_rate < 1:
        raise TrialError(f"{problem} ({reason}); {remedy}")
    LOG.warning("%s: %s", problem, reason)


def try_rewards(config: RewardConfig, inputs: Sequence[RewardInput], n: int) -> None:
    """Compute each reward for some inputs, in a process of its own.

    A reward may fail for one of them. A warning names a reward that gives 0 or less, and always the same, although the
    completions are the reference answers. Another names a `reward.success_threshold` that all of them exceed.

    Args:
        inputs: plausible ones, one for each of some rows of the data.
        n: completions in a group.

    Raises:
        TrialError: a reward fails for all of them.
        UserError: a reward takes the answer of a group for a list.
    """
    rows = len(inputs)
    with RewardPool(dataclasses.replace(config, num_processes=1)) as pool:
        n = n if any(function.signature.grouped for function in pool.functions) else 1
        inputs = [item for item in inputs for _ in range(n)]
        import_configs()  # while the process starts
        results = _results(pool, inputs, n)
        for some in [*({function: calls} for function, calls in results.items()), results]:
            reasons = aggregate(some, len(inputs)).reasons
            if all(reasons):
                key = f"reward.name={next(iter(some)).name}" if len(some) == 1 else config.key()
                problem = f"{key}: fails for the first {rows} rows of the data with their reference answers"
                remedy = remedy_of(reasons[0], "a reward gives a number for every completion, 0 for a bad one")
                is_slow = reasons[0].startswith("took longer than ")
                _refuse(f"{problem} as completions", reasons[0], remedy, config.max_error_rate, is_slow)
        useless = []  # all reference answers get the same, and nothing above 0; a penalty may be so
        for function, calls in results.items():
            if function.weight > 0 and (values := _values(calls)) and max(values) <= 0 and min(values) == max(values):
                useless.append(function)
        if any("answer" in function.signature.names and function.signature.grouped for function in useless):
            # As TRL calls its rewards.
            listed = [dataclasses.replace(item, answer=[item.answer] * n) for item in inputs]  # type: ignore[arg-type]
            for function, calls in _results(pool, listed, n).items():
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
            rows,
            least,
        )
    for function in useless:
        LOG.warning(
            "reward.name=%s: gives %g to each of the first %d reference answers as completions; unless it asks for "
            "more than a right answer (a format, a comparison), it is wrong, and the run would learn nothing from it",
            function.name,
            _values(results[function])[0],
            rows,
        )


def _results(pool: RewardPool, inputs: Sequence[RewardInput], n: int) -> Results:
    async def compute() -> Results:
        async with pool.calls() as calls:
            return await pool.results(inputs, n, calls)

    with SIGNALS.waiting():
        return asyncio.run(compute())


def _values(calls: Mapping[Call, Result]) -> list[float]:
    """Return the rewards of the calls that did not fail."""
    return [sum(value.values()) for result in calls.values() for value in result if not isinstance(value, str)]
