"""On-policy episodes: the current policy answers prompts, and a reward function judges the answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import xxhash

from trainer.algorithms import shape_rewards
from trainer.config import Config
from trainer.data.datasets import Prompt, PromptSet, load_prompts, load_rows
from trainer.data.ledger import Draw, Ledger
from trainer.data.rollout_io import write_conversations, write_rollouts
from trainer.data.row_digest import digest_rows
from trainer.environments.episode_runner import Attempt
from trainer.episodes import Episode
from trainer.generation.engine_pool import EnginePool
from trainer.import_utils import import_function
from trainer.metrics.samples import Transcript, draw, split_conversation
from trainer.metrics.timing import Timer
from trainer.models.tokenizer import stop_token_ids
from trainer.rewards.cache import RewardCache
from trainer.sources.evaluation import Evaluation
from trainer.sources.playing import Judged, Playing, known_parts, means

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """The episodes of a step, and the rows of the data that they use up."""

    step: int
    draws: list[Draw]
    """Rows that the step uses up: those it trains on, and those that dynamic sampling filtered out before them."""
    rewards: list[float | None]
    """The mean reward of each. None: all its rewards failed."""
    prompts: list[Prompt]
    """Those that are trained on."""
    episodes: list[Episode]
    judged: list[Judged]
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

    def row_fingerprint() -> str:
        """Return a digest of all that rewards, environments and curricula can read."""
        system_prompt = None if cfg.environment.name else cfg.data.system_prompt  # a template may leave it out
        return digest_rows((prompt.row for prompt in prompts), system_prompt)

    name = cfg.data.curriculum
    curriculum = import_function(name, "data.curriculum") if name else None
    return Ledger(
        [prompts],
        cfg.trainer.seed,
        "prompts",
        fingerprint,
        curriculum=curriculum,
        curriculum_name=name or "",
        row_fingerprint=row_fingerprint,
    )


class RolloutSource:
    """`rollout.n` episodes for each of `trainer.train_batch_size` prompts a step.

    Args:
        fleet: the engines.
        model_path: a local directory; its tokens that end a completion are looked up there.
        fence: raises when this process no longer holds the run directory.
    """

    def __init__(
        self, cfg: Config, fleet: EnginePool, model_path: str, tokenizer: Any, timer: Timer, fence: Callable[[], None]
    ):
        self.cfg = cfg
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.timer = timer
        self._fence = fence
        store = RewardCache(cfg.trainer.run_dir, fence)
        self._playing = Playing(cfg, fleet, tokenizer, stop_token_ids(model_path, tokenizer), store)
        train = read_prompts(cfg, "train", tokenizer)
        self.prompts, self._dropped = train.prompts, train.dropped
        self.ledger = prompt_ledger(cfg, self.prompts)
        self._evaluation: Evaluation | None = None
        if cfg.trainer.val_interval > 0:
            held_out = read_prompts(cfg, "val", tokenizer).prompts
            self._evaluation = Evaluation(cfg, self._playing, held_out, fence) if held_out else None
        self._last: _Step | None = None
        self._samples: dict[str, list[Transcript]] = {}
        self._sync_speed: dict[str, float] = {}

    def __str__(self) -> str:
        r = self.cfg.rollout
        return f"{len(self.prompts):,} prompts, {r.num_engines} {r.engine} engine(s)"

    def __enter__(self) -> Self:
        self._playing.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._playing.__exit__(kind, *exception)
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
        batches = algorithm.max_gen_batches if algorithm.dynamic_sampling else 1
        draws: list[Draw] = []
        judged: list[Judged] = []
        for batch in range(1, batches + 1):
            more = self.ledger.take(wanted, skip=len(draws))
            draws, judged = draws + more, judged + self._sample(more, step)
            by_group = np.asarray([np.nan if one.reward is None else one.reward for one in judged]).reshape(-1, n)
            chosen = list(range(wanted)), wanted
            if algorithm.dynamic_sampling:
                found = choose_groups(by_group, wanted, complete=batch == batches)
                if found is None:
                    continue
                chosen = found
            break
        groups, used = chosen
        failures = sum(bool(one.failure) for one in judged)
        metrics = {f"{'environment' if self.cfg.environment.name else 'reward'}/failures": float(failures)}
        if algorithm.dynamic_sampling:
            metrics |= {"sampling/batches": float(batch), "sampling/filtered": float(used - len(groups))}
            uninformative = int((~_have_different_rewards(by_group[groups])).sum())
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
            self._episode(draws[group], i, judged[group * n + i], baseline)
            for group, baseline in zip(groups, baselines, strict=True)
            for i in range(n)
        ]
        prompts = [self.prompts[draws[group].row] for group in groups]
        kept = [judged[group * n + i] for group in groups for i in range(n)]
        metrics |= means("reward", known_parts(kept))
        if self.cfg.environment.name:
            metrics |= means("episode", [one.played.metrics for one in kept if one.reward is not None])
            metrics["episode/turns/mean"] = float(np.mean([one.played.turns for one in kept]))
            metrics["episode/tokens/mean"] = float(np.mean([one.played.length for one in kept]))
        self._last = _Step(step, draws[:used], _mean_rewards(by_group)[:used], prompts, episodes, kept, metrics)
        return episodes

    def describe(self, metrics: dict[str, float]) -> dict[str, float]:
        assert self._last is not None
        return metrics | self._last.metrics | self._sync_speed

    def commit(self, step: int) -> None:
        """Move the ledger; draw samples of the step; with `logger.save_rollouts`, write its episodes."""
        last = self._last
        assert last is not None and last.step == step
        self.ledger.commit(last.draws, last.rewards)
        self._samples = {}
        if self.cfg.logger.samples_interval > 0 and step % self.cfg.logger.samples_interval == 0:
            self._draw_samples("training", step, self._transcripts(last), shown=self.cfg.trainer.val_interval <= 0)
        if self.cfg.logger.save_rollouts:
            run_dir = self.cfg.trainer.run_dir
            if self.cfg.environment.name:
                chats = [split_conversation(one.played.messages, one.played.turns) for one in last.judged]
                write_conversations(run_dir, step, last.episodes, chats, self._fence)
            else:
                texts = [one.played.text for one in last.judged]
                write_rollouts(run_dir, step, last.prompts, last.episodes, texts, self._fence)

    def _sample(self, draws: Sequence[Draw], step: int) -> list[Judged]:
        """Play `rollout.n` episodes per prompt, those of one prompt together."""
        r = self.cfg.rollout
        attempts = [self._attempt(draw, step, j) for draw in draws for j in range(r.n)]
        sampling = self._playing.sampling(r.temperature, r.top_p, r.top_k)
        prompts = [self.prompts[draw.row] for draw in draws]
        return self._playing.play(attempts, sampling, prompts, f"step {step}", self.timer)

    def _baselines(self, draws: Sequence[Draw], step: int) -> list[float | None]:
        """Return the reward of each prompt's greedy episode for `remax`, else None. None: it failed."""
        if self.cfg.algorithm.advantage_estimator != "remax":
            return [None] * len(draws)
        attempts = [self._attempt(draw, step, -1) for draw in draws]
        prompts = [self.prompts[draw.row] for draw in draws]
        purpose = f"the baselines of step {step}"
        greedy = self._playing.play(attempts, self._playing.greedy(), prompts, purpose, self.timer)
        a, lengths = self.cfg.algorithm, torch.tensor([one.played.length for one in greedy])
        limit = self.cfg.rollout.max_response_tokens
        rewards = torch.tensor([one.reward or 0.0 for one in greedy], dtype=torch.float64)
        shaped = shape_rewards(rewards, lengths, limit, a.overlong_buffer, a.overlong_factor).tolist()
        return [None if one.reward is None else reward for one, reward in zip(greedy, shaped, strict=True)]

    def _episode(self, draw: Draw, number: int, judged: Judged, baseline: float | None) -> Episode:
        uid, played = self._uid(draw), judged.played
        given = (judged.reward, judged.parts, played.status, baseline, judged.failure, played.metrics)
        return Episode(f"{uid}:{number}", uid, played.samples, *given)

    # ---------------------------------------------------------------------------------------------------
    # Evaluation

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the greedy reward, the accuracy (share of successes) and pass@k of the held-out prompts."""
        if self._evaluation is None:
            return {}
        with self.fleet.awake():
            metrics, transcripts = self._evaluation.run(step)
        self._draw_samples("validation", step, transcripts, shown=True)
        return metrics

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
            self._playing.transcript(last.prompts[i // n], judged, episode.group, i % n)
            for i, (episode, judged) in enumerate(zip(last.episodes, last.judged, strict=True))
        ]

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


def choose_groups(rewards: np.ndarray, wanted: int, complete: bool) -> tuple[list[int], int] | None:
    """Choose the groups of completions to train on, of those sampled so far: the first `wanted` that teach something.

    Args:
        rewards: `(P, n)`, NaN where a reward failed.
        complete: no more will be sampled: fill up with the first of the others.

    Returns:
        the chosen groups, ascending, and how many groups are used up (the ledger goes by a prefix); None when
        more must be sampled.
    """
    informative = np.flatnonzero(_have_different_rewards(rewards))[:wanted].tolist()
    if len(informative) == wanted:
        return informative, informative[-1] + 1
    if not complete:
        return None
    others = [i for i in range(len(rewards)) if i not in set(informative)]
    return sorted(informative + others[: wanted - len(informative)]), len(rewards)


def _have_different_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return `(P,)`, true where at least two of the rewards `(P, n)` that did not fail (not NaN) differ."""
    failed = np.isnan(rewards)
    return np.where(failed, -np.inf, rewards).max(axis=1) > np.where(failed, np.inf, rewards).min(axis=1)


def _mean_rewards(rewards: np.ndarray) -> list[float | None]:
    """Return the mean of each row of `(P, n)`, without NaN; None for a row of NaN."""
    known = [row[~np.isnan(row)] for row in rewards]
    return [float(row.mean()) if len(row) else None for row in known]
