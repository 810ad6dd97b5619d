"""The job of `trainer evaluate`: engines with the weights of a model or a checkpoint answer the validation sets."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.checkpoint import last_commit
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.start_weights import fingerprint_weights, read_revisions
from trainer.checkpoint.tensors import NamedFiles
from trainer.config import Config
from trainer.config.fields import resume_rules
from trainer.config.schema import is_open
from trainer.data.datasets import Prompt, read_examples
from trainer.data.row_files import digest_rows
from trainer.episodes import Episode
from trainer.errors import UserError, as_list
from trainer.evaluate.results import (
    CODE,
    CONTENT,
    DEFAULT_SET,
    Results,
    SetResult,
    read_results,
    with_text_keys,
    write_episodes,
)
from trainer.evaluate.subject import Subject
from trainer.evaluate.task import PATH
from trainer.files.documents import flatten
from trainer.files.hf_hub import pin
from trainer.files.redaction import redact
from trainer.generation.engine_pool import EnginePool
from trainer.generation.transport import ADAPTER, FixedWeights
from trainer.jobs import cluster_of
from trainer.journal.history import code_in, digest, identity
from trainer.journal.journal import Journal
from trainer.metrics.estimates import row_values
from trainer.metrics.tracker import METRICS_FILE
from trainer.models.export import MAX_FILE_BYTES
from trainer.models.export_checkpoint import adapter_files, export
from trainer.models.files import resolve_model_path
from trainer.models.heads import refuse_classifier, refuse_classifier_in
from trainer.models.tokenizer import stop_token_ids
from trainer.process import time_limits
from trainer.process.failure_log import INCIDENTS
from trainer.process.log_setup import LOG_FILE
from trainer.process.signals import Stopped
from trainer.process.startup import stage
from trainer.rewards.cache import RewardCache
from trainer.rewards.scoring import RewardPool
from trainer.run.compatibility import deciding_settings
from trainer.run.run_metadata import HOLDS_A_RUN, LOG_NAME, last_start, record_start, task_of
from trainer.sources.base import Evaluation
from trainer.sources.evaluation import RolloutEvaluator, rewards_by_row
from trainer.sources.prompts import read_prompts, read_source
from trainer.sources.rollouts import Rollouts
from trainer.sources.routes import VAL_SETS, check_source, find_refusals, make_routes, make_scorers
from trainer.tasks.base import tokenizer_of

LOG = logging.getLogger(__name__)

_MODEL = ".model-"
"""Beginning of the name of the directory with the exported weights of a checkpoint, until the evaluation is finished.
"""


def run_evaluation(cfg: Config, subject: Subject, device: str) -> Results:
    """Evaluate `subject`, or what a killed start of the same evaluation has left to do; write and return the results.

    Args:
        device: `cuda` or `cpu`.
    """
    directory = cfg.trainer.run_dir
    _refuse_run(directory)
    before = pin({} if subject.checkpoint is None else read_revisions(subject.checkpoint))
    lock = RunLock(directory, time_limits.LOCK_LEASE_S, "directory", "choose another trainer.run_dir, or end that job")
    try:
        if (line := lock.acquire()) is not None:
            LOG.info("%s", line)
        LOG_FILE.open(os.path.join(directory, LOG_NAME))
        INCIDENTS.open(directory, lock.check)
        try:
            return _Evaluating(cfg, subject, device, lock).run()
        finally:
            INCIDENTS.close()
    except Stopped as stop:
        reason = str(stop).partition(";")[0]
        raise Stopped(f"{reason}; the same command continues the evaluation in {directory}") from stop
    finally:
        pin(before)
        lock.release()


def _refuse_run(directory: str) -> None:
    """Refuse the directory of a training run: its records and its journal, which a resume needs, would be replaced."""
    start = last_start(directory)
    is_of_training = start is not None and task_of(start).name != PATH
    if is_of_training or os.path.exists(os.path.join(directory, METRICS_FILE)) or last_commit.exists(directory):
        raise UserError(f"trainer.run_dir={directory}: {HOLDS_A_RUN}; an evaluation needs another trainer.run_dir")


class _Evaluating:
    """One start of an evaluation."""

    def __init__(self, cfg: Config, subject: Subject, device: str, lock: RunLock):
        self.cfg = cfg
        self.subject = subject
        self.directory = cfg.trainer.run_dir
        self._device = device
        self._lock = lock
        self._step = subject.step

    def run(self) -> Results:
        """Return the results: those that are there, or new ones."""
        results = self._new_results()
        if (found := self._earlier(results)) is not None:
            LOG.info("evaluated before; nothing is left to do in %s", self.directory)
            return found
        record_start(self.directory, self.cfg)
        _check_sources(self.cfg)
        path, weights = self._weights()
        tokenizer = tokenizer_of(self.cfg, path)
        with stage("reading the data"):
            sets = self._read_sets(tokenizer)
        rollouts, _ = deciding_settings(self.cfg)
        settings = identity(rollouts, {}, results.weights)
        journal = Journal(self.directory, settings, self._lock.check, is_on=self.cfg.rollout.journal)
        with contextlib.ExitStack() as ends:
            ends.callback(journal.close)
            cluster = ends.enter_context(cluster_of(self.cfg, self._device))
            way = "shared_memory" if weights.adapter is None else ADAPTER
            pool = EnginePool(self.cfg, cluster, weights, path, keeps_weights=True, way=way)
            ends.callback(pool.leave)
            cache = RewardCache(self.directory, self._lock.check)
            scorers = make_scorers(
                self.cfg,
                list(map(_source_of, sets)),
                lambda cfg: None if cfg.environment.name is not None else RewardPool(cfg.reward, cache),
            )
            routes = make_routes(self.cfg, scorers, tokenizer)
            rollouts = Rollouts(self.cfg, pool, stop_token_ids(path, tokenizer), routes, journal)
            ends.enter_context(rollouts)
            with stage("starting the engines"):
                pool.start(version=self._step + 1, is_initial=True)
            journal.start(max(0, self._step - 1), digest("evaluation", results.weights))
            named = {name: prompts for name, prompts in sets.items() if name != DEFAULT_SET}
            evaluator = RolloutEvaluator(self.cfg, rollouts, sets.get(DEFAULT_SET, []), named)
            for name, prompts in sets.items():
                with stage(f"evaluating {name}: {len(prompts)} rows"):
                    self._evaluate(name, prompts, evaluator, results)
            results.write(self.directory, self._lock.check)
            journal.remove_after(self._step - 1)
            pool.shutdown()
        for path in glob.glob(os.path.join(glob.escape(self.directory), f"{_MODEL}*")):
            shutil.rmtree(path, ignore_errors=True)
        return results

    def _new_results(self) -> Results:
        checkpoint = self.subject.checkpoint
        if checkpoint is not None:
            weights = checkpoint.manifest["self"]
        else:
            assert self.cfg.model.path is not None
            with stage(f"fetching the model {self.cfg.model.path}"):
                path = resolve_model_path(self.cfg.model.path)
            weights = fingerprint_weights(self.cfg, path, begins=True)
        with stage("comparing with an earlier start"):
            return Results(self.subject.name, self._step, weights, deciding(self.cfg) | _content(self.cfg))

    def _earlier(self, results: Results) -> Results | None:
        """Return the same evaluation, which an earlier start has finished; None: there is none.

        Raises:
            UserError: the directory holds another evaluation.
        """
        found = read_results(self.directory)
        if found is not None and (different := found.differences(results)):
            raise UserError(
                f"trainer.run_dir={self.directory}: holds another evaluation of {found.subject}, with another "
                f"{', '.join(different)}; name another directory"
            )
        return found

    def _weights(self) -> tuple[str, FixedWeights]:
        """Return the directory of the model that engines load, and the weights."""
        checkpoint, given = self.subject.checkpoint, self.cfg.model.path
        if checkpoint is None:
            assert given is not None
            path = resolve_model_path(given)
            refuse_classifier_in(path, "model.path")
            return path, FixedWeights(path, self.directory)
        files = NamedFiles(checkpoint)
        config = files.json("policy/huggingface/config.json", {})
        refuse_classifier(config.get("architectures"), checkpoint.path)
        if self.cfg.syncs_adapter:
            config, adapter, base = adapter_files(files)
            path = resolve_model_path(given or base)
            return path, FixedWeights(path, self.directory, (config, adapter))
        name = _MODEL + digest(checkpoint.manifest["self"])[:16]  # an earlier start may have exported another
        path = os.path.abspath(os.path.join(self.directory, name))
        if not os.path.exists(path):
            base = None if self.cfg.trainer.policy.lora.rank is None else given
            with stage(f"exporting the weights of {checkpoint.path}"):
                export(files, path, self._dtype, MAX_FILE_BYTES, base=base)
        return path, FixedWeights(path, self.directory)

    @property
    def _dtype(self) -> str:
        """The dtype in which the engines compute: no more is written, and nothing is rounded twice."""
        dtype = self.cfg.rollout.dtype
        return dtype if dtype != "auto" else "bfloat16" if self._device == "cuda" else "float32"

    def _read_sets(self, tokenizer: Any) -> dict[str, Sequence[Prompt]]:
        """Return the prompts of all sets by name.

        Raises:
            UserError: there are none, or they cannot be read.
        """
        data, sets = self.cfg.data, {}
        if data.synthetic or data.val_files:
            sets[DEFAULT_SET] = read_prompts(self.cfg, "val", tokenizer)
        sets |= {name: read_source(self.cfg, _source_of(name), tokenizer) for name in data.val_sets}
        if not sets:
            raise UserError("data.val_files=[]: names no data to evaluate on; name files, or sets with data.val_sets")
        for name, found in sets.items():
            if line := found.dropped_line(self.cfg.rollout.max_prompt_tokens):
                LOG.info("%s: %s", name, line)
        return {name: found.prompts for name, found in sets.items()}

    def _evaluate(self, name: str, prompts: Sequence[Prompt], evaluator: RolloutEvaluator, results: Results) -> None:
        """Evaluate a set, and write its episodes."""
        is_default = name == DEFAULT_SET
        evaluation = evaluator.evaluate_sets(self._step, [] if is_default else [name], with_default=is_default)
        episodes = [*evaluation.greedy, *evaluation.sampled] if is_default else list(evaluation.sets[name])
        write_episodes(self.directory, name, self._step, episodes, self._lock.check)
        results.metrics |= evaluation.metrics
        results.sets[name] = SetResult(
            [digest_rows([prompt.row]) for prompt in prompts],
            len(episodes),
            sum(bool(episode.failure) for episode in episodes),
            sum(episode.length for episode in episodes),
            with_text_keys(self._values(name, evaluation)),
        )

    def _values(self, name: str, evaluation: Evaluation) -> Mapping[str, Mapping[int, float]]:
        cfg = self.cfg
        if name != DEFAULT_SET:
            settings = cfg.data.val_sets[name]
            return _values_of(evaluation.sets[name], settings.n, settings.reward.success_threshold)
        threshold = cfg.reward.success_threshold
        greedy = _values_of(evaluation.greedy, 1, threshold)
        sampled = _values_of(evaluation.sampled, cfg.rollout.val_n, threshold) if evaluation.sampled else {}
        return {**greedy, **{measure: values for measure, values in sampled.items() if measure not in greedy}}


def _values_of(episodes: Sequence[Episode], n: int, threshold: float) -> dict[str, dict[int, float]]:
    return row_values(rewards_by_row(episodes, n), threshold)


def _source_of(name: str) -> str:
    """Return the source of the prompts of a set, as `Prompt.source` names it."""
    return "" if name == DEFAULT_SET else f"{VAL_SETS}{name}"


def _sets_of(cfg: Config) -> dict[str, Config]:
    """Return the configs of runs on one set alone, by its name."""
    default = {DEFAULT_SET: cfg} if cfg.data.synthetic or cfg.data.val_files else {}
    return default | {name: cfg.of_source(_source_of(name)) for name in cfg.data.val_sets}


def _check_sources(cfg: Config) -> None:
    """Refuse rewards, environments and agents that cannot be used, before anything expensive starts."""
    if refused := find_refusals(cfg, map(_source_of, _sets_of(cfg)), check_source):
        raise UserError(as_list("the evaluation cannot start:", list(dict.fromkeys(refused))))


def _content(cfg: Config) -> dict[str, str]:
    """Return digests of the rows of all sets: files of the same names may have others by now."""
    return {
        f"{CONTENT}{name}": digest_rows(read_examples(own.data, "val", as_rows=True))
        for name, own in _sets_of(cfg).items()
    }


def deciding(cfg: Config) -> dict[str, str]:
    """Return digests of the settings that decide what an evaluation measures, by key, and of the code they name."""
    rollouts, _ = deciding_settings(cfg)
    flat = flatten(redact(dataclasses.asdict(cfg), references=False), whole=is_open)
    rules = resume_rules(cfg)
    validation = {
        key: value
        for key, value in flat.items()
        if cfg.reads(key) and (key.startswith("data.") or key in rules and rules[key].change == "validation")
    }
    settings = {**rollouts, **validation}
    code = {f"{CODE}{path}": found for path, found in code_in(settings).items()}
    return {key: digest(value) for key, value in settings.items()} | code
