"""The job of `trainer evaluate`: engines with the weights of a model or a checkpoint answer the validation sets.

Its directory holds transcripts, and `evaluation.json` with what was measured of each row.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from trainer.checkpoint import last_commit
from trainer.checkpoint.components import fingerprint_weights, read_revisions
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.tensors import NamedFiles
from trainer.config import Config
from trainer.config.fields import resume_rules
from trainer.config.schema import is_open
from trainer.data.datasets import PromptSet, read_examples
from trainer.data.records import encode
from trainer.data.rollout_io import FOLDER
from trainer.data.row_files import digest_rows
from trainer.episodes import Episode
from trainer.errors import UserError, as_list
from trainer.evaluate.subject import PATH, Subject
from trainer.files.atomic_io import write_file
from trainer.files.documents import flatten, parse_object
from trainer.files.hf_hub import pin
from trainer.files.redaction import redact
from trainer.generation.engine_pool import EnginePool
from trainer.generation.transport import FixedWeights
from trainer.jobs import cluster_of
from trainer.journal.history import code_in, digest, identity
from trainer.journal.journal import Journal
from trainer.metrics.estimates import mean_estimate, row_values
from trainer.metrics.tracker import METRICS_FILE
from trainer.models.checks import check_vocabularies, refuse_classifier_in
from trainer.models.export_weights import adapter_files, export
from trainer.models.files import resolve_model_path
from trainer.models.tokenizer import stop_token_ids
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS
from trainer.process.log_setup import LOG_FILE, escape, show
from trainer.process.signals import Stopped
from trainer.process.startup import stage
from trainer.rewards.cache import RewardCache
from trainer.rewards.scoring import make_scorer
from trainer.run.resume import deciding_settings
from trainer.run.run_metadata import HOLDS_A_RUN, LOG_NAME, last_start, record_start, task_of
from trainer.sources.base import Evaluation
from trainer.sources.evaluation import RolloutEvaluator, rewards_by_row
from trainer.sources.rollouts import Rollouts
from trainer.sources.routes import (
    VAL_SETS,
    check_source,
    find_refusals,
    make_routes,
    make_scorers,
    read_prompts,
    read_source,
)
from trainer.tasks.base import tokenizer_of

LOG = logging.getLogger(__name__)

_MODEL = ".model-"
"""Beginning of the name of the directory with the exported weights of a checkpoint, until the evaluation is finished.
"""
RESULTS_FILE = "evaluation.json"
DEFAULT_SET = "default"
"""Name of the prompts of `data.val_files`, or of the generator, which belong to no named set."""


@dataclass
class SetResult:
    """What was measured of one set."""

    rows: list[str]
    """A digest of the content of each row, in the order of the file."""
    completions: int
    failures: int
    """Completions whose reward or environment failed."""
    tokens: int
    """Tokens that the model has generated."""
    values: dict[str, dict[str, float]]
    """By measure (see `trainer.metrics.estimates`; `reward/<term>` is the mean of a term) and index of the row."""


@dataclass
class Results:
    """A finished evaluation."""

    subject: str
    step: int
    weights: str
    """Fingerprint of the weights."""
    settings: dict[str, str]
    """Digests of the settings that decide what is measured, by key; of the code that they name, and of the rows."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics that a run logs of the same evaluation."""
    sets: dict[str, SetResult] = field(default_factory=dict)
    """By name."""

    def write(self, directory: str, fence: Callable[[], None]) -> None:
        write_file(os.path.join(directory, RESULTS_FILE), json.dumps(asdict(self)), fence)

    def differences(self, other: Results) -> list[str]:
        """Return the keys in which two evaluations differ, `model` for other weights."""
        changed = (key for key in self.settings | other.settings if self.settings.get(key) != other.settings.get(key))
        return (["model"] if (self.weights, self.step) != (other.weights, other.step) else []) + sorted(changed)


