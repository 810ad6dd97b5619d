"""Rollouts as data: one run writes the episodes of its steps, and another run learns from them."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.data.datasets import read_rows
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.files.atomic_io import write_file

_IDS = ("prompt_ids", "completion_ids")


def write_rollouts(
    run_dir: str, step: int, episodes: Sequence[Episode], fence: Callable[[], None] = lambda: None
) -> None:
    """Write `{run_dir}/rollouts/step_{step}.jsonl` atomically, with one line for each single-turn episode.

    Prompt and completion are lists of messages, as in the files of validations and in chats to learn from. A step that
    is replayed after a kill writes the same file again.

    Args:
        fence: raises when this process no longer holds the run directory. Then nothing is written there.
    """
    lines = []
    for episode in episodes:
        (sample,) = episode.samples
        start = int(np.append(sample.mask, 1).argmax())  # the completion follows the prompt
        assert sample.logprobs is not None
        lines.append(
            {
                "step": step,
                "uid": episode.group,
                "prompt": list(episode.messages[:-1]),
                "answer": episode.answer,
                "completion": [episode.messages[-1]],
                "reward": episode.reward,
                "rewards": dict(episode.rewards),
                "finish_reason": episode.status,
                "failure": episode.failure or None,
                "prompt_ids": sample.token_ids[:start].tolist(),
                "completion_ids": sample.token_ids[start:].tolist(),
                "logprobs": sample.logprobs[start:].tolist(),
            }
        )
    _write(run_dir, step, lines, fence)


def write_conversations(
    run_dir: str, step: int, episodes: Sequence[Episode], fence: Callable[[], None] = lambda: None
) -> None:
    """Write the episodes of a step as `write_rollouts` does: their turns, and the tokens of their samples."""
    lines = []
    for episode in episodes:
        prompt, completion = episode.split_messages()
        samples = [
            {
                "token_ids": sample.token_ids.tolist(),
                "mask": sample.mask.astype(int).tolist(),
                "logprobs": [] if sample.logprobs is None else sample.logprobs.tolist(),
            }
            for sample in episode.samples
        ]
        lines.append(
            {
                "step": step,
                "uid": episode.group,
                "prompt": list(prompt),
                "completion": list(completion),
                "reward": episode.reward,
                "rewards": dict(episode.rewards),
                "metrics": dict(episode.metrics),
                "finish_reason": episode.status,
                "failure": episode.failure or None,
                "samples": samples,
            }
        )
    _write(run_dir, step, lines, fence)


def _write(run_dir: str, step: int, lines: Sequence[Mapping[str, Any]], fence: Callable[[], None]) -> None:
    fence()
    directory = os.path.join(run_dir, "rollouts")
    os.makedirs(directory, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_file(os.path.join(directory, f"step_{step}.jsonl"), text, fence)


def read_rollouts(
    file: str, tokenizer: Any, min_reward: float | None, vocab_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the tokens, masks and log-probs of the rollouts in a file that have at least `min_reward`.

    The file was written by `write_rollouts` or `write_conversations`. Each sample of a multi-turn episode is one
    rollout.

    Args:
        vocab_size: vocabulary size of the model that learns from them.

    Raises:
        UserError: the file has another format, or was written with another tokenizer or model.
    """
    selected = []
    for where, row in read_rows(file, "data.train_files"):
        samples = _samples(row)
        if not samples:
            raise UserError(
                f"sft.source=rollouts: {where} is not a rollout; logger.save_rollouts=true makes a run write them"
            )
        largest = max((token for sample in samples for token in sample["token_ids"]), default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise UserError(
                f"sft.source=rollouts: {where} contains token {largest}, and the vocabulary of model.path has "
                f"{vocab_size} tokens; it was written with another model"
            )
        replies = [text for sample in samples for text in _replies(sample, tokenizer)]
        contents = [message["content"] for message in _messages(row) or []]
        if not all(reply in contents for reply in replies):
            raise UserError(f"sft.source=rollouts: {where} was written with another tokenizer than that of model.path")
        # A reward that failed, entirely or in one of its terms, reaches no limit.
        if min_reward is None or (not row.get("failure") and row["reward"] >= min_reward):
            selected += samples
    return selected


def _samples(row: Any) -> list[dict[str, Any]]:
    """Return the samples of a line, or an empty list if the line is not a rollout."""
    if not isinstance(row, dict) or not (_is_number(row.get("reward")) or row.get("failure")):
        return []
    if _is_rollout(row):
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        zeros = [0.0] * len(prompt)
        mask, logprobs = zeros + [1.0] * len(completion), zeros + row["logprobs"]
        return [{"token_ids": prompt + completion, "mask": mask, "logprobs": logprobs}]
    samples = row.get("samples")
    return samples if isinstance(samples, list) and all(map(_is_sample, samples)) and _messages(row) is not None else []


def _messages(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages with the policy's replies, or None if they cannot be read.

    Earlier versions wrote a completion as text, and the messages of several turns as `messages`.
    """
    completion = row.get("completion", row.get("messages"))
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    readable = isinstance(completion, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in completion
    )
    return completion if readable else None


def _replies(sample: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return the text of each run of consecutive sampled tokens."""
    runs = itertools.groupby(zip(sample["token_ids"], sample["mask"], strict=True), key=lambda pair: pair[1] > 0)
    replies = [[token for token, _ in run] for sampled, run in runs if sampled]
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in replies]


def _is_sample(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    columns = [value.get(name) for name in ("token_ids", "mask", "logprobs")]
    return (
        all(isinstance(column, list) and all(map(_is_number, column)) for column in columns)
        and len({len(column) for column in columns}) == 1
        and all(type(token) is int and token >= 0 for token in value["token_ids"])
    )


def _is_rollout(row: Any) -> bool:
    return (
        all(isinstance(row.get(k), list) and all(type(i) is int and i >= 0 for i in row[k]) for k in _IDS)
        and isinstance(row.get("logprobs"), list)
        and len(row["logprobs"]) == len(row["completion_ids"])
        and all(map(_is_number, row["logprobs"]))
        and _messages(row) is not None
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
