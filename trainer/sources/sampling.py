"""Sampled episodes: the policy answers prompts, and reward functions or environments score the answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import xxhash

from trainer.algorithms import shape_rewards
from trainer.checkpoint.components import Component
from trainer.config import Config
from trainer.data.datasets import Prompt, PromptSet, load_prompts, load_rows, name_in_mix
from trainer.data.ledger import Ledger, SampleIndex, find_curriculum
from trainer.data.mix_ledger import MixLedger
from trainer.data.replies import changed_answer
from trainer.data.row_digest import digest_rows
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.errors import one_line
from trainer.generation.engine import RunningRequests, Sampling
from trainer.journal.history import digest
from trainer.metrics.timing import Timer
from trainer.sources.ahead import BatchesAhead, BatchProgress, steps_to_begin
from trainer.sources.batches import StepBatch, UsedRow, ahead_part
from trainer.sources.dynamic_sampling import choose_groups, have_different_rewards
from trainer.sources.episode_metrics import episode_metrics, failure_metrics, mix_progress, staleness
from trainer.sources.rollout_runner import RolloutRunner
from trainer.sources.routes import VAL_SETS, train_sources

LOG = logging.getLogger(__name__)

_BASELINES = "baselines"
"""Names what decides them among the settings of batches that a checkpoint holds."""


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt."""

    index: SampleIndex
    episodes: list[Episode]

    @property
    def mean_reward(self) -> float | None:
        """None: all rewards failed."""
        known = [episode.reward for episode in self.episodes if episode.reward is not None]
        return float(np.asarray(known).mean()) if known else None


