"""Episodes become experience (log-probs, values, advantages), and experience becomes updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainer.algorithms import ADVANTAGES, AdaptiveKL, FixedKL, resolve, shape_rewards
from trainer.algorithms.registry import needs_different_completions
from trainer.cluster.worker_groups import Cluster
from trainer.config import Config
from trainer.episodes import Episode, Sample
from trainer.learner.experience import (
    Experience,
    add_advantages,
    build_batch,
    choose_learnable_rows,
    correct_rollouts,
    describe_rewards,
    explained_variance,
    join_samples,
    logprob_mismatch,
    mask_rows,
    split_samples,
)
from trainer.learner.train_workers import TrainWorkers
from trainer.metrics.throughput import model_flops
from trainer.metrics.timing import Timer
from trainer.parallel.batching import Batch, mini_batches, select


class Learner:
    """Policy, critic and reference, and what the driver does with them in a step.

    Construction returns while the ranks start; `build` waits for them.
    """

    def __init__(self, cfg: Config, cluster: Cluster, timer: Timer):
        self.cfg = cfg
        self.timer = timer
        self.cluster = cluster
        self.ranks = TrainWorkers(cfg, cluster)
        self.roles = self.ranks.roles
        a = cfg.algorithm
        adaptive = a.kl_controller == "adaptive"
        self.peak_flops = 0.0
        self._saves_prepared = False
        self._forward_passes = 0
        self._shared = 0.0  # of the tokens of the last update, those that were computed for another row
        self.kl = AdaptiveKL(a.kl_coef, a.kl_target, a.kl_horizon) if adaptive else FixedKL(a.kl_coef)

    def build(self, model_path: str) -> None:
        """Form the process groups and load the start weights of every role."""
        self.ranks.connect()
        self.ranks.build(model_path)
        self.peak_flops = self.ranks.peak_flops()
        self._saves_prepared = False

    # ---------------------------------------------------------------------------------------------------
    # The steps of the loop

    def score(self, episodes: Sequence[Episode], step: int) -> Experience:
        """Compute old and reference log-probs, values and advantages of a step's episodes.

        The old log-probs of some rows are missing (see `has_old_logprobs` of `PolicyWorker.update`).
        """
        samples = [sample for episode in episodes for sample in episode.samples]
        owners = np.asarray([i for i, episode in enumerate(episodes) for _ in episode.samples])
        status = [episode.status for episode in episodes]
        known = np.asarray([episode.reward is not None for episode in episodes])
        rewards = np.asarray([episode.reward or 0.0 for episode in episodes], dtype=np.float64)
        batch = self._add_logprobs_and_values(build_batch(samples, [episodes[i].group for i in owners]), step)
        a = self.cfg.algorithm
        baselines, comparable = None, known
        if a.advantage_estimator == "remax":
            baselines = np.asarray([episode.baseline or 0.0 for episode in episodes], dtype=np.float64)
            comparable = known & [episode.baseline is not None for episode in episodes]
        several = len(samples) > len(episodes)  # advantages compare episodes: one row for each, whatever its samples
        whole = join_samples(batch, owners) if several else batch
        lengths = torch.from_numpy((whole["mask"] > 0).sum(axis=1))
        shaped = shape_rewards(
            torch.from_numpy(rewards),
            lengths,
            self.cfg.rollout.max_response_tokens,
            a.overlong_buffer,
            a.overlong_factor,
        ).numpy()
        taught = choose_learnable_rows(whole, shaped, comparable, a, self.kl.coef)
        whole = add_advantages(whole, shaped, a, self.kl.coef, baselines, taught)
        for name in ("advantages", "returns"):
            batch[name] = split_samples(whole[name], batch, owners) if several else whole[name]
        metrics = describe_rewards(whole, rewards, status, known) if samples[0].weight_versions is not None else {}
        if "values" in batch and taught.any():
            mask = (batch["mask"] > 0) & taught[owners][:, None]
            metrics["critic/explained_variance"] = explained_variance(batch["values"][mask], batch["returns"][mask])
        if "rollout_logprobs" in batch and _has_all_old_logprobs(batch) and not self._uses_rollout_logprobs:
            metrics |= logprob_mismatch(batch)
        batch, corrected = correct_rollouts(batch, a)
        metrics |= corrected
        if a.kl_controller == "adaptive":
            metrics["policy/kl_coef"] = self.kl.coef
        kept = mask_rows(batch, shaped[owners], [status[i] for i in owners], a, taught[owners])
        return Experience(kept, metrics, batch["mask"])

    def _add_logprobs_and_values(self, batch: Batch, step: int) -> Batch:
        """Return `batch` with the log-probs and values `(B, T)` of the models before the update."""
        shape = batch["input_ids"].shape
        batch = dict(batch)
        rows = np.arange(0)  # whose old log-probs are computed here
        if "rollout_logprobs" in batch and self._uses_rollout_logprobs:
            batch["old_logprobs"] = batch["rollout_logprobs"]
        elif "rollout_logprobs" in batch:
            rows = self._rows_to_score(batch, step)
        self._forward_passes = len(rows) / shape[0] + ("reference" in self.roles)
        inputs = {name: batch[name] for name in ("input_ids", "mask", "lengths", "group_ids")}
        if not (len(rows) or len(self.roles) > 1):
            return batch
        with self.timer("logprob"):
            if len(rows) == shape[0] or len(self.roles) > 1:
                stored = self.cluster.put(inputs)
            if len(rows) == shape[0]:
                batch["old_logprobs"] = self.ranks.logprobs("policy", stored, shape)
            elif len(rows):
                some = self.cluster.put(select(inputs, rows))
                batch["old_logprobs"] = np.zeros(shape, np.float32)
                batch["old_logprobs"][rows] = self.ranks.logprobs("policy", some, (len(rows), shape[1]))
                batch["has_old_logprobs"] = np.isin(np.arange(shape[0]), rows)
            if "reference" in self.roles:
                batch["ref_logprobs"] = self.ranks.logprobs("reference", stored, shape)
            if "critic" in self.roles:
                batch["values"] = self.ranks.values(stored, shape)
        return batch

    def _rows_to_score(self, batch: Batch, step: int) -> np.ndarray:
        """Return the rows whose old log-probs must be known before the update.

        The first optimizer step computes those of its rows itself, because its weights are the old ones.
        """
        t, a = self.cfg.trainer, self.cfg.algorithm
        first = mini_batches(batch["group_ids"], t, step)[0]
        read_before = a.rollout_correction is not None or (a.kl_in == "reward" and "reference" in self.roles)
        if read_before or t.update_epochs > 1 or not self._trains_policy(step):
            first = first[:0]
        return np.setdiff1d(np.arange(len(batch["lengths"])), first)

    def _trains_policy(self, step: int) -> bool:
        return step > self.roles["policy"].skipped_steps

    @property
    def compares_completions(self) -> bool:
        """The advantages compare the completions of a prompt."""
        estimator = resolve(ADVANTAGES, self.cfg.algorithm.advantage_estimator, "algorithm.advantage_estimator")
        return needs_different_completions(estimator)

    @property
    def _uses_rollout_logprobs(self) -> bool:
        """The sampler's log-probs are taken for those of the old policy."""
        return self.cfg.algorithm.old_logprobs == "rollout"

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """Train the critic, then the policy, on a step's experience; returns the step's metrics.

        Raises:
            NonFiniteError: a loss or gradient norm is NaN or infinite; the weights are untouched.
        """
        batch, metrics = experience.batch, dict(experience.metrics)
        shape, fresh = batch["input_ids"].shape, None
        with self.timer("update"):
            # The update returns the log-probs of all sampled tokens of the rows that have none yet.
            scored = {} if _has_all_old_logprobs(batch) else {"sampled": experience.sampled}
            stored = self.cluster.put(batch | scored)
            if "critic" in self.roles:
                result = self.ranks.call("critic", "update", stored, step)
                metrics |= {f"critic/{name}": value for name, value in result.items()}
            if self._trains_policy(step):
                result, fresh, computed = self.ranks.update_policy(stored, shape, step, self.kl.coef)
                metrics |= {f"policy/{name}": value for name, value in result.items()}
                self._shared = 1 - computed / (self.cfg.trainer.update_epochs * int(batch["lengths"].sum()))
        if self._trains_policy(step) and not self._saves_prepared:
            self._saves_prepared = True
            self.ranks.prepare_saves()
        if fresh is not None and "rollout_logprobs" in batch:
            old_logprobs = fresh + batch.get("old_logprobs", 0)  # no row is in both
            metrics |= logprob_mismatch({**batch, "old_logprobs": old_logprobs, "mask": experience.sampled})
        if "policy/kl" in metrics:
            self.kl.update(metrics["policy/kl"], len(batch["lengths"]))
        for name, spec in self.roles.items():
            if spec.sync_interval is not None and step % spec.sync_interval == 0:
                self.ranks.call(name, "sync_from_policy")
        return metrics

    def loss(self, samples: Sequence[Sample]) -> float:
        """Return the cross-entropy of held-out samples under the policy, in nats per token."""
        batch = build_batch(samples, [str(i) for i in range(len(samples))])
        return self.ranks.call("policy", "loss", self.cluster.put(batch))

    def accuracy(self, samples: Sequence[Sample]) -> float:
        """Return the share of samples whose tokens to learn are what greedy decoding would answer.

        It would: if each token is the likeliest one after those before it, greedy decoding chooses them one by one.
        """
        batch = build_batch(samples, [str(i) for i in range(len(samples))])
        chosen = self.ranks.are_likeliest(self.cluster.put(batch), batch["input_ids"].shape)
        return float((chosen | (batch["mask"] == 0)).all(axis=1).mean())

    def restart(self, model_path: str) -> None:
        """Start new ranks after `close`, with the start weights of every role."""
        self.ranks.launch()
        self.build(model_path)

    def close(self) -> None:
        """End the ranks, and give their place back."""
        self.ranks.release()

    def speed(self, samples: int, tokens: int, seconds: float) -> dict[str, float]:
        """Return metrics of the speed of a step with so many samples and tokens."""
        metrics = {"perf/tokens_per_s": tokens / seconds, "perf/samples_per_s": samples / seconds}
        computed = tokens * (1 - self._shared)
        flops = model_flops(computed, *self.ranks.num_parameters, self.cfg.trainer.update_epochs, self._forward_passes)
        return {**metrics, "perf/prefix_reuse_frac": self._shared, "perf/mfu": flops / seconds / self.peak_flops}


def _has_all_old_logprobs(batch: Batch) -> bool:
    return "old_logprobs" in batch and "has_old_logprobs" not in batch
