"""What a run keeps on disk, and how it comes back: locks, checkpoints, metrics. RL and supervised runs alike."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import parts as saved_parts
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import Checkpoint
from trainer.checkpoint.parts import Part, Restore
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.store import LocalStore, step_in
from trainer.config import RESUME_LOAD, Config
from trainer.durable import digest_bytes
from trainer.errors import NonFiniteError, NotSavedError, UserError
from trainer.metrics.tracker import CUT_FILE, METRICS_FILE, check_lines, first_step
from trainer.run import compatibility, lineage, record
from trainer.run.claim import Claim
from trainer.run.replay import ResumeAudit
from trainer.run.schedule import SaveSchedule
from trainer.run.stopping import StopRequest
from trainer.signals import Stopped

if TYPE_CHECKING:
    from trainer.cluster.ranks import Ranks

Note = Callable[[str], None]
_SETTLE_S = 60.0
_LAST_SAVE_TRIES = 4


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where a run comes from."""

    checkpoint: Checkpoint
    """The checkpoint to load."""
    fork: bool
    """Of another run: what is loaded starts a new run here."""

    @property
    def path(self) -> str:
        return self.checkpoint.path

    @property
    def step(self) -> int:
        return self.checkpoint.step


class RunDirectory:
    """A run's directory, held by this process from `open` to `close`.

    Args:
        cfg: `trainer.run_dir` and `ckpt_path` say where it is.
        supervised: of a supervised run, to which much of the config means nothing.
    """

    def __init__(self, cfg: Config, supervised: bool = False):
        self.cfg = cfg
        self._supervised = supervised
        t = cfg.trainer
        self.claim = Claim(t.run_dir, t.ckpt_path, t.lock_timeout_s)
        retention = Retention(t.max_ckpts_to_keep, t.keep_every, t.keep_best, t.best_mode, t.best_metric)
        self.parts: list[Part] = []
        self.checkpoints = CheckpointManager(
            LocalStore(t.ckpt_path),
            retention,
            t.verify_checkpoint,
            fence=self.claim.check,
            committed=lambda step: record.write(t.run_dir, step, t.ckpt_path),
        )
        self.schedule = SaveSchedule(t.ckpt_interval, t.ckpt_interval_minutes, t.mean_time_between_failures)
        self._metrics_file = os.path.join(t.run_dir, METRICS_FILE)
        self.resume: Resume | None = None
        self.last_checkpoint = ""
        self.last_save_s = 0.0
        self.lineage: dict[str, Any] = {}
        self.notes: list[str] = []  # of what happened before there was anybody to tell
        self._saved_step = -1
        self._failures = 0
        self._failure = ""
        self._blocked = 0.0
        self.added_steps: dict[str, int] = {}
        self._same_rounding = self._same_run = True

    # ---------------------------------------------------------------------------------------------------
    # Start

    def open(self, wait: bool = False) -> RunDirectory:
        """Take the locks, clear away what a killed run left, and find the checkpoint to continue from.

        Args:
            wait: when another job runs here, wait for its end.

        Raises:
            UserError: another job runs here; the directory holds a run and nothing was said about resuming;
                checkpoints cannot be written, or those of this run are gone; the checkpoint cannot be used, or not
                under this config; `metrics.jsonl` is not what the run has logged.
        """
        try:
            self.claim.acquire(wait)
            self.checkpoints.clean_up()
            self.resume = self._find_resume()
            if self.resume is not None:
                self.notes += self._check_config(self.resume)
                self._complete_record(self.resume)
            self._check_metrics()
        except BaseException:
            self.close()
            raise
        return self

    def _complete_record(self, resume: Resume) -> None:
        """Record the commit that was found, where a kill came between the two, or an older version kept no record."""
        t = self.cfg.trainer
        if not (resume.fork or record.exists(t.run_dir)):
            record.write(t.run_dir, resume.step, t.ckpt_path)

    def _check_metrics(self) -> None:
        """Check that `metrics.jsonl` has what the run had logged when it saved the checkpoint."""
        if self.resume is None:
            if (first := first_step(self._metrics_file)) is not None:
                self.notes.append(
                    f"an earlier start logged steps from {first} on and committed no checkpoint: training starts "
                    f"again, and these lines are kept in {CUT_FILE}"
                )
        elif not self.resume.fork:
            first = self.resume.checkpoint.manifest.get("metrics_from")
            check_lines(self._metrics_file, first, self.resume.step)

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """If the block fails, let a save that is under way end while the ranks still live: its state is good."""
        try:
            yield
        except (Exception, Stopped):
            self.checkpoints.wait(_SETTLE_S)
            raise

    def close(self) -> None:
        """Give the locks back."""
        self.claim.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_resume(self) -> Resume | None:
        t = self.cfg.trainer
        self.lineage = lineage.read(t.run_dir)
        holds_run = bool(self.checkpoints.steps()) or os.path.exists(self._metrics_file) or record.exists(t.run_dir)
        if t.resume_mode in (None, "none"):
            if holds_run:
                raise UserError(f"trainer.run_dir={t.run_dir}: already holds a run; continue it with "
                                "trainer.resume_mode=latest, or choose another trainer.run_name")  # fmt: skip
            return None
        if t.resume_mode == "latest":
            return self._newest()
        assert t.resume_path is not None
        path = os.path.abspath(t.resume_path)
        if step_in(path) is None:
            raise UserError(f"trainer.resume_path={t.resume_path}: must be a global_step_N directory")
        if os.path.realpath(os.path.dirname(path)) == os.path.realpath(self.checkpoints.store.root):
            return self._own(path)
        if self.lineage:
            if self.lineage["forked_from"] != path:
                raise UserError(f"trainer.run_dir={t.run_dir}: holds a fork of {self.lineage['forked_from']}; choose "
                                "another trainer.run_name, or trainer.resume_mode=latest")  # fmt: skip
            newest = self._newest()
            if newest is not None:
                return newest
        elif holds_run:
            raise UserError(f"trainer.run_dir={t.run_dir}: already holds a run that is no fork; choose another "
                            "trainer.run_name, or continue it with trainer.resume_mode=latest")  # fmt: skip
        checkpoint = manifests.verify(path, t.verify_checkpoint)  # never another one in its place
        self.lineage = lineage.write(t.run_dir, checkpoint)
        return Resume(checkpoint, fork=True)

    def _newest(self, before: int | None = None) -> Resume | None:
        found = self.checkpoints.latest(before)
        if found is not None:
            return Resume(found, fork=False)
        if before is None:
            record.check_nothing_committed(self.cfg.trainer.run_dir, self.cfg.trainer.ckpt_path)
        return None

    def _own(self, path: str) -> Resume:
        checkpoint = manifests.verify(path, self.cfg.trainer.verify_checkpoint)
        step = checkpoint.step
        newer = [other for other in self.checkpoints.steps() if other > step]
        if newer:
            raise UserError(
                f"trainer.resume_path={path}: this run has a newer checkpoint, global_step_{newer[-1]}; go back with "
                f"`python -m trainer.checkpoint rollback {self.checkpoints.store.root} --to {step}`, or fork into "
                "another trainer.run_name"
            )
        return Resume(checkpoint, fork=False)

    def _check_config(self, resume: Resume) -> list[str]:
        cfg = self.cfg
        saved = saved_parts.read_config(resume.checkpoint)
        found = compatibility.changes(saved, dataclasses.asdict(cfg), dataclasses.asdict(Config()))
        restored = set(cfg.trainer.resume_load or RESUME_LOAD) if resume.fork else set(RESUME_LOAD)
        if not restored & {"optimizer", "data", "state"}:  # weights are weights, whatever is done with them
            found = [change for change in found if change.key.startswith("model.") or ".lora." in change.key]
        if "weights" not in restored:
            found = [change for change in found if ".lora." not in change.key]
        saved_critic = saved.get("algorithm", {}).get("advantage_estimator") == "gae"
        if not (saved_critic and cfg.has_critic):  # nothing of a critic is restored
            found = [change for change in found if not change.key.startswith("trainer.critic.")]
        permitted = compatibility.check(
            found,
            cfg.trainer.allow_config_change,
            compatibility.meaningless(cfg, self._supervised),
            saved_critic != cfg.has_critic,
            compatibility.impossible(cfg, saved, restored),
        )
        self.added_steps = {} if self._supervised else compatibility.added_steps(found, cfg.trainer, resume.step)
        keys = [change.key for change in found]
        self._same_rounding = not any(compatibility.matches(key, compatibility.ROUNDING) for key in keys)
        self._same_run = not permitted and not any(compatibility.matches(key, compatibility.VALIDATION) for key in keys)
        shown = [str(change) for change in found if not change.key.startswith(("trainer.resume_", "trainer.allow_"))]
        return [f"config changed since the checkpoint: {change}" for change in shown]

    # ---------------------------------------------------------------------------------------------------
    # Restore

    def config_part(self) -> Part:
        """The resolved config."""
        return saved_parts.config_part(self.cfg)

    def models_part(self, ranks: Ranks) -> Part:
        """The part that the ranks write."""
        return saved_parts.models_part(ranks)

    def assets_part(self, model_path: str, tokenizer: Any, ranks: Ranks) -> Part:
        """The policy's config and tokenizer, and its adapters' config."""
        adapted = self.cfg.trainer.policy.lora.rank is not None
        config = partial(ranks.call_one, "policy", "adapter_config", model_path) if adapted else None
        return saved_parts.assets_part(model_path, tokenizer, self.cfg.model.trust_remote_code, config)

    def start_weights_part(self, model_path: str) -> Part:
        """A fingerprint of the weights that the run began with."""
        return saved_parts.start_weights_part(self.cfg, model_path)

    @property
    def restored(self) -> set[str]:
        """What is taken over from the checkpoint, of `RESUME_LOAD`."""
        chosen = self.cfg.trainer.resume_load
        return set(chosen) if chosen and self.resume is not None and self.resume.fork else set(RESUME_LOAD)

    def load(self) -> ResumeAudit | None:
        """Restore the registered parts from `resume`; returns what will watch the steps that follow."""
        assert self.resume is not None
        t = self.cfg.trainer
        restore = Restore(frozenset(self.restored), self.resume.fork, self.added_steps)
        chosen = restore.chosen(self.parts, self.resume.checkpoint)
        self.checkpoints.load(self.resume.checkpoint, chosen, restore)
        if not self.resume.fork:
            # They lie beyond the point to which the run went back; replaying will write them again.
            self.checkpoints.set_aside(after=self.resume.step)
        self.last_checkpoint = self.resume.path
        if self.resume.fork:
            return None
        if not self._same_run:
            self.notes.append("replayed steps are not compared with what was logged, since the config has changed")
        return ResumeAudit(t.run_dir, self.resume.step, t.resume_tolerance, self._same_rounding, self._same_run)

    def accept(self, problem: str, note: Callable[[str], None]) -> bool:
        """What is to be done about a replayed step that differs from what was logged; False: the checkpoint before
        the one that was resumed from has taken its place, and is to be loaded.

        Raises:
            UserError: the run is to stop, or has no checkpoint to fall back to.
        """
        assert self.resume is not None
        choice = self.cfg.trainer.on_resume_mismatch
        if choice == "stop":
            raise UserError(f"trainer.on_resume_mismatch=stop: resumed from {self.resume.path}, but {problem}")
        note(f"WARNING: resumed from {self.resume.path}, but {problem}")
        if choice == "warn":
            return True
        self._fall_back()
        note(f"going back to {self.resume.path}, step {self.resume.step}")
        return False

    def not_finite(self, step: int, error: NonFiniteError, note: Callable[[str], None]) -> UserError:
        """What to tell the user, once the state before this step, which is good, is safe."""
        self.finish(note)
        kept = (
            f"the last good checkpoint is {self.last_checkpoint}"
            if self.last_checkpoint
            else "there is no checkpoint yet"
        )
        optimizer = "sft.optimizer" if self._supervised else "trainer.policy.optimizer"
        return UserError(f"step {step}: {error}; nothing was overwritten, {kept}. A lower {optimizer}.lr or "
                         f"{optimizer}.max_grad_norm may help.")  # fmt: skip

    def _fall_back(self) -> None:
        assert self.resume is not None
        self.checkpoints.wait()  # a save of the steps that are given up must not appear after they were put aside
        before = self._newest(before=self.resume.step)
        if before is None:
            raise UserError(f"trainer.on_resume_mismatch=fallback: there is no checkpoint before {self.resume.path}")
        self.notes += self._check_config(before)  # it may be older than a change that was allowed once
        self.resume = before

    # ---------------------------------------------------------------------------------------------------
    # Save

    @property
    def saves(self) -> bool:
        t = self.cfg.trainer
        return t.ckpt_interval != -1 or t.ckpt_interval_minutes > 0

    def save(self, step: int, metrics: dict[str, float], roles: list[str]) -> None:
        """Begin to save `global_step_{step}`; with `trainer.ckpt_async=false`, also end it."""
        t = self.cfg.trainer
        if self._saved_step == step:
            return
        started = time.monotonic()
        score = metrics.get(t.best_metric)
        self.checkpoints.save(step, self.parts, {
            "roles": roles,
            "ranks": t.num_workers,
            "replicas": t.replicas,
            "config_digest": digest_bytes(saved_parts.config_yaml(self.cfg)),
            "score_metric": t.best_metric,
            "score": score if score is not None and math.isfinite(score) else None,
            "parent": self.lineage or None,
            "metrics_from": first_step(self._metrics_file),
        })  # fmt: skip
        if not t.ckpt_async:
            self.checkpoints.wait()
        self._saved_step = step
        self._blocked = time.monotonic() - started
        self.schedule.saved()

    def end_of_step(self, step: int, total: int, seconds: float, stop: StopRequest, save: Callable[[], None],
                    note: Note) -> None:  # fmt: skip
        """Save if it is due, and leave if that was asked for.

        Args:
            seconds: that the step took.
            save: saves this step.

        Raises:
            Stopped: a signal or deadline asked for it; everything is saved.
            NotSavedError: the run ends here, and its last save failed.
        """
        stop.consider_deadline(2 * seconds + 2 * self.last_save_s + 5)
        last = step == total
        stopping = stop.reason is not None and not last
        if stopping or last and self.saves:
            self._save_last(step, save, note)
        elif self.saves and self.schedule.due(step):
            save()
        if stopping:
            raise Stopped(f"stopped after step {step} of {total} ({stop.reason}); the same command with "
                          "trainer.resume_mode=latest continues the run")  # fmt: skip

    def _save_last(self, step: int, save: Callable[[], None], note: Note) -> None:
        """Save the last state of this process, and wait until it is committed; try again if that fails.

        Raises:
            NotSavedError: every try failed.
        """
        import tenacity  # seldom needed, and slow to import

        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NotSavedError),
            stop=tenacity.stop_after_attempt(_LAST_SAVE_TRIES),
            wait=tenacity.wait_exponential(multiplier=0.5),
            reraise=True,
        ):
            with attempt:
                save()
                self.checkpoints.wait()
                self.report(note, last=True)
                if self._saved_step != step:
                    raise NotSavedError(
                        f"step {step} is trained but not saved: trainer.ckpt_path={self.cfg.trainer.ckpt_path}: "
                        f"{self._failure}; the last good checkpoint is {self.last_checkpoint or 'none yet'}. Repair "
                        "that, then give the same command with trainer.resume_mode=latest: it trains again what is "
                        "not saved."
                    )

    def blocked(self, seconds: float) -> None:
        """Training has stood still this long for the save that is under way."""
        self._blocked += seconds

    def report(self, note: Note, last: bool = False) -> None:
        """Tell how saves have ended.

        Args:
            last: of the last save of this process, which is tried again whatever has failed before.

        Raises:
            UserError: more of them failed in a row than `trainer.ckpt_failures_allowed`.
        """
        for message in self.notes:
            note(message)
        self.notes.clear()
        for outcome in self.checkpoints.outcomes():
            if outcome.error is None:
                self._failures = 0
                self.last_checkpoint = outcome.path
                self.last_save_s = outcome.seconds
                self.schedule.measured(self._blocked, outcome.seconds)
                continue
            self._failures += 1
            self._failure = outcome.error
            if self._saved_step == outcome.step:
                self._saved_step = -1
            known = self.last_checkpoint or "none yet"
            allowed = self.cfg.trainer.ckpt_failures_allowed
            message = f"the checkpoint of step {outcome.step} FAILED ({outcome.error}); the last good one is {known}"
            if self._failures > allowed and not last:
                raise UserError(f"trainer.ckpt_path={self.cfg.trainer.ckpt_path}: {message}; {self._failures} failed "
                                f"in a row, trainer.ckpt_failures_allowed={allowed}")  # fmt: skip
            note(f"WARNING: {message}" + ("" if last else "; training continues"))

    def finish(self, note: Note) -> None:
        """Wait for the save that is under way and tell how it ended."""
        self.checkpoints.wait()
        self.report(note)
