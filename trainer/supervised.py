"""Supervised training on chats or rollouts: the warm start of the embedded model, or a run of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from functools import partial
from types import NoneType
from typing import Any

from trainer.checkpoint.lock import NAME as LOCK_NAME
from trainer.checkpoint.parts import json_part
from trainer.cluster.ranks import Ranks
from trainer.cluster.runtime import Cluster
from trainer.config import AlgorithmConfig, Config, CriticConfig, TrainerConfig
from trainer.data.datasets import check_files
from trainer.data.sft import PackedSource, as_batch, load_train, load_val
from trainer.documents import Shape, is_count
from trainer.errors import NonFiniteError, UserError
from trainer.keyed import key
from trainer.metrics.progress import Progress
from trainer.metrics.report import final_report
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import METRICS_FILE, Tracker, read_metrics
from trainer.models.export import PolicyExporter, export_target
from trainer.models.files import load_config, resolve_model_path
from trainer.models.tokenizer import load_tokenizer
from trainer.run import record
from trainer.run.replay import ResumeAudit
from trainer.run.stopping import StopRequest
from trainer.run_directory import RunDirectory
from trainer.signals import SIGNALS

_SFT_METRICS = ("loss", "kl", "clip_frac")


class SupervisedTrainer:
    """`sft.steps` optimizer steps of cross-entropy, with the ledger and the checkpoints of any other run."""

    def __init__(self, cfg: Config, cluster: Cluster, directory: RunDirectory, model_path: str, stop: StopRequest):
        # One role: neither a critic nor a reference takes part.
        self.cfg = cfg = dataclasses.replace(cfg, algorithm=AlgorithmConfig())
        t = cfg.trainer
        self.cluster = cluster
        self.directory = directory
        self.stop = stop
        self.step = 0
        self.tracker_state: dict = {}
        self.audit: ResumeAudit | None = None
        self.model_path = resolve_model_path(model_path)
        self.tokenizer = load_tokenizer(self.model_path, cfg.model.chat_template, cfg.model.trust_remote_code)
        s, pad = cfg.sft, self.tokenizer.pad_token_id
        vocab_size = load_config(cfg.model, self.model_path).get_text_config().vocab_size
        parts = load_train(cfg.data, s, self.tokenizer, vocab_size)
        self.source = PackedSource(parts, s.weights, t.seed, s.batch_size, s.max_length, pad)
        self.val_batch = None
        if t.val_interval > 0:
            self.val_batch = as_batch(load_val(cfg.data, s, self.tokenizer), pad)
        self.ranks = Ranks(as_policy_training(cfg), cluster)
        self.ranks.connect()
        self.ranks.build(self.model_path)
        register = directory.parts.append
        register(directory.config_part())
        register(directory.start_weights_part(self.model_path))
        state: dict[Any, Shape] = {"step": is_count, "tracker": {"wandb_run_id": (str, NoneType)}}
        register(json_part("trainer_state", self._state, self._restore, state))
        register(json_part("data", self.source.state_dict, self.source.load_state_dict))
        register(directory.models_part(self.ranks))
        register(directory.assets_part(self.model_path, self.tokenizer, self.ranks))

    def fit(self) -> None:
        """Train up to `sft.steps`.

        Raises:
            Stopped: a signal or deadline asked for it; everything is saved.
            NotSavedError: the last save failed.
        """
        cfg, t = self.cfg, self.cfg.trainer
        if self.directory.resume:
            self.load_checkpoint()
        with Tracker(
            t.run_dir, cfg.logger, t.run_name, dataclasses.asdict(cfg), self.tracker_state.get("wandb_run_id")
        ) as self.tracker:
            self.tracker.rewind(self.step or -1)
            history = read_metrics(os.path.join(t.run_dir, METRICS_FILE))
            with Progress(cfg.sft.steps, cfg.logger.progress, completed=self.step, history=history) as progress:
                self.directory.report(progress.note)
                with SIGNALS.between_steps():
                    self._steps(progress)
                self.directory.finish(progress.note)

    def _steps(self, progress: Progress) -> None:
        t, steps = self.cfg.trainer, self.cfg.sft.steps
        timer = Timer()
        while self.step < steps:
            step = self.step + 1
            with timer("step"):
                batch = self.source.take()
                try:
                    result, _ = self.ranks.update_policy(
                        self.cluster.put(batch), batch["input_ids"].shape, step, kl_coef=0.0
                    )
                except NonFiniteError as error:
                    raise self.directory.not_finite(step, error, progress.note) from error
            self.step = step
            self.source.commit()
            metrics = {
                f"{'sft' if name in _SFT_METRICS else 'policy'}/{name}": x
                for name, x in result.items()
                if name != "entropy"
            }
            metrics |= {"progress/epoch": self.source.epoch, **timer.take()}
            metrics["perf/tokens_per_s"] = int(batch["lengths"].sum()) / metrics["time/step"]
            if self.val_batch is not None and (step % t.val_interval == 0 or step == steps):
                metrics["val/loss"] = self.ranks.call("policy", "loss", self.cluster.put(self.val_batch))
            problem = self.audit.check(step, metrics) if self.audit else None
            if problem and not self.directory.accept(problem, progress.note):
                self.load_checkpoint()
                self.tracker.rewind(self.step)
                self.directory.report(progress.note)
                continue
            self.tracker.log(step, metrics)
            progress.update(step, metrics)
            self.directory.report(progress.note)
            save = partial(self.save_checkpoint, step, metrics)
            with timer("checkpoint_blocked"):
                self.directory.end_of_step(step, steps, metrics["time/step"], self.stop, save, progress.note)

    def save_checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        """Begin to write `global_step_{step}`; training continues meanwhile."""
        self.tracker.flush()
        self.directory.save(step, metrics, ["policy"])

    def load_checkpoint(self) -> None:
        """Restore what the run directory says is to be restored; sets `step`."""
        self.audit = self.directory.load()

    def export(self, target: str) -> None:
        """Write the model in Hugging Face format to the directory `target`, whole or not at all."""
        cfg = self.cfg
        adapter_alone = cfg.trainer.policy.lora.rank is not None and cfg.trainer.hf_save_lora == "adapter"
        fence = self.directory.claim.run_dir.check
        exporter = PolicyExporter(
            self.ranks, self.model_path, self.tokenizer, cfg.model.trust_remote_code, adapter_alone, fence
        )
        exporter.export(target, "float32")

    def close(self) -> None:
        """Give the ranks' place back."""
        self.cluster.release(self.ranks.policy)

    def _state(self) -> dict:
        return {"step": self.step, "tracker": self.tracker.state_dict()}

    def _restore(self, state: dict) -> None:
        assert self.directory.resume is not None
        self.step = state["step"]
        self.tracker_state = {} if self.directory.resume.fork else state["tracker"]