def run_evaluation(cfg: Config, subject: Subject, device: str) -> Results:
    """Evaluate `subject`, or what a killed start has left of the same evaluation; write and return the results."""
    directory = cfg.trainer.run_dir
    start = last_start(directory)
    is_of_training = start is not None and task_of(start).name != PATH
    # A training run needs its records and its journal for a resume, and they would be replaced.
    if is_of_training or os.path.exists(os.path.join(directory, METRICS_FILE)) or last_commit.exists(directory):
        raise UserError(f"trainer.run_dir={directory}: {HOLDS_A_RUN}; an evaluation needs another trainer.run_dir")
    before = pin({} if subject.checkpoint is None else read_revisions(subject.checkpoint))
    lock = RunLock(directory, time_limits.LOCK_LEASE_S, "directory", "choose another trainer.run_dir, or end that job")
    try:
        if (line := lock.acquire()) is not None:
            LOG.info("%s", line)
        LOG_FILE.open(os.path.join(directory, LOG_NAME))
        INCIDENTS.open(directory, lock.check)
        try:
            results = _planned(cfg, subject)
            if (found := _earlier(directory, results)) is not None:
                LOG.info("evaluated before; nothing is left to do in %s", directory)
                return found
            return _run(cfg, subject, device, lock, results)
        finally:
            INCIDENTS.close()
    except Stopped as stop:
        reason = str(stop).partition(";")[0]
        raise Stopped(f"{reason}; the same command continues the evaluation in {directory}") from stop
    finally:
        pin(before)
        lock.release()


def _planned(cfg: Config, subject: Subject) -> Results:
    """Return what decides the results of an evaluation, and no results."""
    if subject.checkpoint is not None:
        weights = subject.checkpoint.manifest["self"]
    else:
        assert cfg.model.path is not None
        with stage(f"fetching the model {cfg.model.path}"):
            path = resolve_model_path(cfg.model.path)
        weights = fingerprint_weights(cfg, path, begins=True)
    with stage("comparing with an earlier start"):
        return Results(subject.name, subject.step, weights, _settings(cfg))


def _earlier(directory: str, planned: Results) -> Results | None:
    """Return the same evaluation, which an earlier start has finished; None: there is none."""
    found = read_results(directory)
    if found is not None and (different := found.differences(planned)):
        raise UserError(
            f"trainer.run_dir={directory}: holds another evaluation of {found.subject}, with another "
            f"{', '.join(different)}; name another directory"
        )
    return found


def _run(cfg: Config, subject: Subject, device: str, lock: RunLock, results: Results) -> Results:
    """Evaluate all sets, and write and return the results."""
    directory, step = cfg.trainer.run_dir, subject.step
    record_start(directory, cfg)
    _check_sources(cfg)
    path, weights = _weights(cfg, subject, device)
    tokenizer = tokenizer_of(cfg, path)
    sources, sets = _sources_of(cfg), dict[str, PromptSet]()
    with stage("reading the data"):
        for name, source in sources.items():
            sets[name] = read_source(cfg, source, tokenizer) if source else read_prompts(cfg, "val", tokenizer)
            if line := sets[name].dropped_line(cfg.rollout.max_prompt_tokens):
                LOG.info("%s: %s", name, line)
    rollout_settings, _ = deciding_settings(cfg)
    check_vocabularies(cfg, path)
    settings = identity(
        rollout_settings, {}, " ".join([results.weights, *(spec.server.weights for spec in cfg.servers)])
    )
    cache = RewardCache(directory, lock.check)
    with contextlib.ExitStack() as ends:
        journal = Journal(directory, settings, lock.check, is_on=cfg.rollout.journal)
        ends.callback(journal.close)
        cluster = ends.enter_context(cluster_of(cfg, device))
        pool = EnginePool(cfg, cluster, weights, path, keeps_weights=True)
        ends.callback(pool.leave)
        scorers = make_scorers(
            cfg, sources.values(), lambda own: None if own.environment.name else make_scorer(own, cache)
        )
        routes = make_routes(cfg, scorers, tokenizer)
        rollouts = Rollouts(cfg, pool, stop_token_ids(path, tokenizer), routes, journal)
        ends.enter_context(rollouts)
        with stage("starting the engines"):
            pool.start(version=step + 1, is_initial=True)
        journal.start(max(0, step - 1), digest("evaluation", results.weights))
        named = {name: found.prompts for name, found in sets.items() if name != DEFAULT_SET}
        default = sets[DEFAULT_SET].prompts if DEFAULT_SET in sets else []
        with stage(f"evaluating {', '.join(f'{name}: {len(found.prompts)} rows' for name, found in sets.items())}"):
            evaluation = RolloutEvaluator(cfg, rollouts, default, named).evaluate_sets(step, list(named), True)
        results.metrics = evaluation.metrics
        for name, episodes, values in _measured(cfg, evaluation):
            write_episodes(directory, name, step, episodes, lock.check)
            rows = [digest_rows([prompt.row]) for prompt in sets[name].prompts]
            failures = sum(bool(episode.failure) for episode in episodes)
            tokens = sum(episode.length for episode in episodes)
            results.sets[name] = SetResult(rows, len(episodes), failures, tokens, values)
        results.write(directory, lock.check)
        journal.remove_after(step - 1)
        pool.shutdown()
    for exported in glob.glob(os.path.join(glob.escape(directory), f"{_MODEL}*")):
        shutil.rmtree(exported, ignore_errors=True)
    return results


