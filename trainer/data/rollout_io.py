"""Rollouts as data: one run writes the episodes of its steps, and another run learns from them."""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.data.records import decode_groups, encode, unescaped
from trainer.data.row_files import read_rows
from trainer.data.tokens import reply_text
from trainer.episodes import Episode, Sample, TokenScores, split_messages
from trainer.errors import UserError
from trainer.files.atomic_io import write_file
from trainer.files.documents import parse_json
from trainer.files.hf_hub import first_line
from trainer.process.log_setup import ToolParser, run_tool

FOLDER = "rollouts"
_FILE = re.compile(r"step_([1-9][0-9]{0,17})\.arrow")
_JSON = ("messages", "rewards", "metrics")


def write_rollouts(
    run_dir: str,
    step: int,
    episodes: Sequence[Episode],
    fence: Callable[[], None] = lambda: None,
    scores: Sequence[TokenScores] | None = None,
) -> None:
    """Write the episodes of a step atomically to `{run_dir}/rollouts/step_{step}.arrow`, as records of the journal.

    A step that is trained again after a kill writes the same file again.

    Args:
        fence: raises when this process no longer holds the run directory. Then nothing is written there.
        scores: one for each sample of the episodes; None: they are not known.

    Raises:
        UserError: an episode has a value that the format cannot hold.
    """
    fence()
    directory = os.path.join(run_dir, FOLDER)
    os.makedirs(directory, exist_ok=True)
    try:
        data = encode(step, episodes, scores=scores)
    except ValueError as error:
        raise UserError(f"logger.save_rollouts: the rollouts of step {step} cannot be written ({error})") from error
    write_file(os.path.join(directory, f"step_{step}.arrow"), data, fence)


def remove_rollouts(run_dir: str, after: int) -> None:
    """Delete the files of the steps after `after`: these steps are trained again, or never."""
    for step, path in kept_files(run_dir).items():
        if step > after:
            os.remove(path)


def kept_files(run_dir: str) -> dict[int, str]:
    """Return the files that `write_rollouts` has written in a run, by step, in order."""
    folder = os.path.join(run_dir, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = {int(match[1]): os.path.join(folder, match[0]) for match in map(_FILE.fullmatch, names) if match}
    return dict(sorted(found.items()))


def read_lines(file: str) -> Iterator[dict[str, Any]]:
    """Yield the records in a file as people read them: JSON columns as values, messages as prompt and completion.

    Raises:
        UserError: the file has other rows, or is damaged.
    """
    for where, row in read_rows(file, "RUN"):
        try:
            line = {
                name: parse_json(value) if name in _JSON else unescaped(value) if isinstance(value, str) else value
                for name, value in row.items()
                if name != "key"
            }
            prompt, completion = split_messages(line.pop("messages"), row["turns"])
            first = {name: line.pop(name) for name in ("step", "group", "uid")}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"{where} is not a rollout") from error
        yield {**first, "prompt": prompt, "completion": completion, **line}


def read_rollouts(file: str, tokenizer: Any, min_reward: float | None, vocab_size: int | None = None) -> list[Sample]:
    """Return the samples of the rollouts in a file of `write_rollouts` that have at least `min_reward`.

    Raises:
        UserError: see `read_episodes`.
    """
    episodes = read_episodes(file, tokenizer, "sft.source=rollouts", vocab_size)
    if min_reward is None:
        return [sample for episode in episodes for sample in episode.samples]
    # A reward that failed, entirely or in one of its terms, reaches no limit.
    known = (sample for episode in episodes if not episode.failure for sample in episode.samples)
    return [sample for sample in known if sample.reward is not None and sample.reward >= min_reward]


def read_episodes(file: str, tokenizer: Any, key: str, vocab_size: int | None = None) -> Iterator[Episode]:
    """Yield the episodes in a file of `write_rollouts`.

    Args:
        key: and value of the config, by which they are read.
        vocab_size: vocabulary size of the model that learns from them.

    Raises:
        UserError: the file has another format, or was written with another tokenizer or model.
    """
    try:
        with open(file, "rb") as opened:
            groups, _ = decode_groups(opened.read())
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.train_files={file}: holds no rollouts ({first_line(error)}); with {key}, name files step_N.arrow, "
            "which logger.save_rollouts=true makes a run write"
        ) from error
    for number, episode in enumerate((episode for group in groups.values() for episode in group), start=1):
        where = f"{file}, row {number}"
        largest = max((int(token) for sample in episode.samples for token in sample.token_ids), default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise UserError(
                f"{key}: {where} contains token {largest}, and the vocabulary of model.path has "
                f"{vocab_size} tokens; it was written with another model"
            )
        contents = {message["content"] for message in split_messages(episode.messages, episode.turns)[1]}
        replies = (reply for sample in episode.samples for reply in _replies(sample))
        texts = ({reply_text(tokenizer, reply, has_ended) for has_ended in (True, False)} for reply in replies)
        if not all(own & contents for own in texts):
            raise UserError(f"{key}: {where} was written with another tokenizer than that of model.path")
        yield episode


def _replies(sample: Sample) -> list[list[int]]:
    """Return each run of consecutive sampled tokens."""
    runs = itertools.groupby(zip(sample.token_ids, sample.mask, strict=True), key=lambda pair: pair[1] > 0)
    return [[token for token, _ in run] for sampled, run in runs if sampled]


def main(argv: list[str] | None = None) -> int:
    """Print kept rollouts, as `trainer rollouts` does; returns the exit status."""
    parser = ToolParser(prog="trainer rollouts", description="Print kept rollouts as lines of JSON.")
    help = "directory of a run or an evaluation, or a file of its directories rollouts and .journal"
    parser.add_argument("paths", nargs="+", metavar="RUN", help=help)
    parser.add_argument("--no-tokens", action="store_true", help="leave out the samples: token ids, masks, log-probs")

    def tool(args: argparse.Namespace) -> None:
        for path in args.paths:
            if not os.path.exists(path):
                raise UserError(f"{path}: no such file or directory; name the directory of a run or an evaluation")
            of_sets = sorted(glob.glob(os.path.join(glob.escape(path), FOLDER, "*.arrow")))  # of an evaluation
            files = ([*kept_files(path).values()] or of_sets) if os.path.isdir(path) else [path]
            if not files:
                raise UserError(f"{path}: no rollouts are kept there; logger.save_rollouts=true makes a run keep them")
            for line in (line for file in files for line in read_lines(file)):
                if args.no_tokens:
                    del line["samples"]
                print(json.dumps(line))

    return run_tool(parser, tool, argv)
