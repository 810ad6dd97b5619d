"""The batch of a step: its episodes and the rows that it uses up; and how a checkpoint holds batches of steps ahead."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from trainer.checkpoint.components import Component, Restore
from trainer.checkpoint.manifest import Checkpoint, FileEntry, reading
from trainer.checkpoint.storage import Storage
from trainer.data.ledger import SampleIndex
from trainer.data.records import decode_groups, encode
from trainer.episodes import Episode
from trainer.files.documents import is_count, parse_object

LOG = logging.getLogger(__name__)

_PART = "ahead"
_FILE = re.compile(rf"{_PART}/step_([1-9]\d*)\.arrow")
_OF_WEIGHTS = {"weights", "data", "state"}
"""A resume that restores these continues with the weights, rows and steps to which the batches belong."""
_SHAPE: dict[Any, Any] = {
    "used": [{"dataset": is_count, "epoch": is_count, "index": is_count, "reward": (float, int, NoneType)}],
    "metrics": {str: (float, int)},
    "settings": {str: str},
}


@dataclass(frozen=True)
class UsedRow:
    """A row that a step uses up: it trains on the row, or dynamic sampling has filtered the row out."""

    index: SampleIndex
    reward: float | None
    """Mean over the episodes. None: all rewards failed."""


@dataclass(frozen=True)
class StepBatch:
    """The episodes of a step, with their rewards. Those of one group are together."""

    episodes: list[Episode]
    used: list[UsedRow]  # the rows that the step uses up, in the order of the ledger
    metrics: dict[str, float]


def encode_batch(step: int, batch: StepBatch, settings: Mapping[str, str]) -> bytes:
    """Return a batch as an Arrow IPC file. The same batch gives the same bytes.

    Args:
        settings: digests of those that decide rollouts and rewards, by key.
    """
    used = [{**vars(row.index), "reward": row.reward} for row in batch.used]
    about = {"used": used, "metrics": batch.metrics, "settings": dict(settings)}
    return encode(step, batch.episodes, about={"batch": json.dumps(about)})


def decode_batch(data: bytes) -> tuple[StepBatch, dict[str, str]]:
    """Return the batch of a file, and the digests of the settings that it was made with.

    Raises:
        ValueError: the file is damaged.
    """
    groups, about = decode_groups(data)
    content = parse_object(about.get("batch", "null"), _SHAPE)
    used = [UsedRow(SampleIndex(row["dataset"], row["epoch"], row["index"]), row["reward"]) for row in content["used"]]
    episodes = [episode for group in groups.values() for episode in group]
    return StepBatch(episodes, used, content["metrics"]), content["settings"]


def ahead_component(
    settings: Mapping[str, str],
    finishing: Callable[[], Mapping[int, Callable[[], StepBatch]]],
    hold: Callable[[Mapping[int, StepBatch]], None],
    works_ahead: bool = True,
) -> Component:
    """Make the component that holds the finished batches of steps ahead: the weights that sampled them are gone.

    Args:
        settings: digests of those that decide rollouts and rewards, by key. Batches of others are not restored. Code
            and models are not compared: the checkpoint has the weights, and an edit of a reward must not cost what only
            they can sample.
        finishing: returns, for each step ahead whose weights are gone, a function that waits for its batch.
        hold: takes the batches of a checkpoint.
        works_ahead: this run makes batches ahead. False: the log does not say that a checkpoint has none.
    """

    def begin(staging: Storage) -> Callable[[], list[FileEntry]]:
        waits = finishing()

        def write() -> list[FileEntry]:
            return [
                staging.write(f"{_PART}/step_{step}.arrow", encode_batch(step, wait(), settings))
                for step, wait in waits.items()
            ]

        return write

    def load(checkpoint: Checkpoint, restore: Restore) -> None:
        paths = [entry["path"] for entry in checkpoint.manifest["files"]]
        names = {int(match[1]): path for path in paths if (match := _FILE.fullmatch(path))}
        batches: dict[int, StepBatch] = {}
        changed: set[str] = set()
        for step, path in sorted(names.items()):
            with reading(checkpoint.path, path):
                batches[step], saved = decode_batch(checkpoint.files.get(path))
            changed |= {key for key in settings if saved.get(key) != settings[key]}
        if batches and (changed or not restore.kinds >= _OF_WEIGHTS):
            first, last = min(batches), max(batches)
            LOG.warning(
                "%s: its rollouts of %s are of other %s, and are generated again",
                checkpoint.path,
                f"step {first}" if len(batches) == 1 else f"steps {first} to {last}",
                ", ".join(sorted(changed)) or "weights",
            )
            batches = {}
        hold(batches)

    return Component(_PART, begin, load, ("data",), "holds no rollouts of steps ahead" if works_ahead else "")