def _sources_of(cfg: Config) -> dict[str, str]:
    """Return the source of each set, as `Prompt.source` names it."""
    default = {DEFAULT_SET: ""} if cfg.data.synthetic or cfg.data.val_files else {}
    return default | {name: f"{VAL_SETS}{name}" for name in cfg.data.val_sets}


def _check_sources(cfg: Config) -> None:
    """Refuse rewards, environments and agents that cannot be used, before anything expensive starts; and no data."""
    if not _sources_of(cfg):
        raise UserError("data.val_files=[]: names no data to evaluate on; name files, or sets with data.val_sets")
    if refused := find_refusals(cfg, _sources_of(cfg).values(), check_source):
        raise UserError(as_list("the evaluation cannot start:", list(dict.fromkeys(refused))))


def _weights(cfg: Config, subject: Subject, device: str) -> tuple[str, FixedWeights]:
    """Return the directory of the model that engines load, and the weights."""
    directory, checkpoint, given = cfg.trainer.run_dir, subject.checkpoint, cfg.model.path
    if checkpoint is None:
        assert given is not None
        path = resolve_model_path(given)
        refuse_classifier_in(path, "model.path")
        return path, FixedWeights(path, directory, cfg.rollout.dtype)
    files = NamedFiles(checkpoint)
    if cfg.syncs_adapter:
        config, adapter, base = adapter_files(files)
        path = resolve_model_path(given or base)
        return path, FixedWeights(path, directory, cfg.rollout.dtype, (config, adapter))
    name = _MODEL + digest(checkpoint.manifest["self"])[:16]  # an earlier start may have exported another
    path = os.path.abspath(os.path.join(directory, name))
    if not os.path.exists(path):
        # In the dtype of the engines no more is written than they read, and nothing is rounded twice.
        dtype = cfg.rollout.dtype if cfg.rollout.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
        with stage(f"exporting the weights of {checkpoint.path}"):
            export(files, path, dtype, base=given if cfg.trainer.policy.lora.rank else None)
    return path, FixedWeights(path, directory, cfg.rollout.dtype)


def _measured(cfg: Config, evaluation: Evaluation) -> Iterator[tuple[str, list[Episode], dict[str, dict[str, float]]]]:
    """Yield the name, the episodes and the values of each set."""
    if evaluation.greedy:
        threshold = cfg.reward.success_threshold
        sampled = _values_of(evaluation.sampled, cfg.rollout.val_n, threshold) if evaluation.sampled else {}
        values = sampled | _values_of(evaluation.greedy, 1, threshold)  # accuracy and terms are of greedy completions
        yield DEFAULT_SET, [*evaluation.greedy, *evaluation.sampled], values
    for name, episodes in evaluation.sets.items():
        own = cfg.data.val_sets[name]
        yield name, list(episodes), _values_of(episodes, own.n, own.reward.success_threshold)


