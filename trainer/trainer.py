"""The loop, and what of a run is saved and restored: one for every task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from trainer.checkpoint.components import (
    Component,
    assets_component,
    config_component,
    config_digest,
    json_component,
    models_component,
    start_weights_component,
)
from trainer.checkpoint.exports import PolicyExports
from trainer.checkpoint.step_copies import StepCopies
from trainer.config import Config
from trainer.episodes import Episode
from trainer.errors import format_size
from trainer.files.redaction import redact
from trainer.journal.history import first_history, history_at
from trainer.journal.journal import Journal
from trainer.learner.learner import Learner
from trainer.metrics.advice import MetricChecks
from trainer.metrics.best import better, score_of
from trainer.metrics.progress import Progress
from trainer.metrics.prometheus import MetricsServer
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import Tracker
from trainer.models.export import PolicyExporter, policy_assets
from trainer.objectives.base import Experience
from trainer.parallel.rng import capture_rng, restore_rng, rng_as_text, rng_from_text, seed_rng
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.signals import CONTINUES, SIGNALS, Stopped
from trainer.process.startup import stage
from trainer.run.directory import RunDirectory
from trainer.run.recovery import Recovery
from trainer.run.replay_check import ReplayAudit
from trainer.run.saves import Saves
from trainer.run.state import SHAPE_OF_STATE, StopRequest, TrainerState
from trainer.seeding import derive_seed
from trainer.sources.base import EpisodeSource, Evaluator
from trainer.sources.transcripts import TranscriptLog

LOG = logging.getLogger(__name__)
_LEAST_LR_OF_ADAPTERS = 5e-6
_BYTES_OF_A_PARAMETER = 12
"""In a checkpoint: float32, with two moments."""
_MUCH = 10e9
"""Bytes of checkpoints from which a start says how many there will be."""


@dataclass(eq=False, repr=False)
class Trainer:
    """Runs to the last step, and owns what is saved and restored."""

    cfg: Config
    """Of the task."""
    directory: RunDirectory
    """Of the run, open; its `cfg` is the user's, and goes into checkpoints."""
    source: EpisodeSource
    learner: Learner
    model_path: str
    """The initial weights, a local directory."""
    tokenizer: Any
    timer: Timer
    stop: StopRequest
    journal: Journal
    evaluator: Evaluator | None = None
    """None: there is no validation data."""
    is_enough: Callable[[int], bool] = lambda step: False
    """Whether the run ends after a step, before its last one. A resumed run asks again."""
    server: MetricsServer | None = None
    """Serves the metrics."""

    def __post_init__(self) -> None:
        cfg, t, self.checkpoints = self.cfg, self.cfg.trainer, self.directory.checkpoints
        self.transcripts = TranscriptLog(cfg, self.directory.check, self.tokenizer)
        self.audit: ReplayAudit | None = None
        self.saves = Saves(t.ckpt_interval, t.ckpt_path, self.checkpoints)
        self.state = TrainerState()
        self.recovery = Recovery(t, self.stop, cfg.task.optimizer)
        self.assets = policy_assets(cfg, self.model_path, self.tokenizer)  # now, so that no save fails because of them
        alone, fence = t.policy.lora.rank is not None and t.hf_save_lora == "adapter", self.directory.check
        exporter = PolicyExporter(self.learner.ranks, self.model_path, self.assets, adapter_alone=alone, fence=fence)
        self.exports = PolicyExports(cfg, exporter)
        self.copies = StepCopies(t.copy_steps)
        self._data_of: str | None = None  # the checkpoint whose position in the data is loaded

    # ---------------------------------------------------------------------------------------------------
    # The loop

    def run(self) -> None:
        """Train up to `trainer.total_steps`. If ranks fail, start new ones and continue from the last commit.

        Raises:
            Stopped: a signal or deadline asked for it; everything is saved.
            NotSavedError: the last save failed.
        """
        seed_rng(derive_seed(self.cfg.trainer.seed, "driver"))  # for user code
        resets = [
            partial(self.learner.load_state_dict, self.learner.state_dict()),
            partial(self.source.load_state_dict, self.source.state_dict()),
            partial(restore_rng, capture_rng()),
        ]
        # Until then the source adds to both.
        with closing(self.journal), self.source, self.checkpoints.ended(), closing(self.copies):
            self.recovery.run(self._load_start_weights, self.fit, partial(self._restart, resets), self.saves)

    def fit(self) -> None:
        """Train from the last commit up to the last step: the same at the start of a job and after its ranks died."""
        self.load_checkpoint()
        t, ranks = self.cfg.trainer, self.learner.ranks
        size = _BYTES_OF_A_PARAMETER * ranks.num_parameters[1] * len(ranks.saved_roles) * t.dp_replicate
        self.copies.open(self.components, ranks, needed=2 * size)
        with self._running():
            while self.state.step < self.cfg.total_steps and not self.is_enough(self.state.step):
                with self._step() as step:
                    episodes = self.source.next(step)
                    experience = self.learner.make_experience(episodes, step)
                    metrics = self._update(episodes, experience, step)
                    self.source.publish(step + 1)
                self.save_if_due(self.finish_step(step, episodes, metrics))
                self.copy_step()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run what the steps need while the block trains; after its last step, export what is due and end the saves."""
        with self._open_tracker() as self.tracker, self._open_progress() as self.progress:
            # The checks of the metrics begin with the steps that are logged.
            self.checks = MetricChecks(self.cfg, self.learner.compares_completions, self.directory.metrics())
            self._announce()
            with stage("starting what generates and rewards"):
                is_initial = self.directory.resume is None and not self.recovery.restarted
                self.source.start(version=self.state.step + 1, is_initial=is_initial)
            self.recovery.complete()
            with stage("evaluating the weights"):
                if self.state.step == 0 and self.cfg.validates_start:
                    self._log(0, self._evaluate(0))
            with SIGNALS.in_training_loop(), self.saves.completed():
                yield
                self.exports.export_if_missing(self.state.step)
                self.saves.wait()

    @contextmanager
    def _step(self) -> Iterator[int]:
        """Give the number of the next step to the block, and measure the block."""
        step = self.state.step + 1
        self.recovery.begin_step(step)
        with self.learner.profiled(step), self.timer("step", step=step):
            yield step

    def _update(self, episodes: list[Episode], experience: Experience, step: int) -> dict[str, float]:
        # Ranks may have waited until the state of the step before was copied: now, or before engines got their memory.
        saving = self.checkpoints.saving or self.saves.begun == self.state.step
        self.journal.wait()  # what a step trains on must come back after a kill
        if self.copies.is_on:
            with self.timer("checkpoint_blocked"):
                self.copies.wait()  # so that a lost rank costs no step but this one
        metrics = self.learner.update(experience, step)
        if saving or self.copies.is_on:
            blocked = self.learner.ranks.pop_stall_seconds()
            self.timer.add("checkpoint_blocked", blocked)
            if saving:
                self.saves.add_blocked(self.saves.begun, blocked)
        self.journal.trained(episodes)  # the policy has new weights, which may sample from now on
        failpoint("trained")
        return metrics

    def finish_step(self, step: int, episodes: list[Episode], metrics: dict[str, float]) -> dict[str, float]:
        """Move the ledger, evaluate, compare a replayed step with the log, log, export. Return all metrics."""
        state = self.state
        samples = [sample for episode in episodes for sample in episode.samples]
        tokens = sum(len(sample.token_ids) for sample in samples)
        metrics = self.source.add_metrics(step, metrics)
        self.source.commit(step)
        self.transcripts.add_step(step, episodes, self.learner.token_scores)
        state.step = step
        state.prompts += len({episode.group for episode in episodes})
        state.samples += len(samples)
        state.tokens += tokens
        times = self.timer.pop()
        metrics |= times | self.learner.speed(len(samples), tokens, times["time/step"])
        metrics |= {f"progress/{name}": getattr(state, name) for name in ("prompts", "samples", "tokens")}
        metrics["progress/epoch"] = self.source.epoch
        if self.cfg.validates(step):
            metrics |= self._evaluate(step)
        if self.audit is not None:
            self.audit.check(step, metrics, self.journal.replay.has_all(step))
        self._log(step, metrics)
        failpoint("logged")
        self.saves.collect(self.checkpoints.results())
        self.exports.export_if_due(step)
        return metrics

    def _load_start_weights(self) -> None:
        with stage("loading the model into the ranks"):
            self.learner.build(self.model_path)

    def _restart(self, resets: Sequence[Callable[[], None]], error: Exception) -> None:
        """Start new ranks after `error`. `resets` bring KL controller, source and random generators back to where the
        run began; `fit` then loads the last commit."""
        self.learner.cluster.drain(error)
        with stage("starting the ranks again"):
            self.checkpoints.wait(time_limits.SAVE_END_S)  # a save under way is good if its ranks live
            self.learner.close()
            self.saves.wait(last=True)
            self.recovery.wait()
            self.directory.rediscover(self.copies.newest())
            self.recovery.lost_s = self.directory.lost_seconds()
            self.saves.restart()
            self.state = TrainerState()
            self.timer.pop()
            for reset in resets:
                reset()
            resume = self.directory.resume
            restores = resume is not None and "weights" in resume.restore.kinds and not resume.restore.fork
            self.learner.restart(self.model_path, restores)

    # ---------------------------------------------------------------------------------------------------
    # What is saved, when, and what is restored

    @cached_property
    def components(self) -> list[Component]:
        """The components of a checkpoint, in the order in which they are saved and restored."""
        adapters = None
        if self.cfg.trainer.policy.lora.rank is not None:
            adapters = partial(self.learner.ranks.call_one, "policy", "adapter_config", self.model_path)
        return [
            config_component(self.directory.cfg),
            start_weights_component(self.cfg, self.model_path),
            json_component("trainer_state", self.state_dict, self.load_state_dict, SHAPE_OF_STATE),
            json_component("data", self.source.state_dict, self.source.load_state_dict, kinds=("data",)),
            *self.source.components(),
            models_component(self.learner.ranks),
            assets_component(self.assets, adapters),
            *([self.directory.run_files.component()] if self.checkpoints.store.keeps_record else []),
        ]

    def save_if_due(self, metrics: dict[str, float]) -> None:
        """Save when the schedule says so, after the last step, and before the run stops early.

        Raises:
            Stopped: a signal, the deadline or the user's callback asked for it; everything is saved.
            NotSavedError: the run ends here, and its last save failed.
        """
        step, total = self.state.step, self.cfg.total_steps
        self.stop.consider({"step": step, **metrics}, 2 * metrics["time/step"] + 2 * self.saves.seconds + 5)
        last = step == total
        stopping = self.stop.reason is not None and not last
        with self.timer("checkpoint_blocked"):
            if stopping or last:
                self.saves.save_last(step, partial(self.save_checkpoint, metrics))
            elif self.saves.is_due(step):
                self.save_checkpoint(metrics)
        if stopping:
            raise Stopped(f"stopped after step {step} of {total} ({self.stop.reason}); {CONTINUES}")

    def save_checkpoint(self, metrics: dict[str, float]) -> None:
        """Begin to write `global_step_{step}`; training continues meanwhile."""
        description = {
            **self.learner.ranks.description,
            "config_digest": config_digest(self.directory.cfg),
            **score_of(*self.cfg.compared_by, metrics, self.state.best),
            "parent": self.directory.lineage or None,
            "metrics_from": self.tracker.first_step,
        }
        self.copies.wait()  # the ranks copy their state for one of them at a time
        # A checkpoint must not outlive what was logged of its steps.
        self.saves.begin(self.state.step, self.components, description, (self.tracker.flush, self.transcripts.flush))

    def copy_step(self) -> None:
        """Begin to copy the state to shared memory, unless the ranks copy it for a save."""
        if self.copies.is_on and not self.checkpoints.saving and self.state.step < self.cfg.total_steps:
            with self.timer("checkpoint_blocked"):
                self.copies.begin(self.state.step, self.learner.ranks.description)

    def load_data(self) -> None:
        """Restore the position in the data before `load_checkpoint` does the rest: other data is refused early.

        Raises:
            UserError: the data is not that of the checkpoint; the message lists changed initial weights, too.
        """
        resume = self.directory.resume
        if resume is not None:
            chosen = resume.restore.chosen(self.components, resume.checkpoint)
            inputs = [part for part in chosen if part.name in ("start_weights", "data")]
            self.checkpoints.load(resume.checkpoint, inputs, resume.restore)
            self._data_of = resume.checkpoint.path

    def load_checkpoint(self) -> None:
        """Restore the checkpoint that the run directory has found; without one, the run starts from the beginning."""
        self.audit = None
        with stage("loading the checkpoint"):
            self.directory.check_access(self.learner.ranks)
            with self.directory.checked_resume(self.learner.ranks) as resume:
                if resume is None or not resume.is_copy:
                    self.copies.forget()
                if resume is None:
                    self.journal.start(0, first_history(self.cfg, self.model_path))
                    return
                checkpoint = resume.checkpoint
                loaded = {"data"} if self._data_of == checkpoint.path else set()
                self._data_of = None
                if resume.is_copy:
                    self.copies.load(checkpoint)
                    saved = self.checkpoints.store.steps()[-1:]
                    self.saves.last_good = self.checkpoints.store.path(saved[0]) if saved else ""
                else:
                    chosen = resume.restore.chosen(self.components, checkpoint)
                    rest = [one for one in chosen if one.name not in loaded]
                    self.checkpoints.load(checkpoint, rest, resume.restore)
                    self.saves.last_good = checkpoint.path
            self.journal.start(self.state.step, history_at(checkpoint, resume.restore))
            if resume.restore.fork:
                self.state.run_ids, self.state.best = {}, {}  # those of the parent are not of this run
                return
            self.checkpoints.archive(after=checkpoint.step)  # the run went back behind them, and will save them again
            t = self.cfg.trainer
            self.audit = ReplayAudit(
                t.run_dir,
                checkpoint,
                exact=self.learner.cluster.device == "cpu" or t.deterministic,
                same_layout=resume.same_rounding and checkpoint.manifest.get("ranks") == self.learner.ranks.count,
                altered=resume.altered,
                same_episodes=self.source.repeats,
                stops=t.on_resume_mismatch == "stop",
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.state.state_dict(),
            **self.learner.state_dict(),
            "tracker": self.tracker.state_dict(),
            "rng": rng_as_text(capture_rng(with_gpu=False)),
            "history": self.journal.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        self.learner.load_state_dict(state)
        restore_rng(rng_from_text(state["rng"]))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the validation data under the current policy."""
        if self.evaluator is None:
            return {}
        evaluation = self.evaluator.evaluate(step)
        self.transcripts.add_evaluation(step, evaluation)
        return evaluation.metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.state.best = better(self.state.best, *self.cfg.compared_by, step, metrics)
        self.tracker.log(step, metrics, self.transcripts.pop(step))
        self.progress.update(step, metrics)
        if (divergence := self.checks.update(step, metrics)) is not None:
            raise self.recovery.diverged(divergence, self.checkpoints.store.steps())

    def _open_tracker(self) -> Tracker:
        cfg, run_ids = self.directory.cfg, self.state.run_ids
        run_dir, config, check = cfg.trainer.run_dir, redact(asdict(cfg)), self.directory.check
        tracker = Tracker(run_dir, cfg.logger, config, run_ids, check, self.server, self.recovery.restarted)
        # Without a checkpoint of its own, the run rewinds to before its first line: an earlier start may have died.
        tracker.rewind(self.state.step or -1)
        self.transcripts.rewind(self.state.step)
        return tracker

    def _open_progress(self) -> Progress:
        cfg, state, history = self.cfg, self.state, self.directory.metrics().having("val/")
        return Progress(cfg.total_steps, state.step, history, self.timer, cfg.task.shown)

    def _announce(self) -> None:
        t, resume, size = self.cfg.trainer, self.directory.resume, self.learner.ranks.size()
        LOG.info("run %s in %s: %s, %s, %s", t.run_name, t.run_dir, self.model_path, size, self.source)
        if resume is not None:
            origin = f"{'forked' if resume.restore.fork else 'resumed'} from {resume.checkpoint.path}"
            LOG.info("%s, step %d of %d", origin, self.state.step, self.cfg.total_steps)
        for note in self._notes_of_start():
            LOG.info("NOTE: %s", note)

    def _notes_of_start(self) -> Iterator[str]:
        """Yield what a user may not expect of the settings."""
        t, ranks, optimizer = self.cfg.trainer, self.learner.ranks, self.cfg.roles[0].optimizer
        if t.policy.lora.rank is not None and optimizer is not None and optimizer.lr < _LEAST_LR_OF_ADAPTERS:
            yield (
                f"{self.cfg.task.optimizer}.lr={optimizer.lr:g} is a learning rate for whole weights; adapters learn "
                "with ten times as much, such as 1e-5 or 1e-4"
            )
        saves = self.cfg.total_steps // t.ckpt_interval if isinstance(t.ckpt_interval, int) else 0
        size = saves * _BYTES_OF_A_PARAMETER * ranks.num_parameters[1] * len(ranks.saved_roles)
        if t.max_ckpts_to_keep < 0 and saves > 1 and size > _MUCH:
            yield (
                f"all {saves} checkpoints are kept, {format_size(size)} in the end; trainer.max_ckpts_to_keep=3 keeps "
                "the last three"
            )
