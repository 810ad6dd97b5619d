"""What a run has left behind: metrics, best value, checkpoints, exports, report; and what a checkpoint holds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape, glob
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import read_config
from trainer.checkpoint.inspection import find_store
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import Checkpoint, step_in
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import open_store
from trainer.errors import UserError
from trainer.metrics import tracker
from trainer.metrics.best import Best, find_best

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as it is on disk when `train` returns."""

    run_dir: str
    """Directory of the run."""
    status: str
    """`finished`, or `stopped`: the run was saved early, and the same call continues it."""
    best: Best | None
    """The best value of `trainer.best_metric`, with its step; None if no step has measured it."""
    checkpoints: list[str]
    """The checkpoints, oldest first."""
    exports: list[str]
    """The exported policies in Hugging Face format, oldest first."""
    report: str | None
    """The picture of the metrics."""
    rows: Sequence[dict[str, Any]] = field(repr=False)
    """The lines of `metrics.jsonl`, read when they are used."""

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row for each step, one column for each metric, and the column `step`."""
        return _as_table(self.rows)


def describe_result(paths: dict[str, str], status: str) -> RunResult:
    """Return the result of a run.

    Args:
        paths: `run_dir`, `ckpt_path` and `export_path` of its config; `best_metric` and `best_mode`: of the comparison.
        status: `finished` or `stopped`.
    """
    run_dir, store = paths["run_dir"], open_store(paths["ckpt_path"])
    rows = tracker.MetricsLines(os.path.join(run_dir, tracker.METRICS_FILE))
    best = find_best(rows.having(paths["best_metric"]), paths["best_metric"], paths["best_mode"])
    checkpoints = [store.path(step) for step in store.steps()]
    exports = glob(os.path.join(escape(paths["export_path"]), "global_step_*", "policy"))
    exports.sort(key=lambda path: step_in(os.path.dirname(path)) or 0)
    report = os.path.join(run_dir, "report.png")
    return RunResult(run_dir, status, best, checkpoints, exports, report if os.path.exists(report) else None, rows)


def read_metrics(run: str | os.PathLike[str]) -> pandas.DataFrame:
    """Return the metrics of a run as a table: one row for each step, one column for each metric, and `step`.

    The run may still be running.

    Raises:
        UserError: there are no metrics, or a line of them is damaged.
    """
    path = os.fspath(run)
    file = os.path.join(path, tracker.METRICS_FILE) if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise UserError(f"{path}: no metrics are there; name a run directory, which holds {tracker.METRICS_FILE}")
    return _as_table(tracker.MetricsLines(file))


def _as_table(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    import pandas

    table = pandas.DataFrame(list(rows))
    return table[sorted(table, key=lambda name: (name != "step", name))]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose files are as they were saved. Nothing in it is executed."""

    path: str
    """Its `global_step_N` directory."""
    step: int
    """The step after which it was saved."""
    _checkpoint: Checkpoint = field(repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the run, by section."""
        return read_config(self._checkpoint)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The state of the trainer: step, counters, best value, KL controller, random states."""
        return manifests.read_object(self._checkpoint, "trainer_state.json")

    def policy_state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the policy on the CPU, with the names and types of the trained model.

        Adapters have the names that peft gives them; see `model` for the merged weights.
        """
        from trainer.checkpoint.tensors import NamedFiles
        from trainer.models.export_weights import read_policy

        return read_policy(NamedFiles(self._checkpoint))

    def model(self, dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
        """Return the policy as a model of transformers, on the CPU. Adapters are merged.

        Args:
            dtype: `auto` (the dtype in the model's config), `float32`, `bfloat16` or `float16`.
            trust_remote_code: execute the model's code that the checkpoint holds, if there is any.
        """
        from trainer.checkpoint.tensors import NamedFiles
        from trainer.models.export_weights import DTYPES, export
        from trainer.models.loading import load_pretrained

        if dtype not in ("auto", *DTYPES):
            raise UserError(f"dtype={dtype}: must be one of auto, {', '.join(DTYPES)}")
        with tempfile.TemporaryDirectory(prefix="trainer-policy-") as directory:
            target = os.path.join(directory, "policy")
            export(NamedFiles(self._checkpoint), target, dtype)
            return load_pretrained(target, "auto", trust_remote_code)

    def tokenizer(self, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the policy, with the chat template of the run."""
        from transformers import AutoTokenizer

        directory = os.path.join(self.path, "policy", "huggingface")
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_checkpoint(path: str | os.PathLike[str]) -> SavedCheckpoint:
    """Check every byte of a checkpoint, and return it.

    Args:
        path: a `global_step_N` directory; or a run directory or a directory of checkpoints, of which the newest valid
            checkpoint is taken.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    path = os.fspath(path)
    if not open_storage(path).exists():
        raise UserError(f"{path}: no such checkpoint")
    if step_in(path.rstrip("/")) is not None:
        checkpoint: Checkpoint | None = manifests.verify(path, "hash")
    else:
        store = find_store(path)
        checkpoint = store and CheckpointManager(store).latest()
    if checkpoint is None:
        raise UserError(f"{path}: no checkpoint is there or in its checkpoints directory")
    return SavedCheckpoint(checkpoint.path, checkpoint.step, checkpoint)
