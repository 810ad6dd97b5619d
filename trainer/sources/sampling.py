"""Sampled episodes: the policy answers prompts, and reward functions or environments score the answers.

Staleness is a function of the step. With `rollout.ahead=k`, version v are the weights after step v - 1, and step t is
sampled by version t - k, or by the first version of this start if that is newer. The rows of a step depend on the steps
that are committed when its weights arrive, and on the steps in flight; never on time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from trainer.algorithms import shape_rewards
from trainer.checkpoint.components import Component
from trainer.config import Config
from trainer.data.datasets import Prompt, PromptSet, name_in_mix
from trainer.data.ledger import SampleIndex
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.generation.engine import RunningRequests, Sampling
from trainer.journal.history import digest
from trainer.metrics.timing import Timer
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.tracing import TRACER
from trainer.sources.batches import StepBatch, UsedRow, ahead_component
from trainer.sources.episode_metrics import (
    episode_metrics,
    failure_metrics,
    known_rewards,
    mix_progress,
    staleness,
)
from trainer.sources.rollouts import Group, Rollouts
from trainer.sources.routes import prompt_ledger

LOG = logging.getLogger(__name__)

_BASELINES = "baselines"
"""Names what decides them among the settings of batches that a checkpoint holds."""


@dataclass(frozen=True)
class RowGroup:
    """The episodes of one row."""

    index: SampleIndex
    episodes: list[Episode]

    @property
    def mean_reward(self) -> float | None:
        """Of all players. None: all rewards failed."""
        given = [reward for episode in self.episodes for reward in episode.player_rewards.values()]
        known = [reward for reward in given if reward is not None]
        return float(np.asarray(known).mean()) if known else None

    @property
    def teaches(self) -> bool:
        """Whether at least two of the rewards of a player that did not fail differ."""
        return any(len({*rewards}) > 1 for rewards in known_rewards(self.episodes).values())


class StepInFlight:
    """The batch of a step while it is made.

    Args:
        version: of the weights that sample it.
        history: of these weights.
    """

    def __init__(self, step: int, version: int, history: str):
        self.step = step
        self.version = version
        self.history = history
        self.rows: list[SampleIndex] = []
        """The rows that have been drawn so far; once all episodes are generated, those that the step uses up."""
        self.replies: Counter[str] = Counter()
        """How many of its replies were sampled, and how many were recorded."""
        self.began_at = self.generated_at = 0.0
        self.generated = asyncio.Event()
        """The engines have nothing more to do for it, and its rows are chosen; or it has failed."""
        self.task: asyncio.Task[StepBatch]

    def end_generation(self) -> None:
        if not self.generated.is_set():
            self.generated_at = time.monotonic()
            self.generated.set()

    async def result(self) -> StepBatch:
        """Wait for the batch, and return it."""
        return await asyncio.shield(self.task)


class SamplingSource:
    """Samples `rollout.n` episodes for each of `trainer.train_batch_size` prompts a step.

    With `rollout.ahead` at 0 the episodes of a step are made when they are asked for, else as soon as its weights are
    there. What is made, and the ledger, belong to the event loop: the main thread waits for what it asks of it.

    Args:
        needs_baselines: each group also gets the reward of a greedy episode, as its baseline.
    """

    running: RunningRequests = "abort"
    """What happens to requests that are under way when the policy's new weights are published."""

    def __init__(self, cfg: Config, rollouts: Rollouts, train: PromptSet, timer: Timer, needs_baselines: bool = False):
        self.cfg = cfg
        self.rollouts = rollouts
        self.prompts = train.prompts
        self.ledger = prompt_ledger(cfg, train.prompts)
        self._engines = rollouts.engines
        self._loop = rollouts.loop
        self._dropped_line = train.dropped_line(cfg.rollout.max_prompt_tokens)
        self._timer = timer
        self._needs_baselines = needs_baselines
        self._version = 0  # of the weights that the engines have
        self._history = ""  # of these weights
        self._steps: dict[int, StepInFlight] = {}
        """The batches that are made, or were made by this process, of the steps that are not committed."""
        self._held: dict[int, StepBatch] = {}  # those of a checkpoint
        self._trained: dict[int, StepBatch] = {}  # those that are trained now
        self._speeds: dict[str, float] = {}

    def __str__(self) -> str:
        r = self.cfg.rollout
        return f"{len(self.prompts):,} prompts, {r.num_engines} {r.engine} engine(s)"

    def __enter__(self) -> Self:
        self.rollouts.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._cancel()
        self.rollouts.__exit__(kind, *exception)
        if kind is None:
            self._engines.shutdown()
        else:
            self._engines.leave()

    @property
    def repeats(self) -> bool:
        return self._engines.repeats

    @property
    def epoch(self) -> float:
        return self.ledger.epoch

    def start(self, version: int, is_initial: bool) -> None:
        """Wait for the engines, and bring them to the policy's weights unless these are the ones they started with."""
        if self._dropped_line:
            LOG.info(self._dropped_line)
        self._engines.start(version, is_initial)
        self._version, self._history = version, self.rollouts.journal.history
        self._loop.call(self._admit)

    def publish(self, version: int) -> None:
        """Give the engines the policy's new weights, as soon as no batch is generated with the old ones."""
        newest = self._steps[max(self._steps)] if self._steps else None
        if self._waits_for_generation and self._steps:

            async def wait_generated() -> None:  # a batch that has failed costs no step before its own
                for step in sorted(self._steps):
                    await self._steps[step].generated.wait()

            self._loop.run(wait_generated(), self._timer)
        started = time.monotonic()
        with self._timer("sync"):
            self._engines.sync_weights(version, self.running)
        now, self._version, self._history = time.monotonic(), version, self.rollouts.journal.history
        self._speeds = {"perf/sync_gb_per_s": self._engines.synced_bytes / 1e9 / (now - started)}
        if self.cfg.rollout.fleet and self.cfg.rollout.in_flight_updates:
            self._speeds["perf/continued_tokens"] = self._engines.continued_tokens
        if newest is not None and newest.step >= version:
            self._speeds["time/wait_weights"] = now - newest.generated_at

    _waits_for_generation = True

    def next(self, step: int) -> list[Episode]:
        """Return the step's episodes, with their rewards.

        Dynamic sampling replaces prompts whose completions all have the same reward by the next prompts. Prompts that
        the step samples but does not need are sampled again in the next step.
        """
        for phase in ("rollout", "reward"):
            self._timer.add(phase, 0.0)
        with self._engines.awake():
            batch = self._loop.run(self._next(step), self._timer)
        if step in self._held:
            self.rollouts.journal.replay.hold(step)
        self._trained[step] = batch
        return batch.episodes

    async def _next(self, step: int) -> StepBatch:
        self._admit()  # in case the run has gone back to a checkpoint
        if step in self._held:
            return self._held[step]
        if step not in self._steps:
            self._begin(step)
        return await self._steps[step].result()

    def add_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        duration, batch = {}, self._trained[step]
        if self.cfg.rollout.works_ahead and (made := self._steps.get(step)) is not None:
            duration = {"time/generation": made.generated_at - made.began_at}
        progress = mix_progress(self.ledger, [row.index for row in batch.used])
        return metrics | batch.metrics | progress | self._speeds | duration

    def commit(self, step: int) -> None:
        """Record that the rows that the step has used up are trained. Then the next batch ahead begins."""
        self._loop.call(self._commit, step)

    def _commit(self, step: int) -> None:
        used = self._trained.pop(step).used
        self._held.pop(step, None)
        self._steps.pop(step, None)
        self.ledger.commit([row.index for row in used], [row.reward for row in used])
        self._admit()

    def _admit(self) -> None:
        """Begin all batches ahead that the weights of now sample."""
        ahead = self.cfg.rollout.ahead
        if ahead == 0:
            return
        for step in range(self._version, min(self._version + ahead, self.cfg.total_steps) + 1):
            if step not in self._held and step not in self._steps and step not in self._trained:
                self._begin(step)

    def _begin(self, step: int) -> None:
        before = self._steps[max(self._steps)] if self._steps else None
        made = self._steps[step] = StepInFlight(step, self._version, self._history)
        made.task = asyncio.ensure_future(self._run(made, before))
        made.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `result` raises it

    async def _run(self, step: StepInFlight, before: StepInFlight | None) -> StepBatch:
        """Make a batch, once the one before it is generated."""
        try:
            if before is not None:
                await before.generated.wait()
            step.began_at = time.monotonic()
            if self.cfg.rollout.ahead:
                failpoint("ahead:begun")
            with TRACER.span(f"rollouts of step {step.step}", "batches*"):
                return await self._make_batch(step)
        finally:
            step.end_generation()

    async def _make_batch(self, step: StepInFlight) -> StepBatch:
        """Sample the episodes of a step, and compute their rewards. It changes nothing that is saved."""
        trained, used, metrics = await self._sample_groups(step)
        if self._needs_baselines:
            trained = await self._with_baselines(trained, step)
        episodes = [episode for group in trained for episode in group.episodes]
        metrics |= episode_metrics(self.cfg, episodes)
        metrics |= {f"journal/replies_{name}": float(step.replies[name]) for name in ("sampled", "recorded")}
        if self.cfg.rollout.works_ahead:
            metrics |= staleness(episodes, step.step)
        return StepBatch(episodes, [UsedRow(group.index, group.mean_reward) for group in used], metrics)

    async def _sample_groups(self, step: StepInFlight) -> tuple[list[RowGroup], list[RowGroup], dict[str, float]]:
        """Sample batches of groups until there are enough to train on.

        Returns:
            the groups to train on, those that are used up, and metrics.
        """
        a, wanted = self.cfg.algorithm, self.cfg.trainer.train_batch_size
        groups: list[RowGroup] = []
        batch, choice = 0, None
        while choice is None:
            batch += 1
            groups += await self._more_groups(groups, step)
            teaches = [group.teaches for group in groups]
            if a.dynamic_sampling:
                choice = choose_groups(teaches, wanted, complete=batch == a.run_option("max_gen_batches"))
            else:
                choice = list(range(wanted)), wanted
        chosen, used = choice
        step.rows = [group.index for group in groups[:used]]
        metrics = failure_metrics(self.cfg, [episode for group in groups for episode in group.episodes])
        if a.dynamic_sampling:
            metrics |= {"sampling/batches": float(batch), "sampling/filtered": float(used - len(chosen))}
            lacking = sum(not teaches[i] for i in chosen)
            if lacking:
                LOG.warning(
                    "step %d: %d of %d prompts teach nothing, after %d batches", step.step, lacking, wanted, batch
                )
        return [groups[i] for i in chosen], groups[:used], metrics

    async def _more_groups(self, groups: Sequence[RowGroup], step: StepInFlight) -> list[RowGroup]:
        """Draw the next rows for a step that has these groups already, and sample their episodes."""
        # No step is committed before this one is generated, so the ledger does not change meanwhile.
        held = [row.index for other, batch in self._held.items() if other < step.step for row in batch.used]
        made = [row for other, before in self._steps.items() if other < step.step for row in before.rows]
        in_flight = [*held, *made, *(group.index for group in groups)]
        indices = self.ledger.peek(self.cfg.trainer.train_batch_size, in_flight)
        step.rows += indices
        r = self.cfg.rollout
        sampled = [index for index in indices if not self.ledger.row(index).recorded]
        requests = self._requests(sampled, step.step, range(r.n), self._sampling)
        is_last = not (self.cfg.algorithm.dynamic_sampling or self._needs_baselines)
        run = await self._run_requests(requests, step, f"step {step.step}", is_last)
        found = {index: RowGroup(index, group.episodes) for index, group in zip(sampled, run, strict=True)}
        return [found.get(index) or self._recorded(index) for index in indices]

    async def _run_requests(
        self, requests: Sequence[RolloutRequest], step: StepInFlight, purpose: str, is_last: bool
    ) -> list[Group]:
        """Return the groups of requests (see `Rollouts.run`). `is_last`: the step asks the engines for no more."""

        def end() -> None:
            if is_last and self.cfg.rollout.ahead:
                failpoint("ahead:generated")
            if is_last:
                step.end_generation()

        groups = await self.rollouts.run(requests, purpose, step.history, end)
        for group in groups:
            step.replies.update(group.replies)
        return groups

    def _recorded(self, index: SampleIndex) -> RowGroup:
        """Return the recorded episodes of a row. Their samples say that they are another policy's."""
        prompt: Prompt = self.ledger.row(index)
        group, episodes = _group_of(prompt, index), []
        for number, episode in enumerate(prompt.recorded):
            by = name_in_mix(prompt.source)
            samples = [replace(sample, sampled_by=sample.sampled_by or by) for sample in episode.samples]
            about = {"uid": f"{group}:{number}", "group": group, "source": prompt.source, "failure": ""}
            episodes.append(replace(episode, samples=samples, **about))
        return RowGroup(index, episodes)

    @property
    def _sampling(self) -> Sampling:
        r = self.cfg.rollout
        return self.rollouts.sampling(r.temperature, r.top_p, r.top_k)

    async def _with_baselines(self, groups: Sequence[RowGroup], step: StepInFlight) -> list[RowGroup]:
        """Return `groups`, each with the shaped reward of a greedy episode as its baseline. None: it failed."""
        requests = self._requests([group.index for group in groups], step.step, [-1], self.rollouts.greedy())
        run = await self._run_requests(requests, step, f"the baselines of step {step.step}", is_last=True)
        return self._baselined(groups, [group.episodes[0] for group in run])

    def _baselined(self, groups: Sequence[RowGroup], greedy: Sequence[Episode]) -> list[RowGroup]:
        """Return groups with the rewards of their greedy episodes as their baselines.

        Raises:
            UserError: an environment has several players.
        """
        if any(len(episode.player_rewards) > 1 for episode in greedy):
            raise UserError(
                f"algorithm.advantage_estimator={self.cfg.algorithm.advantage_estimator}: one greedy episode is no "
                "baseline for several players; choose rae"
            )
        a, lengths = self.cfg.algorithm, torch.tensor([episode.length for episode in greedy])
        rewards = torch.tensor([episode.reward or 0.0 for episode in greedy], dtype=torch.float64)
        limit, factor = self.cfg.rollout.max_response_tokens, a.run_option("overlong_factor")
        shaped = shape_rewards(rewards, lengths, limit, a.overlong_buffer, factor).tolist()
        baselines = [None if episode.reward is None else reward for episode, reward in zip(greedy, shaped, strict=True)]
        return [
            replace(group, episodes=[replace(episode, baseline=baseline) for episode in group.episodes])
            for group, baseline in zip(groups, baselines, strict=True)
        ]

    def _requests(
        self, indices: Sequence[SampleIndex], step: int, numbers: Sequence[int], sampling: Sampling
    ) -> list[RolloutRequest]:
        """Return the requests for episodes with these numbers of these rows, those of one row together."""
        requests = []
        for index in indices:
            prompt: Prompt = self.ledger.row(index)
            group = _group_of(prompt, index)
            requests += [RolloutRequest(prompt, group, step, number, sampling) for number in numbers]
        return requests

    def components(self) -> list[Component]:
        """Return the component with the finished batches of the steps ahead: the weights that sampled them are gone."""
        a, settings = self.cfg.algorithm, dict(self.rollouts.journal.settings)
        if self._needs_baselines:  # nothing can train on batches without them, or with those of other penalties
            settings[_BASELINES] = digest(a.overlong_buffer, a.run_option("overlong_factor"))

        def finishing() -> Mapping[int, Callable[[], StepBatch]]:
            """Return functions that wait for the batches of older weights, on another thread."""
            old = {step: made for step, made in self._steps.items() if made.version < self._version}
            waits: dict[int, Callable[[], StepBatch]] = {}
            for step in sorted({*self._held, *old}):
                if step in self._held:
                    waits[step] = lambda batch=self._held[step]: batch  # type: ignore[misc]
                else:
                    waits[step] = self._loop.start(old[step].result()).result
            return waits

        def hold(batches: Mapping[int, StepBatch]) -> None:
            self._held = dict(batches)

        return [ahead_component(settings, finishing, hold, self.cfg.rollout.works_ahead)]

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cancel()
        self.ledger.load_state_dict(state)

    def _cancel(self, *more: asyncio.Task[Any]) -> None:
        """End all that is made."""
        tasks = [*(made.task for made in self._steps.values()), *more]

        async def end() -> None:
            for task in tasks:
                task.cancel()
            _, left = await asyncio.wait(tasks, timeout=time_limits.LOOP_END_S)
            if left:
                LOG.warning("%d rollouts have not ended after %g s", len(left), time_limits.LOOP_END_S)

        if tasks:
            self._loop.run(end())
        self._steps, self._held, self._trained = {}, {}, {}


def _group_of(prompt: Prompt, index: SampleIndex) -> str:
    """Return the name of the group of a row in an epoch."""
    group = f"{index.epoch}:{prompt.index}"
    return f"{name_in_mix(prompt.source)}:{group}" if prompt.source else group


def choose_groups(teaches: Sequence[bool], wanted: int, complete: bool) -> tuple[list[int], int] | None:
    """Choose the first `wanted` groups that teach something, of those sampled so far.

    Args:
        teaches: of each group (see `RowGroup.teaches`).
        complete: no more will be sampled: fill up with the first of the others.

    Returns:
        the indices of the chosen groups, ascending, and how many groups are used up: all up to the last one that was
        looked at. None when more must be sampled.
    """
    informative = np.flatnonzero(teaches)[:wanted].tolist()
    if len(informative) == wanted:
        return informative, informative[-1] + 1
    if not complete:
        return None
    others = [i for i in range(len(teaches)) if i not in set(informative)]
    return sorted(informative + others[: wanted - len(informative)]), len(teaches)
