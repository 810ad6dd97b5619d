"""Episodes become experience (log-probs, values, advantages), and experience becomes updates."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trainer.cluster.worker_groups import Cluster
from trainer.config import Config
from trainer.episodes import Episode, Sample, TokenScores
from trainer.learner.teachers import ServerTeachers
from trainer.learner.train_workers import StoredBatch, TrainWorkers
from trainer.metrics.timing import Timer, model_flops
from trainer.objectives.base import GROUP, SOURCES, Experience, make_objective
from trainer.objectives.batches import batch_of, build_batch
from trainer.parallel.batching import Batch, select
from trainer.parallel.load_balancing import has_old_logprobs
from trainer.parallel.profiling import step_directory
from trainer.process.failpoints import failpoint

LOG = logging.getLogger(__name__)
_PLAYER_BASELINES = "player_baselines"
_INPUTS = ("input_ids", "mask", "lengths", "group_ids")
"""Arrays of a batch that a role reads to compute another."""


class Learner:
    """The models of a run, and what the driver does with them in a step, as the objective says. Construction returns
    while the ranks start, and `begin_build` while they build the models; `build` waits for them."""

    def __init__(self, cfg: Config, cluster: Cluster, timer: Timer):
        self.cfg = cfg
        self.timer = timer
        self.cluster = cluster
        self.objective = make_objective(cfg)
        self.kl, self.compares_completions = self.objective.kl, self.objective.compares_completions
        self.ranks = TrainWorkers(cfg, cluster)
        self.teachers = ServerTeachers(cfg)
        self._sources = sorted(cfg.data.mix) if any(one.source for one in (*cfg.roles, *cfg.servers)) else []
        self.peak_flops: float | None = None
        self._built: Callable[[], None] | None = None  # waits for what `begin_build` has begun
        self._forward_passes = 0.0
        self._epochs = 0.0  # of the last step
        self.token_scores: list[TokenScores] | None = None
        """Of each sample that the last update trained on, if its rollouts are kept (`logger.keeps_rollouts`)."""
        self._shared = 0.0  # of the tokens of the policy's last update, those that were computed for another row

    def state_dict(self) -> dict[str, Any]:
        averages = self.objective.averages
        of_players = {} if averages is None else {_PLAYER_BASELINES: averages.state_dict()}
        return {"kl_controller": self.kl.state_dict(), **of_players}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved. Averages of players that it does not have begin at 0."""
        self.kl.load_state_dict(state["kl_controller"])
        if self.objective.averages is not None:
            self.objective.averages.load_state_dict(state.get(_PLAYER_BASELINES, {}))

    def begin_build(self, model_path: str) -> None:
        """Begin to do what `build` does with the same path, if the driver need not wait for the ranks to begin it."""
        if self.cluster.is_local:
            self._built = self.ranks.begin(model_path)

    def build(self, model_path: str, restores: bool = False) -> None:
        """Form the process groups and load the initial weights of every role (see `TrainWorkers.begin`)."""
        wait, self._built = self._built or self.ranks.begin(model_path, restores), None
        wait()
        self.peak_flops = self.ranks.peak_flops()

    # ---------------------------------------------------------------------------------------------------
    # The steps of the loop

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Profile the ranks while the block runs, if `trainer.profile` has the step."""
        t = self.cfg.trainer
        if step not in t.profile:
            yield
            return
        directory = step_directory(os.path.abspath(t.run_dir), step)
        ranks = self.ranks.policy
        ranks.call("start_profile", directory, ranks.name.replace(" ", "_"))
        yield
        ranks.call("stop_profile")
        LOG.info("step %d is profiled: %s", step, directory)

    def make_experience(self, episodes: Sequence[Episode], step: int) -> Experience:
        """Compute what the objective reads of a step's episodes: log-probs, values, advantages."""
        failpoint("sampled")
        batch = batch_of(episodes, step)
        if self._sources:
            names = [episode.source.partition(".")[2] for episode in episodes for _ in episode.samples]
            batch[SOURCES] = np.asarray([self._sources.index(name) for name in names])
        experience = self.objective.experience(episodes, self._add_arrays(batch, step))
        return dataclasses.replace(experience, sampled=batch["mask"])

    def _add_arrays(self, batch: Batch, step: int) -> Batch:
        """Return `batch` with what the roles compute before the update (see `Objective.computes`)."""
        size = len(batch["lengths"])
        computations = self.objective.computes(batch, step)
        chosen = [(one, np.arange(size) if one.rows is None else one.rows) for one in computations]
        chosen = [(one, rows) for one, rows in chosen if len(rows)]
        passes = [
            (one.role, len(rows) / size)
            for one, rows in chosen
            if one.output == "logprobs" and one.role not in self.teachers
        ]
        self._forward_passes = sum(share * self.ranks.relative_sizes[role] for role, share in passes)
        if not chosen:
            return batch
        inputs = {name: batch[name] for name in _INPUTS}
        found: Batch = {}
        known: dict[str, np.ndarray] = {}
        with self.timer("logprob"):
            divided: tuple[Sequence[np.ndarray] | None, bool] = None, False
            if self.objective.computes_as_updated:  # in the mini-batches of the first epoch
                mini_batches = self.objective.mini_batches(batch, step)
                first = mini_batches[: len(mini_batches) // self.cfg.trainer.update_epochs]
                divided = first, self.objective.unit == GROUP
            stored = StoredBatch(self.cluster, inputs, *divided)
            for one, rows in chosen:
                if one.role in self.teachers:
                    arrays = self.teachers.compute(one, batch, rows, step)
                else:
                    some = stored if len(rows) == size else StoredBatch(self.cluster, select(inputs, rows))
                    arrays = {one.name: self.ranks.compute(one.role, one.output, some)}
                for name, values in arrays.items():
                    array = found.setdefault(name, np.zeros((size, *values.shape[1:]), values.dtype))
                    array[rows, : values.shape[1]] = values
                    known.setdefault(name, np.zeros(size, bool))[rows] = True
        return batch | found | {f"has_{name}": has for name, has in known.items() if not has.all()}

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """Train the roles, the policy last, on a step's experience; returns the step's metrics. Raises NonFiniteError:
        a loss or gradient norm is NaN or infinite; the weights are untouched."""
        failpoint("scored")
        objective, batch, metrics = self.objective, experience.batch, dict(experience.metrics)
        roles, logprobs, entropy = objective.updates(step), None, None
        mini_batches = objective.mini_batches(batch, step)
        if objective.reads_old_logprobs and "policy" in roles:
            known = has_old_logprobs(batch)
            if any(known[rows].any() != known[rows].all() for rows in mini_batches):
                raise ValueError("some rows of a mini-batch have old log-probs, and others have none")
        tokens = sum(int(batch["lengths"][rows].sum()) for rows in mini_batches)
        self._epochs = tokens / int(batch["lengths"].sum())
        with self.timer("update"):
            stored = StoredBatch(self.cluster, batch, mini_batches, keeps_groups=objective.unit == GROUP)
            totals: dict[str, list[Any]] = {role: [] for role in roles}
            for mini_batch in (select(batch, rows) for rows in mini_batches):  # a copy, for all roles
                for role in roles:
                    totals[role].append(objective.totals(role, mini_batch))
            for role in roles:
                found, *of_tokens, computed = self.ranks.update(role, stored, step, totals[role], objective.numbers())
                metrics |= zip(objective.metric_names(role, list(found)), found.values(), strict=True)
                if role == "policy":
                    (logprobs, entropy), self._shared = of_tokens, 1 - computed / tokens
        metrics |= objective.end_step(batch, metrics, logprobs)
        keeps = self.cfg.logger.keeps_rollouts(step)
        self.token_scores = self._token_scores(experience, logprobs, entropy) if keeps else None
        for role, spec in objective.roles.items():
            if spec.sync_interval is not None and step % spec.sync_interval == 0:
                self.ranks.call(role, "sync_from_policy")
        return metrics

    def _token_scores(
        self, experience: Experience, logprobs: np.ndarray | None, entropy: np.ndarray | None
    ) -> list[TokenScores]:
        batch = experience.batch
        arrays = self.objective.token_scores(batch, logprobs)
        computed = batch.get("sampled", batch["mask"]) > 0
        if entropy is not None:
            arrays["entropy"] = np.where(computed, entropy, np.nan)
        is_sampled = computed if experience.sampled is None else experience.sampled > 0
        arrays = {name: np.where(is_sampled, array, 0).astype(np.float32) for name, array in arrays.items()}
        return [
            TokenScores(**{name: array[row, :length] for name, array in arrays.items()})
            for row, length in enumerate(batch["lengths"])
        ]

    def held_out(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the objective's loss and metrics of held-out episodes under the policy, by the names of its `loss`.
        Raises NotImplementedError: the objective compares samples with the policy that sampled them."""
        objective, batch = self.objective, batch_of(episodes)
        if objective.reads_old_logprobs:
            raise NotImplementedError(f"{type(objective).__name__} has no loss of rows that nobody sampled")
        keeps_groups = objective.unit == GROUP
        stored = StoredBatch(self.cluster, {name: batch[name] for name in _INPUTS}, None, keeps_groups)
        scored = {one.name: self.ranks.compute(one.role, one.output, stored) for one in objective.computes(batch, 0)}
        batch = objective.experience(episodes, batch | scored).batch
        stored = StoredBatch(self.cluster, batch, None, keeps_groups)
        return self.ranks.evaluate(stored, objective.totals("policy", batch), objective.numbers())

    def last_scores(self, role: str, samples: Sequence[Sample]) -> np.ndarray:
        """Return what a role with a head `score` gives each sample, `(B,)`: a reward model.

        The score is that of the state after the last token that the policy sampled, its stop token, whatever follows
        it. Without such a token it is that after the last one.
        """
        batch = build_batch(samples)
        scores = self.ranks.compute(role, "values", StoredBatch(self.cluster, batch))
        return scores[np.arange(len(samples)), [sample.scored_length - 1 for sample in samples]]

    def accuracy(self, samples: Sequence[Sample]) -> float:
        """Return the share of samples whose tokens to train on are what greedy decoding would answer. It would: if each
        token is the likeliest one after those before it, greedy decoding chooses them one by one."""
        batch = build_batch(samples)
        chosen = self.ranks.compute("policy", "is_likeliest", StoredBatch(self.cluster, batch)) > 0
        return float((chosen | (batch["mask"] == 0)).all(axis=1).mean())

    def restart(self, model_path: str, restores: bool) -> None:
        """Start new ranks after `close`, with the initial weights of every role (see `TrainWorkers.begin`)."""
        self.ranks.launch()
        self.build(model_path, restores)

    def close(self) -> None:
        self._built = None
        self.ranks.release()

    def speed(self, samples: int, tokens: int, seconds: float) -> dict[str, float]:
        metrics = {"perf/tokens_per_s": tokens / seconds, "perf/samples_per_s": samples / seconds}
        if self.peak_flops is None:
            return metrics
        computed = tokens * (1 - self._shared)
        flops = model_flops(computed, *self.ranks.num_parameters, self._epochs, self._forward_passes)
        return {**metrics, "perf/mfu": flops / seconds / self.peak_flops}
