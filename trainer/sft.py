"""Supervised training on prompts and answers: the warm start of the embedded model, or a run of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

from trainer.checkpoint.manager import CheckpointManager, Part, json_part
from trainer.cluster.ranks import Ranks
from trainer.cluster.runtime import Cluster
from trainer.config import AlgorithmConfig, Config
from trainer.data.sft import PackedBatches, load_encoded
from trainer.errors import UserError
from trainer.keyed import key
from trainer.metrics.progress import Progress
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import METRICS_FILE, Tracker, read_metrics
from trainer.models.files import resolve_model_path, write_assets
from trainer.models.tokenizer import load_tokenizer


class SupervisedTrainer:
    """`sft.steps` optimizer steps of cross-entropy on answers, with the checkpoints of any other run.

    Step N trains on a batch that is a function of (seed, N), so the step number is the whole ledger.
    """

    def __init__(self, cfg: Config, cluster: Cluster, model_path: str):
        # One role: neither a critic nor a reference takes part.
        self.cfg = cfg = dataclasses.replace(cfg, algorithm=AlgorithmConfig())
        t = cfg.trainer
        self.cluster = cluster
        self.step = 0
        self.checkpoints = CheckpointManager(t.ckpt_path, t.max_ckpts_to_keep)
        self.resume_from = self.checkpoints.resolve(t.resume_mode, t.resume_path)
        refuse_to_overwrite(cfg, self.checkpoints)
        self.model_path = resolve_model_path(model_path)
        self.tokenizer = load_tokenizer(self.model_path, cfg.model.chat_template, cfg.model.trust_remote_code)
        examples = load_encoded(cfg.data, self.tokenizer, cfg.sft.max_length)
        self.batches = PackedBatches(
            examples, t.seed, cfg.sft.batch_size, cfg.sft.max_length, self.tokenizer.pad_token_id
        )
        self.ranks = Ranks(cfg, cluster)
        self.ranks.connect()
        self.ranks.build_for_sft(self.model_path)
        self.checkpoints.register(json_part("trainer_state", lambda: {"step": self.step}, self._restore))
        self.checkpoints.register(Part(
            "policy",
            lambda directory: self.ranks.save("policy", os.path.abspath(os.path.join(directory, "policy"))),
            lambda directory: self.ranks.load("policy", os.path.abspath(os.path.join(directory, "policy"))),
        ))  # fmt: skip

    def fit(self) -> None:
        """Train up to `sft.steps`."""
        cfg, t, steps = self.cfg, self.cfg.trainer, self.cfg.sft.steps
        if self.resume_from:
            self.checkpoints.load(self.resume_from)
        timer = Timer()
        with Tracker(t.run_dir, cfg.logger, t.run_name, dataclasses.asdict(cfg)) as tracker:
            tracker.rewind(self.step if self.resume_from else -1)
            history = read_metrics(os.path.join(t.run_dir, METRICS_FILE))
            with Progress(steps, cfg.logger.progress, completed=self.step, history=history) as progress:
                for step in range(self.step + 1, steps + 1):
                    with timer("step"):
                        result = self.ranks.supervised_update(self.batches.batch(step))
                    self.step = step
                    metrics = {"sft/loss": result["loss"], "policy/grad_norm": result["grad_norm"],
                               "policy/lr": result["lr"], **timer.take()}  # fmt: skip
                    tracker.log(step, metrics)
                    progress.update(step, metrics)
                    if t.ckpt_interval > 0 and (step % t.ckpt_interval == 0 or step == steps):
                        with timer("checkpoint_blocked"):
                            tracker.flush()
                            self.checkpoints.save(step, {"ranks": t.num_workers, "replicas": t.replicas})

    def export(self, target: str) -> None:
        """Write the model in Hugging Face format to `target`, whole or not at all."""
        writing = f"{target}.writing-{os.getpid()}"
        shutil.rmtree(writing, ignore_errors=True)
        write_assets(self.model_path, writing, self.tokenizer, self.cfg.model.trust_remote_code)
        self.ranks.write_weights(os.path.abspath(writing), "float32")
        if os.path.exists(os.path.join(target, "config.json")):  # another job was faster, with the same result
            shutil.rmtree(writing)
        else:
            os.replace(writing, target)

    def close(self) -> None:
        """Give the ranks' place back."""
        self.cluster.release(self.ranks.policy)

    def _restore(self, state: dict) -> None:
        self.step = state["step"]


