"""The central trainer: the algorithm, and what is saved and restored around it."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from trainer.algorithms import AdaptiveKL, FixedKL
from trainer.checkpoint.parts import json_part
from trainer.cluster.ranks import Ranks
from trainer.cluster.runtime import Cluster
from trainer.config import Config
from trainer.data.datasets import check_files, load_prompts
from trainer.data.rollouts import write_rollouts
from trainer.data.source import DrawnPrompt, PromptSource
from trainer.documents import Shape, is_count, is_number
from trainer.errors import NonFiniteError
from trainer.experience import (
    Rollouts,
    add_advantages,
    build_batch,
    choose_groups,
    correct_rollouts,
    describe,
    leave_out_rows,
    shape_rewards,
)
from trainer.failpoints import failpoint
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.launch import Rollout
from trainer.keyed import request_seed
from trainer.metrics.progress import Progress
from trainer.metrics.report import final_report
from trainer.metrics.throughput import model_flops, peak_flops
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import METRICS_FILE, Tracker, read_metrics
from trainer.models.export import PolicyExporter, export_target
from trainer.models.files import resolve_model_path
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.parallel.batching import Batch
from trainer.parallel.rng import capture_rng, restore_rng, rng_as_text, rng_from_text
from trainer.plugins import import_function
from trainer.rewards import resolve
from trainer.rewards.pool import RewardPool
from trainer.run.replay import ResumeAudit
from trainer.run.stopping import StopRequest
from trainer.run_directory import RunDirectory
from trainer.signals import SIGNALS
from trainer.supervised import check_cache, prepare_model

_STATE: dict[Any, Shape] = {
    "step": is_count,
    "counters": {"prompts": is_count, "samples": is_count, "tokens": is_count},
    "kl_controller": {"kind": str, "coef": is_number},
    "best": {str: is_number},
    "tracker": {"wandb_run_id": (str, NoneType)},
    "rng": {str: str},
}


class Trainer:
    """GRPO and PPO. They differ in the advantage estimator and in having a critic, nowhere else.

    Args:
        model_path: the start weights, a local directory or Hub id.
    """

    def __init__(self, cfg: Config, cluster: Cluster, directory: RunDirectory, model_path: str, stop: StopRequest):
        self.cfg = cfg
        self.step = 0  # the last finished step
        self.counters = {"prompts": 0, "samples": 0, "tokens": 0}
        self.best: dict[str, float] = {}
        self.tracker_state: dict[str, Any] = {}
        self.timer = Timer()
        a = cfg.algorithm
        adaptive = a.kl_controller == "adaptive"
        self.kl = AdaptiveKL(a.kl_coef, a.kl_target, a.kl_horizon) if adaptive else FixedKL(a.kl_coef)
        self.cluster = cluster
        self.directory = directory
        self.stop = stop
        self.audit: ResumeAudit | None = None

        self.model_path = resolve_model_path(model_path)
        # Their processes start, and import for many seconds, while this one reads the data.
        self.ranks = Ranks(cfg, cluster)
        self.rollout = Rollout(cfg, cluster, self.ranks, self.model_path)
        self.tokenizer = load_tokenizer(self.model_path, cfg.model.chat_template, cfg.model.trust_remote_code)
        self.stop_tokens = stop_token_ids(self.model_path, self.tokenizer)
        train = load_prompts(cfg.data, "train", self.tokenizer, cfg.rollout.max_prompt_tokens)
        self.dropped_prompts = train.dropped
        curriculum = import_function(cfg.data.curriculum, "data.curriculum") if cfg.data.curriculum else None
        self.source = PromptSource(train.prompts, cfg.trainer.seed, curriculum, cfg.data.curriculum or "")
        self.val_prompts = []
        if cfg.trainer.val_interval > 0:
            self.val_prompts = load_prompts(cfg.data, "val", self.tokenizer, cfg.rollout.max_prompt_tokens).prompts

        self.rewards = RewardPool(cfg.reward.name, cfg.reward.timeout_s, cfg.reward.num_processes)
        self.ranks.connect()
        self.ranks.build(self.model_path)
        self.exporter = PolicyExporter(
            self.ranks,
            self.model_path,
            self.tokenizer,
            cfg.model.trust_remote_code,
            adapter_alone=cfg.trainer.policy.lora.rank is not None and cfg.trainer.hf_save_lora == "adapter",
            fence=directory.claim.run_dir.check,
        )
        self._register_parts()

    # ---------------------------------------------------------------------------------------------------
    # The loop

    def fit(self) -> dict[str, float]:
        """Train up to `trainer.total_steps`; returns the metrics of the last step.

        Raises:
            Stopped: a signal or deadline asked for it; everything is saved.
            NotSavedError: the last save failed.
        """
        metrics: dict[str, float] = {}
        if self.directory.resume:
            self.load_checkpoint()
        with self.rewards, self._open_tracker() as self.tracker, self._open_progress() as self.progress:
            self._announce()
            self.rollout.start(version=self.step + 1, fresh=self.directory.resume is None)
            if self.step == 0 and self.cfg.trainer.val_before_train and self.val_prompts:
                self._log(0, self.validate(0))
            with SIGNALS.between_steps():
                while self.step < self.cfg.trainer.total_steps:
                    step = self.step + 1
                    with self.timer("step"):
                        rollouts = self.sample(step)
                        experience, metrics = self.score(rollouts)
                        metrics |= self.update(experience, step)
                        with self.timer("sync"):
                            self.rollout.sync_weights(version=step + 1)
                    self.commit(step, rollouts, experience, metrics)
                self._export_if_missing()
                self.directory.finish(self.progress.note)
        self.rollout.shutdown()
        return metrics

    def sample(self, step: int) -> Rollouts:
        """The step's prompts with `rollout.n` completions each, and their rewards.

        With dynamic sampling, prompts that teach nothing are passed over for the next ones. Those drawn beyond
        what the step needs come again in the next step.
        """
        wanted, n = self.cfg.trainer.train_batch_size, self.cfg.rollout.n
        dynamic = self.cfg.algorithm.dynamic_sampling
        batches = self.cfg.algorithm.max_sample_batches if dynamic else 1
        drawn: list[DrawnPrompt] = []
        completions: list[Completion] = []
        rewards, failures = np.zeros(0), 0
        for batch in range(1, batches + 1):
            prompts = self.source.take(wanted, skip=len(drawn))
            sampled = self.generate(prompts, step)
            with self.timer("reward"):
                more, failed = self._reward(sampled, [p.prompt.answer for p in prompts for _ in range(n)])
            drawn, completions, failures = drawn + prompts, completions + sampled, failures + failed
            rewards = np.concatenate([rewards, more])
            if not dynamic:
                metrics = {"reward/failures": failures}
                means = rewards.reshape(-1, n).mean(axis=1).tolist()
                return Rollouts(drawn, completions, rewards, drawn, means, metrics, self._baselines(drawn, step))
            chosen = choose_groups(rewards.reshape(-1, n), wanted, complete=batch == batches)
            if chosen is not None:
                break
        groups, used = chosen
        rows = [group * n + i for group in groups for i in range(n)]
        metrics = {"reward/failures": failures, "sampling/batches": batch, "sampling/filtered": used - len(groups)}
        prompts = [drawn[i] for i in groups]
        vain = int((np.ptp(rewards.reshape(-1, n)[groups], axis=1) == 0).sum())
        if vain:
            self.progress.note(f"WARNING: in {batch} batches, {wanted - vain} of the {wanted} prompts that step {step} "
                               "needs had completions of different rewards; the others teach nothing")  # fmt: skip
        baselines = self._baselines(prompts, step)
        means = rewards.reshape(-1, n).mean(axis=1)[:used].tolist()
        return Rollouts(prompts, [completions[i] for i in rows], rewards[rows], drawn[:used], means, metrics, baselines)

    def _baselines(self, prompts: list[DrawnPrompt], step: int) -> np.ndarray | None:
        """The reward of each prompt's greedy completion, once for each of its completions; for `remax` alone."""
        if self.cfg.algorithm.advantage_estimator != "remax":
            return None
        requests = [Request(p.prompt.token_ids, request_seed(self.cfg.trainer.seed, step, p.uid, -1)) for p in prompts]
        with self.timer("rollout"):
            greedy = self.rollout.generate(requests, self._sampling(0.0, 1.0, -1))
        with self.timer("reward"):
            rewards, _ = self._reward(greedy, [p.prompt.answer for p in prompts])
        return np.repeat(shape_rewards(rewards, greedy, self.cfg), self.cfg.rollout.n)

    def generate(self, prompts: list[DrawnPrompt], step: int) -> list[Completion]:
        """`rollout.n` completions a prompt, those of one prompt together."""
        r = self.cfg.rollout
        with self.timer("rollout"):
            requests = [
                Request(p.prompt.token_ids, request_seed(self.cfg.trainer.seed, step, p.uid, j))
                for p in prompts
                for j in range(r.n)
            ]
            return self.rollout.generate(requests, self._sampling(r.temperature, r.top_p, r.top_k))

    def score(self, rollouts: Rollouts) -> tuple[Batch, dict[str, float]]:
        """Old and reference log-probs, values and advantages: the step's experience."""
        batch = build_batch(rollouts.prompts, rollouts.completions)
        shape = batch["input_ids"].shape
        with self.timer("logprob"):
            stored = self.cluster.put({name: batch[name] for name in ("input_ids", "lengths")})
            batch["old_logprobs"] = self.ranks.logprobs("policy", stored, shape)
            if self.cfg.has_reference:
                batch["ref_logprobs"] = self.ranks.logprobs("reference", stored, shape)
            if self.cfg.has_critic:
                batch["values"] = self.ranks.values(stored, shape)
        completions, algorithm = rollouts.completions, self.cfg.algorithm
        rewards = shape_rewards(rollouts.rewards, completions, self.cfg)
        batch = add_advantages(batch, rewards, algorithm, self.kl.coef, rollouts.baselines)
        metrics = {**describe(batch, rollouts.rewards, completions), **rollouts.metrics}
        batch, corrected = correct_rollouts(batch, algorithm)
        metrics |= corrected
        if algorithm.kl_controller == "adaptive":
            metrics["policy/kl_coef"] = self.kl.coef
        return leave_out_rows(batch, rewards, completions, algorithm), metrics

    def update(self, experience: Batch, step: int) -> dict[str, float]:
        """Critic, then policy."""
        metrics: dict[str, float] = {}
        saving = self.directory.checkpoints.saving  # then the first optimizer step may have to wait for the copy
        with self.timer("update"):
            stored = self.cluster.put(experience)
            try:
                for role in self._trained_roles(step):
                    if role == "critic":
                        result = self.ranks.call("critic", "update", stored, step)
                    else:
                        shape = experience["input_ids"].shape
                        result, _ = self.ranks.update_policy(stored, shape, step, self.kl.coef)
                    metrics |= {f"{role}/{name}": value for name, value in result.items()}
            except NonFiniteError as error:
                raise self.directory.not_finite(step, error, self.progress.note) from error
        if saving:
            blocked = self.ranks.take_blocked()
            self.timer.add("checkpoint_blocked", blocked)
            self.directory.blocked(blocked)
        return metrics

    def _trained_roles(self, step: int) -> list[str]:
        warming_up = self.cfg.has_critic and step <= self.cfg.trainer.critic.warmup_steps
        return (["critic"] if self.cfg.has_critic else []) + ([] if warming_up else ["policy"])

    def commit(self, step: int, rollouts: Rollouts, experience: Batch, metrics: dict[str, float]) -> None:
        """The step is done: move the ledger, log, validate, save; leave, if that was asked for."""
        t = self.cfg.trainer
        self.step = step
        self.source.commit(rollouts.drawn, rollouts.drawn_rewards)
        if "policy/kl" in metrics:
            self.kl.update(metrics["policy/kl"], len(experience["lengths"]))
        tokens = int(experience["lengths"].sum())
        self.counters["prompts"] += len(rollouts.prompts)
        self.counters["samples"] += len(experience["lengths"])
        self.counters["tokens"] += tokens
        times = self.timer.take()
        metrics |= {f"progress/{name}": value for name, value in self.counters.items()}
        metrics |= {"progress/epoch": self.source.epoch, **times}
        metrics |= self._speed(tokens, len(experience["lengths"]), times["time/step"])
        last = step == t.total_steps
        if t.val_interval > 0 and (step % t.val_interval == 0 or last):
            metrics |= self.validate(step)
        if not self._replayed(step, metrics):
            return
        if self.cfg.reference_moves and step % self.cfg.algorithm.ref_update_interval == 0:
            self.ranks.call("reference", "refresh")
        if self.cfg.logger.rollouts:
            texts = self._texts(rollouts.completions)
            write_rollouts(t.run_dir, step, rollouts.prompts, rollouts.completions, rollouts.rewards.tolist(), texts,
                           self.directory.claim.run_dir.check)  # fmt: skip
        self._log(step, metrics)
        failpoint("logged")
        self.directory.report(self.progress.note)
        if t.hf_save_interval > 0 and (step % t.hf_save_interval == 0 or last):
            self.export(step)
        save = partial(self.save_checkpoint, step, metrics)
        with self.timer("checkpoint_blocked"):
            self.directory.end_of_step(step, t.total_steps, times["time/step"], self.stop, save, self.progress.note)

    def validate(self, step: int) -> dict[str, float]:
        """Greedy reward and accuracy (share of completions with reward 1) on held-out prompts, and pass@k."""
        prompts, k = self.val_prompts, self.cfg.rollout.val_n
        seed = self.cfg.trainer.seed
        greedy = self.rollout.generate(
            [Request(p.token_ids, request_seed(seed, step, f"val:{p.index}", 0)) for p in prompts],
            self._sampling(0.0, 1.0, -1),
        )
        rewards, _ = self._reward(greedy, [p.answer for p in prompts])
        metrics = {"val/reward/mean": float(rewards.mean()), "val/accuracy": float((rewards >= 1.0).mean())}
        for prompt, completion, reward in list(zip(prompts, greedy, rewards, strict=True))[: self.cfg.logger.samples]:
            text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            self.progress.note(f"  {_shorten(prompt.text)!r} -> {_shorten(text)!r}  reward {reward:.2f}")
        if k > 0:
            r = self.cfg.rollout
            requests = [
                Request(p.token_ids, request_seed(seed, step, f"val:{p.index}", 1 + j))
                for p in prompts
                for j in range(k)
            ]
            sampled = self.rollout.generate(requests, self._sampling(r.temperature or 1.0, r.top_p, r.top_k))
            scores, _ = self._reward(sampled, [p.answer for p in prompts for _ in range(k)])
            metrics["val/pass@k"] = float((scores.reshape(-1, k) >= 1.0).any(axis=1).mean())
        return metrics

    # ---------------------------------------------------------------------------------------------------
    # State

    def save_checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        """Begin to write `global_step_{step}`; training continues meanwhile."""
        self.tracker.flush()
        self.directory.save(step, metrics, self.ranks.saved_roles)

    def load_checkpoint(self) -> None:
        """Restore what the run directory says is to be restored; sets `step`."""
        self.audit = self.directory.load()

    def export(self, step: int) -> str:
        """Write the policy in Hugging Face format to `{export_path}/global_step_{step}/policy`; returns that."""
        target = export_target(self.cfg, step)
        self.exporter.export(target, self.cfg.rollout.dtype)
        self.progress.note(f"exported {target}")
        return target

    def _export_if_missing(self) -> None:
        """A run that was killed between its last checkpoint and its last export still owes it."""
        if self.cfg.trainer.hf_save_interval > 0 and not os.path.exists(export_target(self.cfg, self.step)):
            self.export(self.step)

    def _register_parts(self) -> None:
        register = self.directory.parts.append
        register(self.directory.config_part())
        register(self.directory.start_weights_part(self.model_path))
        register(json_part("trainer_state", self._state, self._restore, _STATE))
        register(json_part("data", self.source.state_dict, self.source.load_state_dict))
        register(self.directory.models_part(self.ranks))
        register(self.directory.assets_part(self.model_path, self.tokenizer, self.ranks))

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "counters": self.counters,
            "kl_controller": self.kl.state_dict(),
            "best": self.best,
            "tracker": self.tracker.state_dict(),
            "weight_version": self.step + 1,
            "rng": rng_as_text(capture_rng()),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.counters = state["counters"]
        self.best = state["best"]
        self.kl.load_state_dict(state["kl_controller"])
        self.tracker_state = {} if self.directory.resume.fork else state["tracker"]
        restore_rng(rng_from_text(state["rng"]))

    # ---------------------------------------------------------------------------------------------------
    # Helpers

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self.stop_tokens)

    def _reward(self, completions: list[Completion], answers: list[str]) -> tuple[np.ndarray, int]:
        rewards, failures = self.rewards.score(self._texts(completions), answers)
        return np.asarray(rewards, dtype=np.float64), failures.count

    def _texts(self, completions: list[Completion]) -> list[str]:
        return self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)

    def _open_tracker(self) -> Tracker:
        cfg = self.cfg
        tracker = Tracker(cfg.trainer.run_dir, cfg.logger, cfg.trainer.run_name, dataclasses.asdict(cfg),
                          self.tracker_state.get("wandb_run_id"))  # fmt: skip
        # A run that starts from scratch, or with the weights of another run, rewinds to before its first line: an
        # earlier start may have died before its first checkpoint.
        tracker.rewind(self.step or -1)
        return tracker

    def _open_progress(self) -> Progress:
        t = self.cfg.trainer
        history = read_metrics(os.path.join(t.run_dir, METRICS_FILE))
        return Progress(t.total_steps, self.cfg.logger.progress, completed=self.step, history=history, timer=self.timer)

    def _announce(self) -> None:
        cfg, note = self.cfg, self.progress.note
        total, trained = self.ranks.num_parameters
        adapters = f" ({trained:,} of them adapters)" if trained < total else ""
        note(f"run {cfg.trainer.run_name} in {cfg.trainer.run_dir}: {self.model_path}, {total:,} parameters{adapters}, "
             f"{len(self.source.prompts):,} prompts, {cfg.trainer.num_workers} rank(s), "
             f"{cfg.rollout.num_engines} {cfg.rollout.engine} engine(s)")  # fmt: skip
        if self.dropped_prompts:
            note(f"{self.dropped_prompts} prompts are longer than rollout.max_prompt_tokens="
                 f"{cfg.rollout.max_prompt_tokens} and were dropped")  # fmt: skip
        self.directory.report(note)
        if resume := self.directory.resume:
            what = "forked from" if resume.fork else "resumed from"
            note(f"{what} {resume.path}, step {self.step} of {cfg.trainer.total_steps}")

    def _replayed(self, step: int, metrics: dict[str, float]) -> bool:
        """Hold a replayed step against what was logged; False: the run went back one checkpoint more.

        Raises:
            UserError: it differs, and `trainer.on_resume_mismatch=stop`.
        """
        problem = self.audit.check(step, metrics) if self.audit else None
        if problem is None or self.directory.accept(problem, self.progress.note):
            return True
        self.load_checkpoint()
        self.tracker.rewind(self.step)
        self.rollout.sync_weights(version=self.step + 1)
        self.directory.report(self.progress.note)
        return False

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        accuracy = metrics.get("val/accuracy")
        if accuracy is not None and accuracy > self.best.get("val/accuracy", -math.inf):
            self.best = {"val/accuracy": accuracy, "step": step}
        self.tracker.log(step, metrics)
        self.progress.update(step, metrics)

    def _speed(self, tokens: int, samples: int, seconds: float) -> dict[str, float]:
        metrics = {"perf/tokens_per_s": tokens / seconds, "perf/samples_per_s": samples / seconds}
        peak = peak_flops(self.ranks.device_name)
        if peak:
            flops = model_flops(tokens, *self.ranks.num_parameters, self.cfg.trainer.update_epochs)
            metrics["perf/mfu"] = flops / seconds / (peak * self.cfg.trainer.num_workers)
        return metrics


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def check_inputs(cfg: Config) -> None:
    """Find what the user must mend before anything expensive starts.

    Raises:
        UserError: the reward, a function of the user's, the data or the model cannot be used as the config says.
    """
    resolve(cfg.reward.name)
    if cfg.data.curriculum is not None:
        import_function(cfg.data.curriculum, "data.curriculum")
    check_files(cfg.data, validation=cfg.trainer.val_interval > 0)
    if cfg.model.path is not None:
        load_tokenizer(resolve_model_path(cfg.model.path), cfg.model.chat_template, cfg.model.trust_remote_code)
    else:
        check_cache(cfg)