def _values_of(episodes: Sequence[Episode], n: int, threshold: float) -> dict[str, dict[str, float]]:
    """Return the values of each row by measure, such as `accuracy`; `reward/<term>` is the mean of a term.

    A term that a completion lacks counts as 0 there.
    """
    values = {**row_values(rewards_by_row(episodes, n), threshold)}
    rows = [episodes[i : i + n] for i in range(0, len(episodes), n)]
    known = {row: [e.rewards for e in group if e.reward is not None] for row, group in enumerate(rows)}
    for term in sorted({term for terms in known.values() for one in terms for term in one}):
        values[f"reward/{term}"] = {
            row: fmean(one.get(term, 0.0) for one in terms) for row, terms in known.items() if terms
        }
    return {measure: {str(row): value for row, value in by_row.items()} for measure, by_row in values.items()}


def _settings(cfg: Config) -> dict[str, str]:
    """Return digests of the settings that decide what an evaluation measures, by key; of the code that they name; and
    of the rows of all sets: files of the same names may have others by now."""
    flat = flatten(redact(asdict(cfg), references=False), whole=is_open)
    deciding = ("rollouts", "never", "validation")
    settings = {
        key: flat[key]
        for key, rule in resume_rules(cfg).items()
        if key in flat and cfg.reads(key) and (key.startswith("data.") or rule.change in deciding)
    }
    settings.pop("model.path", None)  # its weights decide
    code = {f"code of {path}": found for path, found in code_in(settings).items()}
    rows = {
        f"content of {name}": digest_rows(read_examples(cfg.of_source(source).data, "val", as_rows=True))
        for name, source in _sources_of(cfg).items()
    }
    return {key: digest(value) for key, value in settings.items()} | code | rows


def read_results(directory: str) -> Results | None:
    """Return the evaluation in a directory; None: there is none.

    Raises:
        UserError: its file is damaged, or of another version.
    """
    path = os.path.join(directory, RESULTS_FILE)
    try:
        with open(path, "rb") as file:
            found = Results(**parse_object(file.read(), {"sets": {str: dict}}))
        found.sets = {name: SetResult(**result) for name, result in found.sets.items()}  # type: ignore[arg-type]
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); delete {directory}, and evaluate again") from error


def write_episodes(
    directory: str, name: str, step: int, episodes: Sequence[Episode], fence: Callable[[], None]
) -> None:
    """Write the episodes of a set to `{directory}/rollouts/{name}.arrow`, as records of the journal."""
    os.makedirs(os.path.join(directory, FOLDER), exist_ok=True)
    try:
        data = encode(step, episodes)
    except ValueError as error:
        raise UserError(f"data.val_sets: the episodes of {name} cannot be written ({error})") from error
    write_file(os.path.join(directory, FOLDER, f"{name}.arrow"), data, fence)


def print_results(results: Results) -> None:
    """Print a table: one line for each measure of each set, with its interval of 95 %."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = []
    for name, result in results.sets.items():
        for measure, by_row in result.values.items():
            if by_row:
                mean = mean_estimate(list(by_row.values()))
                interval = f"{mean.low:.4g} to {mean.high:.4g}"
                rows.append((name, str(mean.rows), measure, f"{mean.value:.4g}", interval))
    table = Table("set", "rows", "measure", "value", "95 % interval")
    for row in rows:
        table.add_row(*(Text(escape(cell, lines=False)) for cell in row))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)
    for name, result in results.sets.items():
        length = result.tokens / max(1, result.completions)
        failures = f", {result.failures} failed" if result.failures else ""
        show(f"{name}: {result.completions} completions of {len(result.rows)} rows, {length:.1f} tokens each{failures}")
