"""Build the page of one or several runs, within limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.files.atomic_io import write_file
from trainer.process.log_setup import encodable
from trainer.reports.compare import Run, differing_keys, find_runs, read_run
from trainer.view.episodes import TRAINING, StepData, StepFiles, find_steps, read_step
from trainer.view.page import pack, render
from trainer.view.runs import describe_metrics, describe_run
from trainer.view.vocabulary import Vocabulary, find_tokenizer


@dataclass(frozen=True)
class Limits:
    """What a page holds at most, so that a browser can open it."""

    episodes: int = 20_000
    """Of each run."""
    tokens: int = 20_000_000
    """Of each run."""
    first: int = 0
    """The first step whose episodes are in the page."""
    last: int | None = None
    """The last one; None: there is no last one."""


class Builder:
    """Builds the page of runs.

    Args:
        paths: run directories, or directories that hold several.
    """

    def __init__(self, paths: Sequence[str], limits: Limits):
        self.paths = find_runs(list(paths))
        self.limits = limits
        self.notes: list[str] = []
        """What the page lacks, and why, for people."""

    def write(self, out: str) -> int:
        """Write the page to the file `out`, and return its size in bytes.

        Raises:
            UserError: a file of a run is damaged.
        """
        page = self.page().encode()
        write_file(out, page)
        return len(page)

    def page(self) -> str:
        """Return the page (see `write`)."""
        self.notes = []
        runs = [read_run(path) for path in self.paths]
        chunks: dict[str, str] = {}
        described = []
        for number, (run, name) in enumerate(zip(runs, _names(self.paths), strict=True)):
            steps, vocabulary = self._episodes(run, number, name, chunks)
            described.append(describe_run(run, name) | {"steps": steps, "vocabulary": vocabulary})
        data = {
            "runs": described,
            "metrics": describe_metrics(runs),
            "differing": differing_keys(runs) if len(runs) > 1 else [],
            "notes": self.notes,
        }
        return render(data, chunks)

    def _episodes(self, run: Run, number: int, name: str, chunks: dict[str, str]) -> tuple[list[Any], str | None]:
        """Add the chunks of a run's episodes. Return what the page knows of each step, and the chunk of the texts."""
        limits = self.limits
        found = [
            one
            for one in find_steps(run.path)
            if limits.first <= one.step and (limits.last is None or one.step <= limits.last)
        ]
        vocabulary = self._vocabulary_of(run, name) if any(files.split == TRAINING for files in found) else None
        kept: list[tuple[StepData, dict[str, str]]] = []  # with the parts of the page, packed
        episodes = tokens = left_out = 0
        for files in _spread(found):
            if kept and (episodes >= limits.episodes or tokens >= limits.tokens):
                left_out += 1
                continue
            try:
                data = read_step(files, limits.episodes - episodes, *([vocabulary.decode] if vocabulary else []))
            except (ValueError, OSError) as error:
                self.notes.append(f"the episodes of step {files.step} cannot be read ({error})")
                continue
            if not data.count:
                continue
            parts = {"rows": data.rows, "texts": data.texts, "tokens": data.tokens}
            kept.append((data, {part: pack(value) for part, value in parts.items() if value}))
            data.rows, data.texts, data.tokens = {"uid": data.rows["uid"]}, {}, b""  # the packed form is smaller
            episodes, tokens = episodes + data.count, tokens + data.num_tokens
            if data.left_out:
                self.notes.append(
                    f"{name}: {data.left_out:,} episodes of step {files.step} ({files.split}) are left out "
                    "(--max-episodes)"
                )
        if left_out:
            self.notes.append(
                f"{name}: the episodes of {left_out:,} of {len(found):,} steps are left out, evenly spread "
                "(--max-episodes, --max-tokens; --steps chooses some)"
            )
        steps = []
        for data, packed in sorted(kept, key=lambda one: (one[0].files.split, one[0].files.step)):
            files, key = data.files, f"c{len(chunks)}"
            step = {"step": files.step, "split": files.split, "origin": files.origin, "count": data.count}
            step |= {part: f"{key}-{part}" for part in packed}
            chunks |= {f"{key}-{part}": text for part, text in packed.items()}
            steps.append(step)
        texts = vocabulary.texts(sorted({token for data, _ in kept for token in data.token_ids})) if vocabulary else {}
        if not texts.get("ids"):
            return steps, None
        chunks[f"v{number}"] = pack(texts)
        return steps, f"v{number}"

    def _vocabulary_of(self, run: Run, name: str) -> Vocabulary:
        """Return the vocabulary of a run; an empty one, with a note, if there is none."""
        path = find_tokenizer(run.path, run.config.get("model.path"))
        if path is None:
            self.notes.append(f"{name}: no tokenizer is on this machine, so tokens are shown by their numbers")
            return Vocabulary(None)
        try:
            return Vocabulary(path)
        except (ValueError, OSError) as error:
            self.notes.append(f"{name}: its tokenizer cannot be read ({error})")
            return Vocabulary(None)


def _spread(steps: Sequence[StepFiles]) -> list[StepFiles]:
    """Return the last step, the first one, the middle one, and so on: so many as one takes, they are spread evenly."""
    order = sorted(steps, key=lambda one: one.step)
    found: dict[StepFiles, None] = {}
    parts = 1
    while len(found) < len(order):
        found |= dict.fromkeys(order[round(part * (len(order) - 1) / parts)] for part in range(parts, -1, -1))
        parts *= 2
    return list(found)


def _names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each run; runs of the same name get the end of their path."""
    whole = [os.path.abspath(path).split(os.sep) for path in paths]
    depth = 1
    while depth < max(map(len, whole)) and len({tuple(parts[-depth:]) for parts in whole}) < len(whole):
        depth += 1
    return [encodable("/".join(parts[-depth:])) for parts in whole]