def refuse_to_overwrite(cfg: Config, checkpoints: CheckpointManager) -> None:
    """A run directory is continued on purpose or not at all.

    Raises:
        UserError: it holds a run, and nothing was said about resuming.
    """
    run_dir, mode = cfg.trainer.run_dir, cfg.trainer.resume_mode
    holds_run = checkpoints.steps() or os.path.exists(os.path.join(run_dir, METRICS_FILE))
    if holds_run and mode in (None, "none"):
        raise UserError(f"trainer.run_dir={run_dir}: already holds a run; continue it with "
                        "trainer.resume_mode=latest, or choose another trainer.run_name")  # fmt: skip


def prepare_model(cfg: Config, cluster: Cluster) -> str:
    """The start weights' path: `model.path`, or the embedded model, built and warm-started once per config."""
    if cfg.model.path is not None:
        return cfg.model.path
    recipe = {
        "tiny": dataclasses.asdict(cfg.model.tiny),
        "sft": dataclasses.asdict(cfg.sft),
        "data": dataclasses.asdict(cfg.data),
    }
    target = os.path.join(cfg.model.cache_dir, f"tiny-{key(json.dumps(recipe, sort_keys=True)):016x}")
    if os.path.exists(os.path.join(target, "config.json")):
        return target
    # A run of its own, resumed if it was killed. Its name holds no process id: the restart must find it.
    run_dir = f"{target}.run"
    start = os.path.join(run_dir, "start")
    from trainer.models.tiny import build_tiny  # imports the model classes, which a cached model spares us

    build_tiny(cfg.model.tiny, start)
    print(f"warm start of the embedded model: {cfg.sft.steps} supervised steps, once for this config", flush=True)
    warm_start = dataclasses.replace(
        cfg,
        trainer=dataclasses.replace(
            cfg.trainer, seed=cfg.model.tiny.seed, run_name="warm-start", run_dir=run_dir,
            ckpt_path=os.path.join(run_dir, "checkpoints"), ckpt_interval=50, max_ckpts_to_keep=1, resume_mode="latest", resume_path=None,
        ),
        logger=dataclasses.replace(cfg.logger, wandb=dataclasses.replace(cfg.logger.wandb, mode="off")),
    )  # fmt: skip
    trainer = SupervisedTrainer(warm_start, cluster, start)
    trainer.fit()
    trainer.export(target)
    trainer.close()
    shutil.rmtree(run_dir, ignore_errors=True)
    return target


def run(cfg: Config, device: str) -> None:
    """A supervised run: from `model.path`, or from the embedded model with random weights."""
    from trainer.metrics.report import write_report

    t = cfg.trainer
    with Cluster(cfg, device) as cluster:
        path = cfg.model.path
        if path is None:
            from trainer.models.tiny import build_tiny

            path = os.path.join(t.run_dir, "start")
            build_tiny(cfg.model.tiny, path)
        trainer = SupervisedTrainer(cfg, cluster, path)
        trainer.fit()
        target = os.path.join(t.export_path, f"global_step_{trainer.step}", "policy")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        trainer.export(target)
    print(f"finished supervised step {trainer.step} of {cfg.sft.steps}; model: {target}")
    if cfg.logger.plot:
        print(f"report: {write_report(t.run_dir)}")


if __name__ == "__main__":
    from trainer.main import run_app

    run_app(run)
