"""The policy gradient: advantages by an estimator, a policy loss, a KL to a reference, an entropy bonus, a critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainer import algorithms
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES, Totals, aggregate, kl_penalty, resolve
from trainer.algorithms.registry import needs_different_completions
from trainer.config import LOSS, Config, aggregation_of, chosen_options, correction_of
from trainer.config.algorithm import CRITIC_OPTIONS, GIVEN, INPUTS, KL_OPTIONS, TEACHER_LOGPROBS, unprefixed
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.import_utils import parameter_names
from trainer.objectives import experience
from trainer.objectives.base import GROUP, ROW, Computation, Experience, LossResult, Objective, Outputs
from trainer.objectives.batches import conversations_of, join_samples, split_samples
from trainer.objectives.check import check_functions, check_stale
from trainer.parallel.batching import Batch, MicroBatch
from trainer.parallel.load_balancing import has_old_logprobs

_OF_SAMPLES = ("clip_frac", "kl", "entropy")
"""Metrics that mean something only if the policy, or another one, sampled the tokens."""


class PolicyGradient(Objective):
    """GRPO, PPO, DAPO, ReMax and all others of `algorithm.advantage_estimator` and `algorithm.policy_loss`."""

    reads_old_logprobs = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        a = cfg.algorithm
        if "player_baselines" in a.reads:
            self.averages = algorithms.MovingAverages(a.run_option("baseline_decay"))
        self._next_averages: Mapping[str, float] = {}
        if a.adapts_kl:
            self.kl = algorithms.AdaptiveKL(a.kl_coef, **unprefixed(a, KL_OPTIONS))
        else:
            self.kl = algorithms.FixedKL(a.kl_coef)
        self.temperature = cfg.rollout.temperature
        self.divergence = a.vocabulary_divergence
        self._uses_rollout_logprobs = a.old_logprobs == "rollout"  # for those of the old policy
        # Every loss gets the old log-probs, so only an estimator names them.
        self._estimator_reads_old_logprobs = "old_logprobs" in a.reads
        self.unit = GROUP if "group_ids" in a.reads else ROW
        self.losses: dict[str, Callable[..., LossResult]] = {"policy": self._policy_loss, "critic": self._value_loss}
        """The loss of each trained role. A subclass with further trained roles adds theirs."""

    def check(self) -> None:
        check_functions(self.cfg)
        for name in self.updates(self.cfg.total_steps):
            if name not in self.losses:
                raise UserError(
                    f"the role {name} is trained, and the policy gradient has losses for "
                    f"{' and '.join(self.losses)} alone; give the task an objective that adds one to its `losses`"
                )

    # ---------------------------------------------------------------------------------------------------
    # On the driver

    @property
    def compares_completions(self) -> bool:  # type: ignore[override]
        estimator = resolve(ADVANTAGES, self.cfg.algorithm.advantage_estimator, "algorithm.advantage_estimator")
        return needs_different_completions(estimator)

    def computes(self, batch: Batch, step: int) -> list[Computation]:
        others = super().computes(batch, step)
        was_sampled = "rollout_logprobs" in batch
        if self._uses_rollout_logprobs if was_sampled else not self._estimator_reads_old_logprobs:
            return others
        return [Computation("old_logprobs", "policy", "logprobs", self._rows_to_score(batch, step)), *others]

    def experience(self, episodes: Sequence[Episode], batch: Batch) -> Experience:
        a = self.cfg.algorithm
        batch = dict(batch)
        if "is_stale" in batch:
            check_stale(self._function[0], self.cfg, "some rollouts of this step")
        if "rollout_logprobs" in batch and self._uses_rollout_logprobs:
            batch["old_logprobs"] = batch["rollout_logprobs"]
        owners, firsts, ids = conversations_of(episodes)
        status = [episode.status for episode in owners]
        known = np.asarray([sample.reward is not None for sample in firsts])
        rewards = np.asarray([sample.reward or 0.0 for sample in firsts], dtype=np.float64)
        baselines, comparable = None, known
        if "baselines" in a.reads:
            baselines = np.asarray([episode.baseline or 0.0 for episode in owners], dtype=np.float64)
            comparable = known & [episode.baseline is not None for episode in owners]
        several = len(ids) > len(owners)  # advantages compare conversations: one row for each
        joined = join_samples(batch, ids) if several else batch
        lengths = torch.from_numpy((joined["mask"] > 0).sum(axis=1))
        limit, factor = self.cfg.rollout.max_response_tokens, a.run_option("overlong_factor")
        shaped = algorithms.shape_rewards(torch.from_numpy(rewards), lengths, limit, a.overlong_buffer, factor).numpy()
        learnable = experience.choose_learnable_rows(joined, shaped, comparable, a, self.kl.coef)
        if self.averages is not None:
            joined = joined | {"player_baselines": self._read_averages(owners, firsts, shaped, learnable)}
        joined = experience.add_advantages(joined, shaped, a, self.kl.coef, baselines, learnable)
        for name in ("advantages", "returns"):
            batch[name] = split_samples(joined[name], batch, ids) if several else joined[name]
        was_sampled = firsts[0].logprobs is not None
        metrics = experience.describe_rewards(joined, rewards, status, known) if was_sampled else {}
        metrics |= {f"player/{name}/baseline": average for name, average in self._next_averages.items()}
        if "values" in batch and learnable.any():
            mask = (batch["mask"] > 0) & learnable[ids][:, None]
            values, returns = batch["values"][mask], batch["returns"][mask]
            metrics["critic/explained_variance"] = experience.explained_variance(values, returns)
        has_all = "old_logprobs" in batch and "has_old_logprobs" not in batch
        if "rollout_logprobs" in batch and has_all and not self._uses_rollout_logprobs:
            metrics |= experience.logprob_mismatch(batch)
        correction = self._correction(batch)
        batch["advantages"] = experience.correct_advantages(batch, a, correction)
        if has_all and correction is not None and "rollout_logprobs" in batch:
            metrics |= experience.correction_metrics(batch, a, correction)
        if a.adapts_kl:
            metrics["policy/kl_coef"] = self.kl.coef
        kept = experience.mask_rows(batch, shaped[ids], [status[i] for i in ids], a, learnable[ids])
        # The update returns the log-probs of all sampled tokens of the rows that have none yet.
        return Experience(kept if has_all else kept | {"sampled": batch["mask"]}, metrics)

    def _read_averages(
        self, owners: Sequence[Episode], firsts: Sequence[Sample], rewards: np.ndarray, learnable: np.ndarray
    ) -> np.ndarray:
        """Return the moving average of each conversation's player before its reward, `(B,)`. `end_step` moves them."""
        parts = [(one.source.removeprefix("mix."), own.player) for one, own in zip(owners, firsts, strict=True)]
        names = ["/".join(filter(None, some)) or "policy" for some in parts]
        known = [reward if may_learn else None for reward, may_learn in zip(rewards.tolist(), learnable, strict=True)]
        assert self.averages is not None
        baselines, self._next_averages = self.averages.read(names, known)
        return np.asarray(baselines, dtype=np.float64)

    def numbers(self) -> dict[str, float]:
        return {"kl_coef": self.kl.coef}

    def end_step(self, batch: Batch, metrics: Mapping[str, float], logprobs: np.ndarray | None) -> dict[str, float]:
        further = {}
        if self.averages is not None:
            self.averages.load_state_dict(self._next_averages)
        if logprobs is not None and "rollout_logprobs" in batch:
            old_logprobs = logprobs + batch.get("old_logprobs", 0)  # no row is in both
            batch = {**batch, "old_logprobs": old_logprobs, "mask": batch["sampled"]}
            further = experience.logprob_mismatch(batch)
            if (correction := self._correction(batch)) is not None:
                further |= experience.correction_metrics(batch, self.cfg.algorithm, correction)
        if "policy/kl" in metrics:
            self.kl.update(metrics["policy/kl"], len(batch["lengths"]))
        return further

    def token_scores(self, batch: Batch, logprobs: np.ndarray | None) -> dict[str, np.ndarray]:
        advantages = batch["advantages"]
        if logprobs is not None:  # the ranks have corrected the rows whose log-probs these are
            update = {**batch, "old_logprobs": logprobs, "has_old_logprobs": ~has_old_logprobs(batch)}
            advantages = experience.correct_advantages(update, self.cfg.algorithm, self._correction(batch))
        scores = {"advantages": np.where(batch["mask"] > 0, advantages, 0)}
        if not self._uses_rollout_logprobs and (logprobs is not None or "old_logprobs" in batch):
            scores["logprobs"] = batch.get("old_logprobs", 0) + (0 if logprobs is None else logprobs)
        return scores

    def _correction(self, batch: Batch | MicroBatch) -> str | None:
        return correction_of(self.cfg, "is_stale" in batch)

    def _rows_to_score(self, batch: Batch, step: int) -> np.ndarray:
        """Return the rows whose old log-probs must be known before the update. The first optimizer step computes those
        of its rows itself, because its weights are the old ones."""
        t, a = self.cfg.trainer, self.cfg.algorithm
        first = self.mini_batches(batch, step)[0]
        read_before = a.kl_in == "reward" and "reference" in self.roles
        read_before |= self._estimator_reads_old_logprobs
        needs_rows = a.options.get("rollout_correction_level", "token") != "token"
        read_before |= needs_rows and self._correction(batch) is not None
        if read_before or t.update_epochs > 1 or "policy" not in self.updates(step):
            first = first[:0]
        return np.setdiff1d(np.arange(len(batch["lengths"])), first)

    def totals(self, role: str, batch: Batch) -> Totals:
        mask = torch.from_numpy(np.ascontiguousarray(batch["mask"]))
        return Totals.of(mask, self.cfg.rollout.max_response_tokens)

    # ---------------------------------------------------------------------------------------------------
    # On the ranks

    def entropy(self, batch: Batch | MicroBatch) -> str | None:
        if self.cfg.algorithm.entropy_coef > 0:
            return "gradient"
        return "value" if "rollout_logprobs" in batch else None

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Totals, numbers: Mapping[str, float]
    ) -> LossResult:
        return self.losses[role](outputs, self._corrected(mb) if role == "policy" else mb, totals, numbers)

    def _corrected(self, mb: MicroBatch) -> MicroBatch:
        """Correct the advantages of rows whose old log-probs this update computes (see `correct_advantages`)."""
        correction = self._correction(mb)
        if correction is None or "has_old_logprobs" not in mb or "rollout_logprobs" not in mb:
            return mb
        weights, _ = experience.token_weights(mb, self.cfg.algorithm, correction)
        advantages = torch.where(mb["has_old_logprobs"][:, None], mb["advantages"], mb["advantages"] * weights)
        return dataclasses.replace(mb, arrays={**mb.arrays, "advantages": advantages})

    def _policy_loss(
        self, outputs: Outputs, mb: MicroBatch, totals: Totals, numbers: Mapping[str, float]
    ) -> LossResult:
        a, mask, logprobs, entropy = self.cfg.algorithm, mb["mask"], outputs.logprobs, outputs.entropy
        assert logprobs is not None
        function, options = self._function
        inputs = {name: mb[name] for name in self._inputs if name in mb}
        loss, metrics = function(
            logprobs, mb["old_logprobs"], mb["advantages"], mask, **options, totals=totals, **inputs
        )
        if "approx_kl" in metrics:
            metrics["kl"] = metrics.pop("approx_kl")
        if "ref_logprobs" in mb:
            kl = kl_penalty(logprobs, mb["ref_logprobs"], a.kl_estimator, mask)
            metrics["kl"] = aggregate(kl.detach(), mask, "token_mean", totals)
            if a.kl_in == "loss" and a.kl_coef > 0:
                loss = loss + numbers["kl_coef"] * aggregate(kl, mask, options["aggregation"], totals)
        if TEACHER_LOGPROBS in mb or outputs.divergence is not None:
            distance = outputs.divergence
            if distance is None:
                distance = algorithms.sampled_reverse_kl(logprobs, mb["old_logprobs"], mb[TEACHER_LOGPROBS], mask)
            metrics["teacher_kl"] = aggregate(distance.detach(), mask, "token_mean", totals)
            if a.opd_kl_coef > 0:
                loss = loss + a.opd_kl_coef * aggregate(distance, mask, options["aggregation"], totals)
        if entropy is not None:
            metrics["entropy"] = aggregate(entropy.detach(), mask, "token_mean", totals)
            if a.entropy_coef > 0:
                loss = loss - a.entropy_coef * aggregate(entropy, mask, options["aggregation"], totals)
        if "rollout_logprobs" not in mb:
            metrics = {name: value for name, value in metrics.items() if name not in _OF_SAMPLES}
        return loss, metrics

    @cached_property
    def _function(self) -> tuple[Callable[..., LossResult], dict[str, Any]]:
        a = self.cfg.algorithm
        function = resolve(POLICY_LOSSES, a.policy_loss, "algorithm.policy_loss")
        return function, chosen_options(function, a, LOSS) | {"aggregation": aggregation_of(function, a)}

    @cached_property
    def _inputs(self) -> tuple[str, ...]:
        """Names of arrays that the policy loss reads, besides those that every policy loss gets."""
        known = {*INPUTS[LOSS], *(spec.computes for spec in (*self.roles.values(), *self.cfg.servers))}
        return tuple(name for name in parameter_names(self._function[0]) if name in known - set(GIVEN[LOSS]))

    def _value_loss(self, outputs: Outputs, mb: MicroBatch, totals: Totals, numbers: Mapping[str, float]) -> LossResult:
        assert outputs.values is not None
        given = {name: value for name, value in self.cfg.algorithm.options.items() if name in CRITIC_OPTIONS}
        return algorithms.value_loss(outputs.values, mb["values"], mb["returns"], mb["mask"], **given, totals=totals)