def as_policy_training(cfg: Config) -> Config:
    """`cfg` for the ranks: a supervised step is an update of the policy with advantage 1 and one mini-batch."""
    s, t = cfg.sft, cfg.trainer
    loss = "reinforce" if s.max_weight is None else "importance_weighted_ce"
    policy = dataclasses.replace(t.policy, optimizer=s.optimizer)
    trainer = dataclasses.replace(t, policy=policy, critic=CriticConfig(), total_steps=s.steps, train_batch_size=1,
                                  mini_batch_size=1, update_epochs=1)  # fmt: skip
    return dataclasses.replace(
        cfg,
        trainer=trainer,
        algorithm=AlgorithmConfig(policy_loss=loss, max_weight=s.max_weight),
        rollout=dataclasses.replace(cfg.rollout, temperature=1.0),
    )


def check_cache(cfg: Config) -> None:
    """Check that the embedded model is there, or can be made.

    Raises:
        UserError: `model.cache_dir` cannot be written.
    """
    if os.path.exists(os.path.join(_cached_model(cfg), "config.json")):
        return
    try:
        os.makedirs(cfg.model.cache_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=cfg.model.cache_dir):
            pass
    except OSError as error:
        raise UserError(
            f"model.cache_dir={cfg.model.cache_dir}: the embedded model is made there, and it cannot be "
            f"written ({error.strerror}); choose another, for example with the environment variable "
            "TRAINER_CACHE, or give model.path"
        ) from error


