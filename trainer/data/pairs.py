"""Pairs of a better and a worse answer to one prompt, as tokens with a mask of what is compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from trainer.config import DataConfig
from trainer.data.chats import Message, PromptCheck, read_chat
from trainer.data.datasets import as_messages, beside, read_examples, where_of
from trainer.data.sft_dataset import encode_chat
from trainer.data.turns import Row, Stops
from trainer.episodes import Sample
from trainer.errors import UserError

LOG = logging.getLogger(__name__)
_ANSWERS = ("chosen_key", "rejected_key")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Columns of rows with more than text, which no model here reads."""


@dataclass(frozen=True)
class Pair:
    """One row of preferences."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0
    """By how much the score of the chosen answer should be higher."""

    @property
    def samples(self) -> tuple[Sample, Sample]:
        return self.chosen, self.rejected


def load_pairs(
    data: DataConfig, split: str, tokenizer: Any, stops: Collection[int], limit: tuple[str, int], cuts: bool
) -> list[Pair]:
    """Return the pairs of `train` or `val`.

    The mask of an answer is 1 for what the policy would write: its replies, stop tokens included.

    Args:
        stops: the tokens that end a reply.
        limit: the most tokens of prompt and answer, after the name of its key.
        cuts: cut a longer answer. False: leave the pair out.

    Raises:
        UserError: a row cannot be read, or no pair is left.
    """
    key, longest = limit
    ends, pairs, total, long = Stops(tokenizer, stops), list[Pair](), 0, 0
    check = PromptCheck(tokenizer, (data.name_of("system_prompt"), data.system_prompt))
    for index, row in enumerate(read_examples(data, split, as_rows=True)):
        where = partial(where_of, data, split, index)
        rows = _encode(row, where, data, tokenizer, ends, longest + 1, check)
        total += 1
        is_long = any(len(one.token_ids) > longest for one in rows)
        long += is_long
        samples = [
            Sample(np.asarray(one.token_ids[:longest], np.int32), np.asarray(one.mask[:longest], np.float32))
            for one in rows
        ]
        if (cuts or not is_long) and _can_be_compared(*samples):
            pairs.append(Pair(*samples, margin=_margin(row, where, data)))
    check.close()
    if not pairs:
        raise UserError(f"{key}={longest}: leaves no {split} pair of {total}; raise it, or look at the answers")
    if long or len(pairs) < total:
        LOG.warning(
            "%d of %d %s pairs have an answer longer than %s=%d%s; %d pairs are left out",
            *(long, total, split, key, longest, ", which is cut" if cuts else "", total - len(pairs)),
        )
    return pairs


def _encode(
    row: Any, where: Callable[[], str], data: DataConfig, tokenizer: Any, ends: Stops, most: int, check: PromptCheck
) -> list[Row]:
    """Return the two answers of a row after their prompt, at least the first `most` tokens of each."""
    prompt, *answers = read_pair(row, where, data)
    before = as_messages(prompt, data.system_prompt)
    tools, variables = beside({"row": row}, where)
    rows: list[Row] = []
    try:
        for answer in answers:
            messages = [*before, *answer]
            learnt = [i for i in range(len(before), len(messages)) if messages[i]["role"] == "assistant"]
            made = encode_chat(tokenizer, messages, learnt, tools, variables, most, ends)
            if len(made) > 1:
                raise UserError("the chat template writes a reply of the answer in another way once others follow")
            rows += made
        check.add(before, rows[0].prompt, rows[0].token_ids, where)
    except UserError as error:
        raise UserError(f"{data.name_of('chosen_key')}={data.chosen_key}: {where()}: {error}") from error
    return rows


def _can_be_compared(chosen: Sample, rejected: Sample) -> bool:
    has_tokens = chosen.mask.any() and rejected.mask.any()
    return bool(has_tokens) and not np.array_equal(chosen.token_ids, rejected.token_ids)


def read_pair(row: Any, where: Callable[[], str], data: DataConfig) -> tuple[list[Message], ...]:
    """Return the messages of the prompt, and those of the chosen and of the rejected answer after it.

    Answers are texts, or lists of messages, which may begin with the prompt. Without a prompt, it is what the two lists
    have in common at their begin.

    Raises:
        UserError: names the row, the column and what is wrong.
    """

    def refuse(key: str, problem: str) -> NoReturn:
        raise UserError(f"{data.name_of(key)}={getattr(data, key)}: {where()} {problem}")

    if not isinstance(row, Mapping):
        refuse("chosen_key", "must be an object with a better and a worse answer")
    if media := next((name for name in _MEDIA if row.get(name)), None):
        refuse("prompt_key", f"has {media}, and pairs are text alone; leave such rows out")
    answers = [_read(row, key, data, refuse) for key in _ANSWERS]
    prompt = _read(row, "prompt_key", data, refuse) if row.get(data.prompt_key) is not None else None
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        refuse("rejected_key", f"must be of the same kind as {data.chosen_key}: a text, or a chat")
    if isinstance(answers[0], str):
        if not prompt:
            refuse("prompt_key", "must have the prompt of these answers there; only whole chats need none")
        split = as_messages(prompt, None), *([{"role": "assistant", "content": answer}] for answer in answers)
    else:
        split = _split(prompt, *answers)
    for key, answer in zip(_ANSWERS, split[1:], strict=True):
        if answer[-1]["role"] != "assistant" or not (answer[-1]["content"] or "tool_calls" in answer[-1]):
            refuse(key, "must end with a message of the assistant that is not empty")
    if not split[0]:
        refuse("prompt_key", "must have a prompt there, or two chats that begin with the same messages")
    if split[1] == split[2]:
        refuse("rejected_key", f"has the same answer as {data.chosen_key}; leave such rows out")
    return split


def _read(row: Mapping[str, Any], key: str, data: DataConfig, refuse: Callable[[str, str], NoReturn]) -> Any:
    """Return the text or the messages in the column that `key` names."""
    column = getattr(data, key)
    if column not in row:
        refuse(key, f"has no such column; it has {', '.join(map(str, row))}")
    value = row[column]
    chat = value if isinstance(value, str) else read_chat(value)
    if chat is None:
        refuse(key, "must have a text there, or a list of chat messages with role and content")
    return chat


def _split(prompt: Any, chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], ...]:
    """Return the prompt, and what follows it in both chats."""
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    if prompt is None:
        return chosen[:common], chosen[common:], rejected[common:]
    messages = as_messages(prompt, None)
    for length in range(common, 0, -1):
        said = chosen[:length]
        if said == messages or isinstance(prompt, str) and said[-1] == messages[0]:
            return said, chosen[length:], rejected[length:]
    return messages, chosen, rejected


def _margin(row: Mapping[str, Any], where: Callable[[], str], data: DataConfig) -> float:
    value = row.get(data.margin_key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{data.name_of('margin_key')}={data.margin_key}: {where()} must have a number there, or null")
    return float(value)