def read_prompts(cfg: Config, split: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of `train` or `val`; with an environment, the rows that it makes prompts of.

    The training prompts of a mix are those of its sources, one source after another.
    """
    if split == "train" and cfg.data.mix:
        sets = {source: read_source(cfg, source, tokenizer) for source in train_sources(cfg)}
        firsts = (f"{one.first_dropped} of {name_in_mix(name)}" for name, one in sets.items() if one.dropped)
        prompts = [prompt for one in sets.values() for prompt in one.prompts]
        return PromptSet(prompts, sum(one.dropped for one in sets.values()), next(firsts, ""))
    if cfg.environment.name:
        found = load_rows(cfg.data, split)
        answers = [prompt.row.get(cfg.data.answer_key) for prompt in found.prompts]
    else:
        found = load_prompts(cfg.data, split, tokenizer, cfg.rollout.max_prompt_tokens)
        answers = [prompt.answer for prompt in found.prompts]
    _warn_of_changed_answer(cfg, split, found, answers, tokenizer)
    return found


def _warn_of_changed_answer(cfg: Config, split: str, found: PromptSet, answers: Sequence[Any], tokenizer: Any) -> None:
    """Name a reference answer that the policy cannot write, because the tokenizer changes it."""
    changed = changed_answer(tokenizer, [answer if isinstance(answer, str) else "" for answer in answers])
    if changed is not None:
        place, text = changed
        LOG.warning(
            "%s=%s: the tokenizer changes the reference answer of row %d of the %s data, %s, into %s, which is all "
            "that the policy can write; a reward that does not take both for equal gives 0 to a right completion",
            cfg.data.name_of("answer_key"),
            cfg.data.answer_key,
            found.prompts[place].index + 1,
            split,
            one_line(f"{answers[place]!r:.80}"),
            one_line(f"{text!r:.80}"),
        )


def read_source(cfg: Config, source: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of a source, which name it.

    Args:
        source: dotted name below `data`, such as `mix.math` or `val_sets.math`.
    """
    found = read_prompts(cfg.of_source(source), "val" if source.startswith(VAL_SETS) else "train", tokenizer)
    return replace(found, prompts=[replace(prompt, source=source) for prompt in found.prompts])


def prompt_ledger(cfg: Config, prompts: Sequence[Prompt]) -> Ledger | MixLedger:
    """Return the ledger of a run that samples from `prompts`."""
    if not cfg.data.mix:
        return _ledger_of_source(cfg, prompts)
    rows: dict[str, list[Prompt]] = {name: [] for name in cfg.data.mix}
    for prompt in prompts:
        rows[name_in_mix(prompt.source)].append(prompt)
    ledgers = {name: _ledger_of_source(cfg.of_source(f"mix.{name}"), rows[name], name) for name in rows}
    weights = {name: source.weight for name, source in cfg.data.mix.items()}
    return MixLedger(ledgers, weights, {name: len(some) for name, some in rows.items()})


def _ledger_of_source(cfg: Config, prompts: Sequence[Prompt], name: str = "") -> Ledger:
    def fingerprint() -> str:
        digest = xxhash.xxh3_128()
        for prompt in prompts:
            row = prompt.row if cfg.environment.name else None  # then there is nothing else
            content = (prompt.index, prompt.token_ids, prompt.answer)
            digest.update(
                repr(content).encode() if row is None else json.dumps([prompt.index, row], default=str).encode()
            )
        return digest.hexdigest()

    def row_fingerprint() -> str:
        """Return a digest of all that rewards, environments and curricula can read."""
        system_prompt = None if cfg.environment.name else cfg.data.system_prompt  # a template may leave it out
        return digest_rows((prompt.row for prompt in prompts), system_prompt)

    path = cfg.data.curriculum
    curriculum = find_curriculum(path, cfg.data.name_of("curriculum")) if path else None
    return Ledger(
        prompts,
        cfg.trainer.seed,
        "prompts",
        fingerprint,
        curriculum=curriculum,
        curriculum_name=path or "",
        row_fingerprint=row_fingerprint,
        source=name,
    )


class SamplingSource:
    """Samples `rollout.n` episodes for each of `trainer.train_batch_size` prompts a step.

    With `rollout.ahead` at 0 it makes the episodes of a step when they are asked for, else on a thread
    (see `trainer.sources.ahead`).

    Args:
        needs_baselines: each group also gets the reward of a greedy episode, as its baseline.
    """

    running: RunningRequests = "abort"
    """What happens to requests that are under way when the policy's new weights are published."""

    def __init__(
        self, cfg: Config, runner: RolloutRunner, train: PromptSet, timer: Timer, needs_baselines: bool = False
    ):
        self.cfg = cfg
        self.runner = runner
        self.prompts = train.prompts
        self.ledger = prompt_ledger(cfg, train.prompts)
        self._engines = runner.engines
        self._dropped_line = train.dropped_line(cfg.rollout.max_prompt_tokens)
        self._timer = timer
        self._needs_baselines = needs_baselines
        self._version = 0  # of the weights that the engines have
        self._ahead = BatchesAhead()
        self._batches: dict[int, StepBatch] = {}
        """Those that are trained now."""
        self._speeds: dict[str, float] = {}

    def __str__(self) -> str:
        r = self.cfg.rollout
        return f"{len(self.prompts):,} prompts, {r.num_engines} {r.engine} engine(s)"

    def __enter__(self) -> Self:
        self.runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._cancel()
        self.runner.__exit__(kind, *exception)
        if kind is None:
            self._engines.shutdown()
        elif self.cfg.engine.served:
            self._engines.leave()

    @property
    def repeats(self) -> bool:
        return self._engines.repeats and not self.cfg.has_time_limits

    @property
    def epoch(self) -> float:
        return self.ledger.epoch

    def start(self, version: int, is_initial: bool) -> None:
        """Wait for the engines, and bring them to the policy's weights unless these are the ones they started with.

        If the journal has rollouts of the first step, the ranks train from it while the engines still load.
        """
        if self._dropped_line:
            LOG.info(self._dropped_line)
        may_defer = not self.cfg.rollout.works_ahead and self.runner.journal.has_records(version)
        self._engines.start(version, is_initial, may_defer)
        self._version = version
        self._begin_ahead()

    def publish(self, version: int) -> None:
        """Give the engines the policy's new weights, as soon as no batch is generated with the old ones."""
        newest = self._ahead.newest
        if newest is not None:
            with self._timer("rollout"):
                self._ahead.wait_generated()
        started = time.monotonic()
        with self._timer("sync"):
            self._engines.sync_weights(version, self.running)
        now, self._version = time.monotonic(), version
        self._speeds = {"perf/sync_gb_per_s": self._engines.synced_bytes / 1e9 / (now - started)}
        if newest is not None and newest.step >= version:
            self._speeds["time/wait_weights"] = now - newest.generated_at

    # ---------------------------------------------------------------------------------------------------
    # A step

    def next(self, step: int) -> list[Episode]:
        """Return the step's episodes, with their rewards.

        Dynamic sampling replaces prompts whose completions all have the same reward by the next prompts. Prompts that
        the step samples but does not need are sampled again in the next step.
        """
        self._begin_ahead()  # in case the run has gone back to a checkpoint
        if (thread := self._ahead.thread(step)) is not None:
            with self._timer("rollout"):
                thread.wait_generated()
            with self._timer("reward"):
                batch = thread.result()
        elif (held := self._ahead.held(step)) is not None:
            batch = held
            self.runner.journal.note_held(step, len({episode.group for episode in held.episodes}))
            self.runner.note_rewards(batch.episodes)
        else:
            batch = self._make_batch(BatchProgress(step, step, None, self._timer))
        self._batches[step] = batch
        return batch.episodes

    def add_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        thread = self._ahead.thread(step)
        duration = {} if thread is None else {"time/generation": thread.generated_at - thread.began_at}
        batch = self._batches[step]
        progress = mix_progress(self.ledger, [row.index for row in batch.used])
        return metrics | batch.metrics | progress | self._speeds | duration

    def commit(self, step: int) -> None:
        """Record that the rows that the step has used up are trained. Then the next batch ahead begins."""
        used = self._batches.pop(step).used
        self._ahead.commit(step)
        self.ledger.commit([row.index for row in used], [row.reward for row in used])
        self._begin_ahead()

    def _begin_ahead(self) -> None:
        """Begin all batches that the weights of now sample."""
        ahead = self.cfg.rollout.ahead
        if ahead == 0:
            return
        known = self._ahead.steps | self._batches.keys()
        for step in steps_to_begin(self._version, ahead, self.cfg.total_steps, known):
            self._ahead.begin(step, self._version, self.runner.journal.history, self._make_batch)

    def _make_batch(self, progress: BatchProgress) -> StepBatch:
        """Sample the episodes of a step, and compute their rewards. It changes nothing that is saved."""
        with self.runner.awake():
            trained, used, metrics = self._sample_groups(progress)
            if self._needs_baselines:
                trained = self._with_baselines(trained, progress)
        episodes = [episode for group in trained for episode in group.episodes]
        metrics |= episode_metrics(self.cfg, episodes)
        if self.cfg.rollout.works_ahead:
            metrics |= staleness(episodes, progress.step)
        return StepBatch(episodes, [UsedRow(group.index, group.mean_reward) for group in used], metrics)

    def _sample_groups(self, progress: BatchProgress) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Sample batches of groups until there are enough to train on.

        Returns:
            the groups to train on, those that are used up, and metrics.
        """
        a, wanted = self.cfg.algorithm, self.cfg.trainer.train_batch_size
        groups: list[Group] = []
        batch, choice = 0, None
        while choice is None:
            batch += 1
            groups += self._more_groups(groups, progress)
            rewards = _reward_table(groups)
            if a.dynamic_sampling:
                choice = choose_groups(rewards, wanted, complete=batch == a.max_gen_batches)
            else:
                choice = list(range(wanted)), wanted
        chosen, used = choice
        progress.rows = [group.index for group in groups[:used]]
        metrics = failure_metrics(self.cfg, [episode for group in groups for episode in group.episodes])
        if a.dynamic_sampling:
            metrics |= {"sampling/batches": float(batch), "sampling/filtered": float(used - len(chosen))}
            uninformative = int((~have_different_rewards(rewards[chosen])).sum())
            if uninformative:
                LOG.warning(
                    "in %d batches, %d of the %d prompts that step %d needs had completions of different rewards; the "
                    "others teach nothing",
                    batch,
                    wanted - uninformative,
                    wanted,
                    progress.step,
                )
        return [groups[i] for i in chosen], groups[:used], metrics

    def _more_groups(self, groups: Sequence[Group], progress: BatchProgress) -> list[Group]:
        """Draw the next rows for a step that has these groups already, and sample their episodes."""
        # No step is committed before this one is generated, so the ledger does not change meanwhile.
        earlier = self._ahead.rows_before(progress.step)
        in_flight = [*earlier, *(group.index for group in groups)]
        indices = self.ledger.peek(self.cfg.trainer.train_batch_size, in_flight)
        progress.rows += indices
        is_last = not (self.cfg.algorithm.dynamic_sampling or self._needs_baselines)
        return self._sample(indices, progress, is_last)

    def _sample(self, indices: Sequence[SampleIndex], progress: BatchProgress, is_last: bool) -> list[Group]:
        """Run `rollout.n` episodes for each prompt, those of one prompt together.

        Args:
            is_last: the engines have nothing more to do for the batch after these.
        """
        r, n = self.cfg.rollout, self.cfg.rollout.n
        sampling = self.runner.sampling(r.temperature, r.top_p, r.top_k)
        requests = [self._request(index, progress.step, number, sampling) for index in indices for number in range(n)]
        episodes = self.runner.run(requests, f"step {progress.step}", progress, is_last)
        return [Group(index, episodes[i * n : (i + 1) * n]) for i, index in enumerate(indices)]

    def _with_baselines(self, groups: Sequence[Group], progress: BatchProgress) -> list[Group]:
        """Return `groups`, each with the shaped reward of a greedy episode as its baseline. None: it failed."""
        step = progress.step
        requests = [self._request(group.index, step, -1, self.runner.greedy()) for group in groups]
        greedy = self.runner.run(requests, f"the baselines of step {step}", progress, is_last=True)
        a, lengths = self.cfg.algorithm, torch.tensor([episode.length for episode in greedy])
        rewards = torch.tensor([episode.reward or 0.0 for episode in greedy], dtype=torch.float64)
        limit = self.cfg.rollout.max_response_tokens
        shaped = shape_rewards(rewards, lengths, limit, a.overlong_buffer, a.overlong_factor).tolist()
        baselines = [None if episode.reward is None else reward for episode, reward in zip(greedy, shaped, strict=True)]
        return [
            replace(group, episodes=[replace(episode, baseline=baseline) for episode in group.episodes])
            for group, baseline in zip(groups, baselines, strict=True)
        ]

    def _request(self, index: SampleIndex, step: int, number: int, sampling: Sampling) -> RolloutRequest:
        prompt: Prompt = self.ledger.row(index)
        group = f"{index.epoch}:{prompt.index}"
        if prompt.source:
            group = f"{name_in_mix(prompt.source)}:{group}"
        return RolloutRequest(prompt, group, step, number, sampling)

    # ---------------------------------------------------------------------------------------------------
    # State

    def parts(self) -> list[Component]:
        """Return the part with the finished batches of the steps ahead: the weights that sampled them are gone."""
        a, works_ahead = self.cfg.algorithm, self.cfg.rollout.works_ahead
        # An estimator that reads baselines cannot train on batches without them, or with baselines of other penalties.
        penalties = (a.overlong_buffer, a.overlong_factor) if self._needs_baselines else None
        settings = {**self.runner.journal.settings, _BASELINES: digest(penalties)}
        unread = () if self._needs_baselines else (_BASELINES,)

        def finishing() -> Mapping[int, Callable[[], StepBatch]]:
            return self._ahead.older_than(self._version)

        return [ahead_part(settings, finishing, self._ahead.hold, works_ahead, unread)]

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def _cancel(self) -> None:
        """End the threads that sample."""
        self._ahead.cancel(lambda: self._engines.abort())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cancel()
        self._batches.clear()
        self.ledger.load_state_dict(state)


def _reward_table(groups: Sequence[Group]) -> np.ndarray:
    """Return the rewards of groups, `(P, n)`, NaN where a reward failed."""
    return np.asarray(
        [[np.nan if episode.reward is None else episode.reward for episode in group.episodes] for group in groups]
    )