def _cached_model(cfg: Config) -> str:
    recipe = {
        "tiny": dataclasses.asdict(cfg.model.tiny),
        "sft": dataclasses.asdict(cfg.sft),
        "data": dataclasses.asdict(cfg.data),
    }
    return os.path.join(cfg.model.cache_dir, f"tiny-{key(json.dumps(recipe, sort_keys=True)):016x}")


def prepare_model(cfg: Config, cluster: Cluster, stop: StopRequest) -> str:
    """The start weights' path: `model.path`, or the embedded model, built and warm-started once per config."""
    if cfg.model.path is not None:
        return cfg.model.path
    target = _cached_model(cfg)
    if os.path.exists(os.path.join(target, "config.json")):
        return target
    # A run of its own, resumed if it was killed. Its name holds no process id: the restart must find it.
    run_dir = f"{target}.run"
    warm_start = dataclasses.replace(
        cfg,
        trainer=dataclasses.replace(
            TrainerConfig(), seed=cfg.model.tiny.seed, run_name="warm-start", run_dir=run_dir,
            ckpt_path=os.path.join(run_dir, "checkpoints"), ckpt_interval=50, max_ckpts_to_keep=1,
            resume_mode="latest", val_interval=-1, num_workers=cfg.trainer.num_workers, replicas=cfg.trainer.replicas,
            device=cfg.trainer.device, master_port=cfg.trainer.master_port,
        ),
        logger=dataclasses.replace(cfg.logger, wandb=dataclasses.replace(cfg.logger.wandb, mode="off")),
    )  # fmt: skip
    # Another job may be making the same model: then this one waits, and takes it.
    with RunDirectory(warm_start, supervised=True).open(wait=True) as directory:
        if not os.path.exists(os.path.join(target, "config.json")):
            start = os.path.join(run_dir, "start")
            from trainer.models.tiny import build_tiny  # imports the model classes, which a cached model spares us

            build_tiny(cfg.model.tiny, start)
            steps = cfg.sft.steps
            print(f"warm start of the embedded model: {steps} supervised steps, once for this config", flush=True)
            trainer = SupervisedTrainer(warm_start, cluster, directory, start, stop)
            trainer.fit()
            trainer.export(target)
            trainer.close()
        _delete_run(run_dir)  # while it is ours: the next job that holds the lock looks into it
    with contextlib.suppress(OSError):  # a job that waited for the lock has its own there now, and will remove it
        os.rmdir(run_dir)
    return target


def _delete_run(run_dir: str) -> None:
    record.remove(run_dir)  # first: a run that has committed checkpoints is refused without them
    for entry in list(os.scandir(run_dir)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif not entry.name.startswith(LOCK_NAME):
            os.remove(entry.path)


def run(cfg: Config, device: str) -> None:
    """A supervised run: from `model.path`, or from the embedded model with random weights."""
    t = cfg.trainer
    stop = StopRequest(t.stop_at)
    check_files(cfg.data, cfg.sft.source == "examples", validation=t.val_interval > 0)
    with RunDirectory(cfg, supervised=True).open() as directory:
        resume = directory.resume
        done = resume is not None and not resume.fork and resume.step >= cfg.sft.steps
        if done and os.path.exists(export_target(cfg, resume.step)):
            print(f"finished step {resume.step} of {cfg.sft.steps} before; nothing is left to do in {t.run_dir}")
            return
        path = cfg.model.path
        if path is None:
            from trainer.models.tiny import build_tiny

            path = os.path.join(t.run_dir, "start")
            build_tiny(cfg.model.tiny, path)
        with Cluster(cfg, device) as cluster, directory.settling():
            trainer = SupervisedTrainer(cfg, cluster, directory, path, stop)
            trainer.fit()
            target = export_target(cfg, trainer.step)
            trainer.export(target)
    print(f"finished supervised step {trainer.step} of {cfg.sft.steps}; model: {target}")
    if cfg.logger.plot:
        print(final_report(t.run_dir))
