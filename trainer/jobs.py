"""Whole runs, from a config to its report: reinforcement learning, supervised training, the embedded model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from typing import Any

from trainer.checkpoint import record
from trainer.checkpoint.components import Restore
from trainer.checkpoint.exports import is_exported
from trainer.checkpoint.lock import NAME as LOCK_NAME
from trainer.checkpoint.manifest import Checkpoint, read_object
from trainer.checkpoint.start_weights import read_revisions, start_weights_part
from trainer.cluster.watchdog import DriverWatch
from trainer.cluster.worker_groups import Cluster
from trainer.config import Config, TrainerConfig
from trainer.config.trainer import PROCESSES
from trainer.data.datasets import as_messages, check_files, read_examples
from trainer.data.sft_dataset import load_train, load_val
from trainer.errors import UserError, WorkerError, as_list, sentences_of
from trainer.files.hf_hub import pin
from trainer.generation.engine_pool import EnginePool
from trainer.import_utils import import_function
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.models.export import export_target
from trainer.models.files import load_config, resolve_model_path
from trainer.models.parallel_checks import check_axes
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.process.startup import stage
from trainer.reports.report import final_report
from trainer.rewards.cache import RewardCache
from trainer.rewards.functions import REMOTE
from trainer.rewards.preflight import try_rewards
from trainer.rewards.terms import RewardInput, components_of
from trainer.run.compatibility import ConfigRefused
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import record_start
from trainer.run.stopping import StopRequest
from trainer.seeding import derive_seed
from trainer.sources.evaluation import LossEvaluator, RolloutEvaluator
from trainer.sources.rollout_runner import RolloutRunner
from trainer.sources.sampling import SamplingSource, prompt_ledger, read_prompts
from trainer.sources.supervised import SupervisedSource, loop_config
from trainer.trainer import Trainer

LOG = logging.getLogger(__name__)

_TRIED_ROWS = 3
"""Rows of the data that the rewards are tried with."""

_CHECKED_ROWS = 128
"""Training prompts that say whether the warm start is long enough."""
_CHECKED_EVERY = 5
"""Steps of the warm start between two such checks."""


def train_with_rollouts(cfg: Config, device: str, cluster: Cluster | None = None) -> None:
    """A run of GRPO or PPO: start the cluster, make the start weights if needed, train, report.

    Args:
        cluster: not started yet. None: as `trainer.ray_address` says.
    """
    t = cfg.trainer
    stop = StopRequest(t.deadline)
    with _open(cfg) as directory:
        record_start(t.run_dir, cfg)
        _check_inputs(cfg)
        if _is_finished(directory, t.total_steps, t.hf_save_interval > 0):
            LOG.info(f"finished step {t.total_steps} of {t.total_steps} before; nothing is left to do in {t.run_dir}")
            return
        with cluster or _cluster(cfg, device) as cluster, directory.settling(), DriverWatch(t, cluster):
            trainer = rollout_trainer(cfg, cluster, directory, prepare_model(cfg, cluster, stop), stop)
            trainer.fit()
    LOG.info(f"finished step {trainer.state.step} of {t.total_steps}{_best_of(trainer)}")
    if cfg.logger.plot:
        final_report(t.run_dir)


def train_supervised(cfg: Config, device: str) -> None:
    """A supervised run: from `model.path`, or from the embedded model with random weights."""
    t = cfg.trainer
    stop = StopRequest(t.deadline)
    with _open(cfg, supervised=True) as directory:
        record_start(t.run_dir, cfg)
        _check_inputs(cfg, supervised=True)
        if _is_finished(directory, cfg.sft.steps, exported=True):
            LOG.info(f"finished step {cfg.sft.steps} of {cfg.sft.steps} before; nothing is left to do in {t.run_dir}")
            return
        path = cfg.model.path
        if path is None:
            from trainer.models.tiny import build_tiny

            path = os.path.join(t.run_dir, "start")
            build_tiny(cfg.model.tiny, path)
        with _cluster(cfg, device) as cluster, directory.settling(), DriverWatch(t, cluster):
            trainer = supervised_trainer(cfg, cluster, directory, path, stop)
            trainer.fit()
            target = trainer.export_last()
    LOG.info(f"finished supervised step {trainer.state.step} of {cfg.sft.steps}{_best_of(trainer)}; model: {target}")
    if cfg.logger.plot:
        final_report(t.run_dir)


def _best_of(trainer: Trainer) -> str:
    best = "".join(f", best {name} {value:.3f}" for name, value in trainer.state.best.items() if name != "step")
    return f"{best} at step {trainer.state.best['step']}" if best else ""


def rollout_trainer(
    cfg: Config, cluster: Cluster, directory: RunDirectory, model_path: str, stop: StopRequest
) -> Trainer:
    """Return the trainer of a run that samples its own episodes."""
    timer, path = Timer(), resolve_model_path(model_path)
    check_axes(cfg, path)
    # The processes start, and import for many seconds, while this one reads the data.
    learner = Learner(cfg, cluster, timer)
    fleet = EnginePool(cfg, cluster, learner.ranks, path)
    reading = learner.ranks.read_files(path)
    with stage("reading the data"):
        tokenizer = _load_tokenizer(cfg, path)
        cache = RewardCache(cfg.trainer.run_dir, directory.check)
        runner = RolloutRunner(cfg, fleet, tokenizer, stop_token_ids(path, tokenizer), cache)
        needs_baselines = "baselines" in cfg.algorithm.reads
        source = SamplingSource(cfg, runner, read_prompts(cfg, "train", tokenizer), timer, needs_baselines)
        val_prompts = read_prompts(cfg, "val", tokenizer).prompts if cfg.trainer.val_interval > 0 else []
        evaluator = RolloutEvaluator(cfg, runner, val_prompts) if val_prompts else None
        trainer = Trainer(cfg, directory, source, learner, path, tokenizer, timer, stop, evaluator)
        _check_resumed_data(trainer)
    with stage("starting ranks and engines, and reading the model's files"):
        with contextlib.suppress(WorkerError):  # if ranks have died, `Trainer.fit` notices, and starts new ones
            reading.result()
        fleet.settle()
    return trainer


def supervised_trainer(
    cfg: Config, cluster: Cluster, directory: RunDirectory, model_path: str, stop: StopRequest
) -> Trainer:
    """Return the trainer of a run that learns from examples."""
    timer, path = Timer(), resolve_model_path(model_path)
    check_axes(cfg, path)
    loop = loop_config(cfg)
    learner = Learner(loop, cluster, timer)
    with stage("reading the data"):
        tokenizer = _load_tokenizer(cfg, path)
        vocab_size = load_config(cfg.model, path).get_text_config().vocab_size
        parts = load_train(cfg.data, cfg.sft, tokenizer, vocab_size)
        val_examples = load_val(cfg.data, cfg.sft, tokenizer) if cfg.trainer.val_interval > 0 else []
        source = SupervisedSource(cfg.sft, parts, cfg.trainer.seed)
        evaluator = LossEvaluator(val_examples, learner.loss) if val_examples else None
        trainer = Trainer(loop, directory, source, learner, path, tokenizer, timer, stop, evaluator)
        _check_resumed_data(trainer)
    return trainer


def _open(cfg: Config, supervised: bool = False) -> RunDirectory:
    """Open the directory of the run.

    Raises:
        UserError: see `RunDirectory.open`. If the config cannot be used with the checkpoint, the message also lists
            what of the data and the start weights cannot, and what `_check_inputs` refuses.
    """
    try:
        return RunDirectory(cfg, supervised).open()
    except ConfigRefused as refused:
        sentences = [*refused.sentences]
        # A change of these keys changes data or weights, too: then its own sentence is enough.
        before = pin(read_revisions(refused.resume[0]))
        if not any(key.startswith(("data.", "model.", "trainer.seed")) for key in refused.keys):
            with stage("comparing the data with the checkpoint"):
                sentences += _refused_inputs(cfg, supervised, *refused.resume)
        try:
            _check_inputs(cfg, supervised, asks_servers=False)
        except UserError as error:
            sentences += sentences_of(error)
        finally:
            pin(before)
        sentences = list(dict.fromkeys(sentences))  # data that cannot be read cannot be compared either
        raise UserError(as_list("the checkpoint cannot be used with this config:", sentences)) from None


def _refused_inputs(cfg: Config, supervised: bool, checkpoint: Checkpoint, restore: Restore) -> list[str]:
    """Return a sentence for each of data and start weights that cannot be used with the checkpoint."""
    model = cfg.model.path or _cached_model(cfg)
    if supervised and cfg.model.path is None or not (cfg.model.path or os.path.exists(model)):
        return []  # the start weights are made in the run

    def check_data() -> None:
        path = resolve_model_path(model)
        tokenizer = _load_tokenizer(cfg, path)
        source: Any
        if supervised:
            vocab_size = load_config(cfg.model, path).get_text_config().vocab_size
            parts = load_train(cfg.data, cfg.sft, tokenizer, vocab_size)
            source = SupervisedSource(cfg.sft, parts, cfg.trainer.seed)
        else:
            source = prompt_ledger(cfg, read_prompts(cfg, "train", tokenizer).prompts)
        source.load_state_dict(read_object(checkpoint, "data.json"))

    def check_weights() -> None:
        start_weights_part(cfg, resolve_model_path(model)).load(checkpoint, restore)

    checks = [check_data] if "data" in restore.kinds else []
    if "weights" in restore.kinds and "start_weights" in checkpoint.manifest["parts"]:
        checks.append(check_weights)
    refused = []
    for check in checks:
        try:
            check()
        except UserError as error:
            refused += sentences_of(error)
    return refused


def _check_resumed_data(trainer: Trainer) -> None:
    """Check that the data is that of the checkpoint to resume from, before models are loaded, which takes longer.

    Raises:
        UserError: it is not; the message lists changed start weights, too.
    """
    resume = trainer.directory.resume
    if resume is None or "data" not in resume.restore.kinds:
        return
    parts = {part.name: part for part in resume.restore.chosen(trainer.parts, resume.checkpoint)}
    try:
        trainer.checkpoints.load(resume.checkpoint, [parts["data"]], resume.restore)
    except UserError:
        inputs = [parts[name] for name in ("start_weights", "data") if name in parts]
        trainer.checkpoints.load(resume.checkpoint, inputs, resume.restore)
        raise


def _load_tokenizer(cfg: Config, path: str) -> Any:
    model = cfg.model
    return load_tokenizer(path, model.chat_template, model.trust_remote_code, model.chat_template_kwargs)


def _cluster(cfg: Config, device: str) -> Cluster:
    if cfg.trainer.ray_address == PROCESSES:
        from trainer.cluster.process_cluster import LocalCluster

        return LocalCluster(cfg, device)
    from trainer.cluster.ray_cluster import RayCluster  # imports Ray

    return RayCluster(cfg, device)


def _check_inputs(cfg: Config, supervised: bool = False, asks_servers: bool = True) -> None:
    """Refuse bad input before anything expensive starts.

    Args:
        asks_servers: also try rewards that a server gives, which costs time, and perhaps money.

    Raises:
        UserError: the reward, the curriculum, the data or the model cannot be used as the config says.
    """
    if supervised:
        _check_examples(cfg)
        return
    refused = []
    for check in (_check_functions, _check_data, _check_model):
        try:
            check(cfg)
        except UserError as error:
            refused += sentences_of(error)
    if refused:
        raise UserError(as_list("the run cannot start:", refused))
    if cfg.environment.name is None and (asks_servers or REMOTE not in cfg.reward.names()):
        with stage("trying the rewards"):
            _try_rewards(cfg)


def _check_functions(cfg: Config) -> None:
    if cfg.environment.name is None:
        components_of(cfg.reward)
    else:
        import_function(cfg.environment.name, "environment.name")
    if cfg.data.curriculum is not None:
        import_function(cfg.data.curriculum, "data.curriculum")


def _check_data(cfg: Config) -> None:
    with stage("checking the data files"):
        check_files(cfg.data, validation=cfg.trainer.val_interval > 0, as_rows=cfg.environment.name is not None)


def _check_examples(cfg: Config) -> None:
    with stage("checking the data files"):
        check_files(cfg.data, cfg.sft.source == "examples", validation=cfg.trainer.val_interval > 0)


def _check_model(cfg: Config) -> None:
    if cfg.model.path is None:
        _check_cache(cfg)
        return
    with stage(f"fetching the model {cfg.model.path}"):
        _load_tokenizer(cfg, resolve_model_path(cfg.model.path))


def _try_rewards(cfg: Config) -> None:
    """Compute the rewards of some reference answers (see `try_rewards`)."""
    size = _TRIED_ROWS if cfg.data.train_size < 0 else min(_TRIED_ROWS, cfg.data.train_size)
    examples = read_examples(dataclasses.replace(cfg.data, train_size=size), "train")
    attempts = [
        RewardInput(
            completion=example["answer"],
            answer=example["answer"],
            prompt=chat[-1]["content"],
            messages=[*chat, {"role": "assistant", "content": example["answer"]}],
            row=example.get("row", example),
        )
        for example in examples
        for chat in [as_messages(example["prompt"], cfg.data.system_prompt)]
    ]
    try_rewards(cfg.reward, attempts, cfg.rollout.n)


def _is_finished(directory: RunDirectory, steps: int, exported: bool) -> bool:
    """All steps are committed, uploaded and, if wanted, exported: restarting the command changes nothing."""
    resume = directory.resume
    if resume is None or resume.restore.fork or resume.checkpoint.step < steps:
        return False
    if directory.checkpoints.store.needs_ranks():
        return False
    return not exported or is_exported(export_target(directory.cfg, resume.checkpoint.step))


# --------------------------------------------------------------------------------------------------------
# The embedded model


def prepare_model(cfg: Config, cluster: Cluster, stop: StopRequest) -> str:
    """Return the path of the start weights: `model.path`, or the embedded model, built and warm-started once."""
    if cfg.model.path is not None:
        return cfg.model.path
    target = _cached_model(cfg)
    if os.path.exists(os.path.join(target, "config.json")):
        return target
    # A run of its own, resumed if it was killed. Its name holds no process id: the restart must find it.
    run_dir = f"{target}.run"
    warm_start = _warm_start_config(cfg, run_dir)
    # Another job may be making the same model: then this one waits, and takes it.
    with RunDirectory(warm_start, supervised=True).open(wait=True) as directory:
        if not os.path.exists(os.path.join(target, "config.json")):
            start = os.path.join(run_dir, "start")
            from trainer.models.tiny import build_tiny  # imports the model classes, which a cached model spares us

            build_tiny(cfg.model.tiny, start)
            most = cfg.sft.steps
            LOG.info("warm start of the embedded model: at most %d supervised steps, once for this config", most)
            trainer = supervised_trainer(warm_start, cluster, directory, start, stop)
            _warm_up(trainer, cfg.model.tiny.start_accuracy)
            trainer.export(target)
            trainer.learner.close()
        _delete_run(run_dir)  # while we hold the lock, or a waiting job would resume from it
    with contextlib.suppress(OSError):  # a job that was waiting recreates the directory, and removes it itself
        os.rmdir(run_dir)
    return target


def _warm_up(trainer: Trainer, enough: float | None) -> None:
    """Train until the model answers the share `enough` of some training prompts exactly, or to the last step.

    The step alone decides when that is measured, so a run that was killed ends after the same step.
    """
    assert isinstance(trainer.source, SupervisedSource)
    rows = trainer.source.some_examples(_CHECKED_ROWS)

    def is_enough(step: int) -> bool:
        return step > 0 and step % _CHECKED_EVERY == 0 and trainer.learner.accuracy(rows) >= enough

    if enough is not None:
        trainer.is_enough = is_enough
    trainer.fit()
    share, step = trainer.learner.accuracy(rows), trainer.state.step
    LOG.info(f"warm start: after {step} steps the model answers {share:.1%} of {len(rows)} training prompts exactly")


def _warm_start_config(cfg: Config, run_dir: str) -> Config:
    trainer = dataclasses.replace(
        TrainerConfig(),
        seed=cfg.model.tiny.seed,
        run_name="warm-start",
        run_dir=run_dir,
        ckpt_path=os.path.join(run_dir, "checkpoints"),
        ckpt_interval=50,
        max_ckpts_to_keep=1,
        resume_mode="latest",
        val_interval=-1,
        num_workers=cfg.trainer.num_workers,
        dp_replicate=cfg.trainer.dp_replicate,
        device=cfg.trainer.device,
        master_port=cfg.trainer.master_port,
    )
    logger = dataclasses.replace(cfg.logger, wandb=dataclasses.replace(cfg.logger.wandb, mode="off"))
    return dataclasses.replace(cfg, trainer=trainer, logger=logger)


def _check_cache(cfg: Config) -> None:
    """Check that the embedded model exists or can be built.

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
            f"model.cache_dir={cfg.model.cache_dir}: the embedded model is made there, and it cannot be written "
            f"({error.strerror}); choose another, for example with the environment variable "
            "TRAINER_CACHE, or give model.path"
        ) from error


def _cached_model(cfg: Config) -> str:
    data = dataclasses.asdict(cfg.data)
    if not cfg.data.synthetic:  # what is held out of files has no part in the model
        data |= {"val_files": [], "val_size": -1}
    tiny = dataclasses.asdict(cfg.model.tiny)
    if tiny["start_accuracy"] is None:  # the model of earlier versions, under the name that they gave it
        del tiny["start_accuracy"]
    recipe = {"tiny": tiny, "sft": dataclasses.asdict(cfg.sft), "data": data}
    return os.path.join(cfg.model.cache_dir, f"tiny-{derive_seed(json.dumps(recipe, sort_keys=True)):016x}")


def _delete_run(run_dir: str) -> None:
    record.remove(run_dir)  # first: a run that has committed checkpoints is refused without them
    for entry in list(os.scandir(run_dir)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif not entry.name.startswith(LOCK_NAME):
            os.remove(entry.path)