def run(cfg: Config, device: str) -> None:
    """One job: start the cluster, make the start weights if needed, train, report."""
    check_inputs(cfg)
    t = cfg.trainer
    stop = StopRequest(t.stop_at)
    with RunDirectory(cfg).open() as directory:
        if _is_finished(cfg, directory):
            print(f"finished step {t.total_steps} of {t.total_steps} before; nothing is left to do in {t.run_dir}")
            return
        with Cluster(cfg, device) as cluster, directory.settling():
            trainer = Trainer(cfg, cluster, directory, prepare_model(cfg, cluster, stop), stop)
            trainer.fit()
    best = trainer.best.get("val/accuracy")
    print(f"finished step {trainer.step} of {t.total_steps}"
          + (f", best val/accuracy {best:.3f} at step {trainer.best['step']}" if best is not None else ""))  # fmt: skip
    if cfg.logger.plot:
        print(final_report(t.run_dir))
    sys.stdout.flush()


def _is_finished(cfg: Config, directory: RunDirectory) -> bool:
    """All steps are committed and exported: restarting the command changes nothing."""
    t, resume = cfg.trainer, directory.resume
    if resume is None or resume.fork or resume.step < t.total_steps:
        return False
    return t.hf_save_interval < 1 or os.path.exists(export_target(cfg, resume.step))
