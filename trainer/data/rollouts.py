"""Rollouts as data: one run writes the episodes of its steps, and another run learns from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.datasets import Prompt, read_rows
from trainer.durable import write_file
from trainer.episodes import Episode
from trainer.errors import UserError

_IDS = ("prompt_ids", "completion_ids")


def write_rollouts(
    run_dir: str,
    step: int,
    prompts: Sequence[Prompt],
    episodes: Sequence[Episode],
    texts: Sequence[str],
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Write `{run_dir}/rollouts/step_{step}.jsonl`, whole or not at all: one line an episode.

    A step that is replayed after a kill writes the same file again.

    Args:
        episodes: as many for each prompt, those of one prompt together.
        texts: of the completions, as the reward saw them.
        fence: raises when this process no longer holds the run directory; then nothing is written there.
    """
    fence()
    directory = os.path.join(run_dir, "rollouts")
    os.makedirs(directory, exist_ok=True)
    n = len(episodes) // len(prompts)
    lines = []
    for i, (episode, text) in enumerate(zip(episodes, texts, strict=True)):
        prompt, (sample,) = prompts[i // n], episode.samples
        start = len(prompt.token_ids)
        line = {
            "step": step,
            "uid": episode.group,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "completion": text,
            "reward": episode.reward,
            "finish_reason": episode.status,
            "prompt_ids": list(prompt.token_ids),
            "completion_ids": sample.token_ids[start:].tolist(),
            "logprobs": sample.logprobs[start:].tolist(),
        }
        lines.append(json.dumps(line) + "\n")
    write_file(os.path.join(directory, f"step_{step}.jsonl"), "".join(lines), fence)


def write_conversations(
    run_dir: str,
    step: int,
    episodes: Sequence[Episode],
    messages: Sequence[Sequence[Mapping[str, Any]]],
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Write the episodes of a step as `write_rollouts` does: their turns, and the tokens of their samples.

    Args:
        messages: of each episode.
    """
    fence()
    directory = os.path.join(run_dir, "rollouts")
    os.makedirs(directory, exist_ok=True)
    lines = []
    for episode, chat in zip(episodes, messages, strict=True):
        samples = [
            {
                "token_ids": sample.token_ids.tolist(),
                "mask": sample.mask.astype(int).tolist(),
                "logprobs": [] if sample.logprobs is None else sample.logprobs.tolist(),
            }
            for sample in episode.samples
        ]
        line = {
            "step": step,
            "uid": episode.group,
            "messages": list(chat),
            "reward": episode.reward,
            "finish_reason": episode.status,
            "samples": samples,
        }
        lines.append(json.dumps(line) + "\n")
    write_file(os.path.join(directory, f"step_{step}.jsonl"), "".join(lines), fence)


def read_rollouts(
    file: str, tokenizer: Any, min_reward: float | None, vocab_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the rollouts of a file of `write_rollouts` that have at least `min_reward`.

    Args:
        vocab_size: of the model that learns from them.

    Raises:
        UserError: it is no such file, or was written with another tokenizer or model.
    """
    kept = []
    for where, row in read_rows(file, "data.train_files"):
        if not _is_rollout(row):
            raise UserError(f"sft.source=rollouts: {where} is no rollout; logger.rollouts=true makes a run write them")
        highest = max(row["prompt_ids"] + row["completion_ids"], default=0)
        if vocab_size is not None and highest >= vocab_size:
            raise UserError(
                f"sft.source=rollouts: {where} holds token {highest}, and model.path knows "
                f"{vocab_size}; it was written with another model"
            )
        if tokenizer.decode(row["completion_ids"], skip_special_tokens=True) != row["completion"]:
            raise UserError(f"sft.source=rollouts: {where} was written with another tokenizer than that of model.path")
        if min_reward is None or row["reward"] >= min_reward:
            kept.append(row)
    return kept


def _is_rollout(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(k), list) and all(type(i) is int and i >= 0 for i in row[k]) for k in _IDS)
        and isinstance(row.get("logprobs"), list)
        and len(row["logprobs"]) == len(row["completion_ids"])
        and all(map(_is_number, row["logprobs"]))
        and _is_number(row.get("reward"))
        and isinstance(row.get("completion"), str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
