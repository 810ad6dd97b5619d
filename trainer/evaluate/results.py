"""The directory of an evaluation: its transcripts, and `evaluation.json` with what was measured of each row."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from trainer.data.records import encode
from trainer.data.rollout_io import FOLDER
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.files.atomic_io import write_file
from trainer.files.documents import parse_object
from trainer.metrics.estimates import mean_estimate
from trainer.process.log_setup import escape, show

RESULTS_FILE = "evaluation.json"
DEFAULT_SET = "default"
"""Name of the prompts of `data.val_files`, or of the generator, which belong to no named set."""
CODE, CONTENT = "code of ", "content of "
"""Beginnings of names in `Results.settings`: the digests of a file that a setting names by import path, and of a set.
"""


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
