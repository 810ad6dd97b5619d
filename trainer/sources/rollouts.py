"""On-policy episodes: the current policy answers prompts, and a reward function judges the answers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import xxhash

from trainer.algorithms import shape_rewards
from trainer.config import Config
from trainer.data.datasets import Prompt, PromptSet, load_prompts, load_rows
from trainer.data.ledger import Draw, Ledger
from trainer.data.rollouts import write_conversations, write_rollouts
from trainer.environments.play import Attempt, Clock, EnvironmentPlayer, Played, Player, SingleTurn, report_failures
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.fleet import Fleet
from trainer.metrics.best import find_best
from trainer.metrics.names import pass_at
from trainer.metrics.samples import Transcript, draw, split_conversation, write_validation
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.models.tokenizer import stop_token_ids
from trainer.plugins import import_function
from trainer.rewards.components import RewardInput
from trainer.rewards.pool import RewardPool
from trainer.rewards.scores import RewardFailures, Scores
from trainer.rewards.store import RewardStore
from trainer.rewards.values import Parts

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """The episodes of a step, and the rows of the data that they use up."""

    step: int
    draws: list[Draw]
    """Rows that the step uses up: those it trains on, and those that dynamic sampling filtered out before them."""
    rewards: list[float]
    """The mean reward of each."""
    prompts: list[Prompt]
    """Those that are trained on."""
    episodes: list[Episode]
    played: list[Played]
    """The same episodes, as they were played."""
    metrics: dict[str, float]


def read_prompts(cfg: Config, split: str, tokenizer: Any) -> PromptSet:
    """Return the prompts of `train` or `val`; with an environment, the rows that it makes prompts of."""
    if cfg.environment.name:
        return load_rows(cfg.data, split)
    return load_prompts(cfg.data, split, tokenizer, cfg.rollout.max_prompt_tokens)


def prompt_ledger(cfg: Config, prompts: Sequence[Prompt]) -> Ledger:
    """Return the ledger of a run that draws `prompts`."""

    def fingerprint() -> str:
        digest = xxhash.xxh3_128()
        for prompt in prompts:
            row = prompt.row if cfg.environment.name else None  # then there is nothing else
            kept = (prompt.index, prompt.token_ids, prompt.answer)
            digest.update(repr(kept).encode() if row is None else json.dumps([prompt.index, row], default=str).encode())
        return digest.hexdigest()

    name = cfg.data.curriculum
    curriculum = import_function(name, "data.curriculum") if name else None
    return Ledger(
        [prompts], cfg.trainer.seed, "prompts", fingerprint, curriculum=curriculum, curriculum_name=name or ""
    )


class RolloutSource:
    """`rollout.n` episodes for each of `trainer.train_batch_size` prompts a step.

    Args:
        fleet: the engines.
        model_path: a local directory; its tokens that end a completion are looked up there.
        fence: raises when this process no longer holds the run directory.
    """

    def __init__(
        self, cfg: Config, fleet: Fleet, model_path: str, tokenizer: Any, timer: Timer, fence: Callable[[], None]
    ):
        self.cfg = cfg
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.timer = timer
        self._fence = fence
        self._stop_tokens = stop_token_ids(model_path, tokenizer)
        self._player: Player = (EnvironmentPlayer if cfg.environment.name else SingleTurn)(cfg, tokenizer)
        train = read_prompts(cfg, "train", tokenizer)
        self.prompts, self._dropped = train.prompts, train.dropped
        self.ledger = prompt_ledger(cfg, self.prompts)
        self._held_out: list[Prompt] = []
        if cfg.trainer.val_interval > 0:
            self._held_out = read_prompts(cfg, "val", tokenizer).prompts
        self.rewards: RewardPool | None = None  # an environment gives the rewards itself
        if cfg.environment.name is None:
            self.rewards = RewardPool(cfg.reward, RewardStore(cfg.trainer.run_dir, fence))
        self._largest_reward = -math.inf
        self._evaluations = 0
        self._last: _Step | None = None
        self._samples: dict[str, list[Transcript]] = {}
        self._sync_speed: dict[str, float] = {}

    def __str__(self) -> str:
        r = self.cfg.rollout
        return f"{len(self.prompts):,} prompts, {r.num_engines} {r.engine} engine(s)"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._player)
            if self.rewards is not None:
                stack.enter_context(self.rewards)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._processes.close()
        if kind is None:
            self.fleet.shutdown()

    @property
    def epoch(self) -> float:
        return self.ledger.epoch

    def start(self, version: int, fresh: bool) -> None:
        """Wait for the engines, and bring them to the policy's weights unless these are the ones they started with."""
        if self._dropped:
            LOG.info(
                "%d prompts are longer than rollout.max_prompt_tokens=%d and were dropped",
                self._dropped,
                self.cfg.rollout.max_prompt_tokens,
            )
        self.fleet.start(version, fresh)

    def publish(self, version: int) -> None:
        started = time.monotonic()
        self.fleet.sync_weights(version)
        self._sync_speed = {"perf/sync_gb_per_s": self.fleet.synced_bytes / 1e9 / (time.monotonic() - started)}

    # ---------------------------------------------------------------------------------------------------
    # A step

    def next(self, step: int) -> list[Episode]:
        """Return the step's episodes, with their rewards.

        Dynamic sampling replaces prompts whose completions all have the same reward by the next prompts. Prompts that
        the step draws but does not need are drawn again in the next step.
        """
        with self.fleet.awake():
            return self._next(step)

    def _next(self, step: int) -> list[Episode]:
        algorithm, wanted, n = self.cfg.algorithm, self.cfg.trainer.train_batch_size, self.cfg.rollout.n
        batches = algorithm.max_sample_batches if algorithm.dynamic_sampling else 1
        draws: list[Draw] = []
        played: list[Played] = []
        rewards, parts, failures = np.zeros(0), [], 0
        for batch in range(1, batches + 1):
            more = self.ledger.take(wanted, skip=len(draws))
            sampled, scores = self._sample(more, step)
            draws, played, parts = draws + more, played + sampled, parts + scores.parts
            rewards, failures = np.concatenate([rewards, scores.rewards]), failures + scores.failures.count
            chosen = list(range(wanted)), wanted
            if algorithm.dynamic_sampling:
                found = choose_groups(rewards.reshape(-1, n), wanted, complete=batch == batches)
                if found is None:
                    continue
                chosen = found
            break
        groups, used = chosen
        by_group = rewards.reshape(-1, n)
        metrics = {f"{'environment' if self.rewards is None else 'reward'}/failures": float(failures)}
        if algorithm.dynamic_sampling:
            metrics |= {"sampling/batches": float(batch), "sampling/filtered": float(used - len(groups))}
            uninformative = int((np.ptp(by_group[groups], axis=1) == 0).sum())
            if uninformative:
                LOG.warning(
                    "in %d batches, %d of the %d prompts that step %d needs had completions of different rewards; the "
                    "others teach nothing",
                    batch,
                    wanted - uninformative,
                    wanted,
                    step,
                )
        baselines = self._baselines([draws[group] for group in groups], step)
        episodes = [
            self._episode(draws[group], i, played[at], float(by_group[group, i]), parts[at], baseline)
            for group, baseline in zip(groups, baselines, strict=True)
            for i, at in enumerate(range(group * n, group * n + n))
        ]
        metrics |= _means("reward", [episode.rewards for episode in episodes])
        prompts = [self.prompts[draws[group].row] for group in groups]
        kept = [played[group * n + i] for group in groups for i in range(n)]
        if self.rewards is None:
            metrics["episode/turns/mean"] = float(np.mean([one.turns for one in kept]))
            metrics["episode/tokens/mean"] = float(np.mean([one.length for one in kept]))
        self._last = _Step(step, draws[:used], by_group.mean(axis=1)[:used].tolist(), prompts, episodes, kept, metrics)
        return episodes

    def describe(self, metrics: dict[str, float]) -> dict[str, float]:
        assert self._last is not None
        return metrics | self._last.metrics | self._sync_speed

    def commit(self, step: int) -> None:
        """Move the ledger; draw samples of the step; with `logger.rollouts`, write its episodes."""
        last = self._last
        assert last is not None and last.step == step
        self.ledger.commit(last.draws, last.rewards)
        self._samples = {}
        if self.cfg.logger.samples_interval > 0 and step % self.cfg.logger.samples_interval == 0:
            self._draw_samples("training", step, self._transcripts(last), shown=self.cfg.trainer.val_interval <= 0)
        if self.cfg.logger.rollouts:
            run_dir = self.cfg.trainer.run_dir
            if self.rewards is None:
                messages = [one.messages for one in last.played]
                write_conversations(run_dir, step, last.episodes, messages, self._fence)
            else:
                texts = [one.text for one in last.played]
                write_rollouts(run_dir, step, last.prompts, last.episodes, texts, self._fence)

    def _sample(self, draws: Sequence[Draw], step: int) -> tuple[list[Played], Scores]:
        """Play `rollout.n` episodes per prompt, those of one prompt together; return them with their rewards."""
        r = self.cfg.rollout
        attempts = [self._attempt(draw, step, j) for draw in draws for j in range(r.n)]
        sampling = self._sampling(r.temperature, r.top_p, r.top_k)
        prompts = [self.prompts[draw.row] for draw in draws]
        return self._play(attempts, sampling, prompts, f"step {step}", self.timer)

    def _play(
        self,
        attempts: Sequence[Attempt],
        sampling: Sampling,
        prompts: Sequence[Prompt],
        purpose: str,
        clock: Clock = contextlib.nullcontext,
    ) -> tuple[list[Played], Scores]:
        """Play episodes, and compute the rewards of those that have ended meanwhile.

        Args:
            attempts: as many for each of `prompts`, those of one prompt together.
            purpose: names what the episodes are for, in errors.
            clock: the timer of the step. Evaluation is not timed.
        """

        def generate(requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
            parts = self.fleet.stream(requests, sampling)
            while True:
                with clock("rollout"):
                    part = next(parts, None)
                if part is None:
                    return
                yield part

        parts = self._player.play(attempts, generate, clock)
        played: dict[int, Played] = {}
        if self.rewards is None:
            for part in parts:
                played |= part
            scores = _environment_scores(played)
        else:
            n = len(attempts) // len(prompts)
            with self.rewards.judging(n, purpose) as judging:
                for part in parts:
                    played |= part
                    for group in sorted({place // n for place in part}):
                        places = range(group * n, group * n + n)
                        if all(place in played for place in places):
                            judging.add(places.start, [_input(prompts[group], played[place]) for place in places])
                with clock("reward"):
                    scores = judging.scores()
        self._largest_reward = max(self._largest_reward, *scores.rewards)
        return [played[place] for place in range(len(attempts))], scores

    def _baselines(self, draws: Sequence[Draw], step: int) -> list[float | None]:
        """Return the reward of each prompt's greedy episode for `remax`; None for other estimators."""
        if self.cfg.algorithm.advantage_estimator != "remax":
            return [None] * len(draws)
        attempts = [self._attempt(draw, step, -1) for draw in draws]
        prompts = [self.prompts[draw.row] for draw in draws]
        greedy, scores = self._play(attempts, self._greedy(), prompts, f"the baselines of step {step}", self.timer)
        a, lengths = self.cfg.algorithm, torch.tensor([one.length for one in greedy])
        limit = self.cfg.rollout.max_response_tokens
        rewards = torch.tensor(scores.rewards, dtype=torch.float64)
        return shape_rewards(rewards, lengths, limit, a.overlong_buffer, a.overlong_factor).tolist()

    def _episode(self, draw: Draw, number: int, played: Played, reward: float, parts: Parts, baseline: Any) -> Episode:
        uid = self._uid(draw)
        return Episode(f"{uid}:{number}", uid, played.samples, reward, parts, played.status, baseline)

    # ---------------------------------------------------------------------------------------------------
    # Evaluation

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the greedy reward, the accuracy (share of successes) and pass@k of the held-out prompts."""
        if not self._held_out:
            return {}
        with self.fleet.awake():
            return self._evaluate(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        prompts, k, r = self._held_out, self.cfg.rollout.val_n, self.cfg.rollout
        threshold = self.cfg.reward.success_threshold
        attempts = [self._held_out_attempt(p, step, 0) for p in prompts]
        greedy, scores = self._play(attempts, self._greedy(), prompts, f"the evaluation of step {step}")
        rewards = np.asarray(scores.rewards)
        metrics = {"val/reward/mean": float(rewards.mean()), "val/accuracy": float((rewards >= threshold).mean())}
        metrics |= _means("val/reward", scores.parts)
        transcripts = self._held_out_transcripts(greedy, scores, first=0)
        self._draw_samples("validation", step, transcripts, shown=True)
        if k > 0:
            attempts = [self._held_out_attempt(p, step, 1 + j) for p in prompts for j in range(k)]
            sampling = self._sampling(r.temperature or 1.0, r.top_p, r.top_k)
            sampled, scores = self._play(attempts, sampling, prompts, f"pass@{k} of step {step}")
            metrics[pass_at(k)] = float((np.reshape(scores.rewards, (-1, k)) >= threshold).any(axis=1).mean())
            transcripts += self._held_out_transcripts(sampled, scores, first=1)
        if self.cfg.logger.validation:
            write_validation(self.cfg.trainer.run_dir, step, transcripts, self._fence)
        self._warn_without_success(step)
        return metrics

    def _warn_without_success(self, step: int) -> None:
        """Say once, after the second evaluation or the last step, that no reward has been a success."""
        threshold = self.cfg.reward.success_threshold
        self._evaluations += 1
        due = self._evaluations == 2 or (self._evaluations == 1 and step == self.cfg.trainer.total_steps)
        if due and self._largest_reward < threshold and not self._has_succeeded():
            LOG.warning(
                "no reward has reached reward.success_threshold=%g yet (the largest: %.4g), so val/accuracy is 0 and "
                "steps are compared by val/reward/mean; set the threshold to the reward of a success",
                threshold,
                self._largest_reward,
            )

    def _has_succeeded(self) -> bool:
        """Whether an earlier start of this run has measured an accuracy above 0."""
        best = find_best(read_metrics(os.path.join(self.cfg.trainer.run_dir, METRICS_FILE)), "val/accuracy", "max")
        return best is not None and best.value > 0

    # ---------------------------------------------------------------------------------------------------
    # Samples

    def samples(self) -> Mapping[str, Sequence[Transcript]]:
        return self._samples

    def _draw_samples(self, split: str, step: int, transcripts: Sequence[Transcript], shown: bool) -> None:
        """Keep `logger.samples` of the transcripts for W&B and TensorBoard.

        Args:
            shown: print them, too.
        """
        count = self.cfg.logger.samples
        chosen = [transcripts[i] for i in draw(len(transcripts), count, self.cfg.trainer.seed, split, step)]
        if chosen:
            self._samples[split] = chosen
        for number, one in enumerate(chosen if shown else [], start=1):
            block = one.block(brief=True).replace("\n", "\n  ")
            LOG.info("%s of step %d, sample %d of %d: %s\n  %s", split, step, number, len(chosen), one.name, block)

    def _transcripts(self, last: _Step) -> list[Transcript]:
        n = self.cfg.rollout.n
        return [
            self._transcript(last.prompts[i // n], played, episode.group, i % n, episode.reward, episode.rewards)
            for i, (episode, played) in enumerate(zip(last.episodes, last.played, strict=True))
        ]

    def _held_out_transcripts(self, played: Sequence[Played], scores: Scores, first: int) -> list[Transcript]:
        """Return as many transcripts for each held-out prompt, those of one prompt together, numbered from `first`."""
        n = len(played) // len(self._held_out)
        results = enumerate(zip(played, scores.rewards, scores.parts, strict=True))
        return [
            self._transcript(prompt, one, f"val:{prompt.index}", first + i % n, reward, parts)
            for i, (one, reward, parts) in results
            for prompt in [self._held_out[i // n]]
        ]

    def _transcript(
        self, prompt: Prompt, played: Played, uid: str, number: int, reward: float, parts: Mapping[str, float]
    ) -> Transcript:
        if self.rewards is not None:
            reply = {"role": "assistant", "content": played.text}
            return Transcript(uid, number, prompt.messages, [reply], prompt.answer, reward, parts, played.status)
        before, after = split_conversation(played.messages, played.turns)
        answer = str(prompt.row.get(self.cfg.data.answer_key, ""))
        return Transcript(uid, number, before, after, answer, reward, parts, played.status)

    # ---------------------------------------------------------------------------------------------------
    # State

    def state_dict(self) -> dict[str, Any]:
        return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state)

    # ---------------------------------------------------------------------------------------------------
    # Helpers

    def _uid(self, draw: Draw) -> str:
        return f"{draw.epoch}:{self.prompts[draw.row].index}"

    def _attempt(self, draw: Draw, step: int, number: int) -> Attempt:
        prompt = self.prompts[draw.row]
        return Attempt(prompt.row, prompt.token_ids, self._uid(draw), step, number)

    def _held_out_attempt(self, prompt: Prompt, step: int, number: int) -> Attempt:
        return Attempt(prompt.row, prompt.token_ids, f"val:{prompt.index}", step, number)

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def _greedy(self) -> Sampling:
        return self._sampling(0.0, 1.0, -1)


def choose_groups(rewards: np.ndarray, wanted: int, complete: bool) -> tuple[list[int], int] | None:
    """Choose the groups of completions to train on, of those sampled so far: the first `wanted` that teach something.

    Args:
        rewards: `(P, n)`.
        complete: no more will be sampled: fill up with the first of the others.

    Returns:
        the chosen groups, ascending, and how many groups are used up (the ledger goes by a prefix); None when
        more must be sampled.
    """
    informative = np.flatnonzero(rewards.max(axis=1) != rewards.min(axis=1))[:wanted].tolist()
    if len(informative) == wanted:
        return informative, informative[-1] + 1
    if not complete:
        return None
    others = [i for i in range(len(rewards)) if i not in set(informative)]
    return sorted(informative + others[: wanted - len(informative)]), len(rewards)


def _environment_scores(played: Mapping[int, Played]) -> Scores:
    """Return the rewards that environments gave, in the order of the attempts."""
    episodes = [played[place] for place in range(len(played))]
    rewards = [episode.reward or 0.0 for episode in episodes]
    return Scores(rewards, [{} for _ in episodes], RewardFailures(report_failures(episodes)))


def _input(prompt: Prompt, played: Played) -> RewardInput:
    """Return an episode of one completion as a reward sees it."""
    messages = [*prompt.messages, {"role": "assistant", "content": played.text}]
    return RewardInput(played.text, prompt.answer, prompt.text, messages, prompt.row, played.status)


def _means(name: str, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `{name}/{part}/mean`. A part that a completion lacks counts as 0."""
    names = sorted({part for of_one in parts for part in of_one})
    return {f"{name}/{part}/mean": sum(of_one.get(part, 0.0) for of_one in parts) / len(parts) for part in names}
