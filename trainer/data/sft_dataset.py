"""Supervised examples: chats and rollouts as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.datasets import Example, as_messages, read_files, render_text
from trainer.data.limits import beginning
from trainer.data.rollout_io import read_rollouts
from trainer.episodes import Sample
from trainer.errors import UserError


def load_train(data: DataConfig, sft: SFTConfig, tokenizer: Any, vocab_size: int | None = None) -> list[list[Sample]]:
    """Return the training examples, one list per data set.

    With `sft.weights`, each file is a data set. Otherwise all files form one data set. Examples whose loss mask is all
    0 are dropped: the limit has cut off the complete answer, or the reward is too low.

    Raises:
        UserError: the data cannot be read, or a data set has no examples left.
    """
    if sft.source == "rollouts":
        remaining = None if data.train_size < 0 else data.train_size
        encoded = []
        for file in data.train_files:
            rollouts = read_rollouts(file, tokenizer, sft.min_reward, vocab_size)[:remaining]
            encoded.append([_encode_rollout(row, sft) for row in rollouts])
            remaining = None if remaining is None else remaining - len(rollouts)
    else:
        datasets = read_files(data, "train")
        encoded = [[encode(example, tokenizer, data.system_prompt, sft) for example in rows] for rows in datasets]
    usable = [[example for example in dataset if example.mask.any()] for dataset in encoded]
    if not sft.weights:
        encoded, usable = [[e for dataset in encoded for e in dataset]], [[e for dataset in usable for e in dataset]]
    for i, (examples, dataset) in enumerate(zip(encoded, usable, strict=True)):
        if not dataset:
            where = data.train_files[i] if sft.weights else "training"
            if not examples and (sft.source == "examples" or sum(map(len, encoded)) == data.train_size):
                raise UserError(
                    f"data.train_size={data.train_size}: leaves nothing of {where}, which sft.weights names"
                )
            if not examples:
                raise UserError(f"sft.min_reward={sft.min_reward}: no rollout of {where} has that much")
            roles = ",".join(sft.train_on)
            raise UserError(
                f"sft.max_length={sft.max_length}: all {len(examples)} {where} prompts fill it, or contain "
                f"nothing of sft.train_on={roles}, which leaves nothing to learn"
            )
    return usable


def load_val(data: DataConfig, sft: SFTConfig, tokenizer: Any) -> list[Sample]:
    """Return the validation examples whose loss mask is not all 0.

    Raises:
        UserError: the data cannot be read, or there is no such example.
    """
    encoded = [encode(e, tokenizer, data.system_prompt, sft) for rows in read_files(data, "val") for e in rows]
    usable = [example for example in encoded if example.mask.any()]
    if not usable:
        raise UserError(
            f"sft.max_length={sft.max_length}: none of {len(encoded)} validation examples has anything to "
            "learn; raise it, or set trainer.val_interval=-1"
        )
    return usable


def encode(example: Example, tokenizer: Any, system_prompt: str | None, sft: SFTConfig) -> Sample:
    """Render the example as a chat, cut it to `sft.max_length`, and set the loss mask for the roles `sft.train_on`.

    The answer (the last message) is tokenised as the policy would have generated it: separately, after the generation
    prompt, with the end token. In earlier messages, the mask is 1 for the content and for an end token that follows it.

    Raises:
        UserError: the chat template changes a message, so its tokens cannot be found.
    """
    messages = as_messages(example["prompt"], system_prompt)
    text = render_text(tokenizer, messages, add_generation_prompt=True)
    spans = _spans(tokenizer, text, messages, sft.train_on)
    if spans:
        if not tokenizer.is_fast:
            raise UserError(
                f"sft.train_on={','.join(sft.train_on)}: the tokenizer does not map tokens to messages; "
                "only the last message of a chat can be learnt with it"
            )
        text = beginning(tokenizer, text, sft.max_length)
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        prompt, learn = encoding["input_ids"], _mask(encoding["offset_mapping"], spans)
        for i in range(1, len(prompt)):
            if learn[i - 1] and prompt[i] == tokenizer.eos_token_id:
                learn[i] = 1.0
    else:
        prompt = tokenizer.encode(beginning(tokenizer, text, sft.max_length), add_special_tokens=False)
        learn = [0.0] * len(prompt)
    answer = tokenizer.encode(beginning(tokenizer, example["answer"], sft.max_length), add_special_tokens=False)
    answer += [tokenizer.eos_token_id]
    learn += [1.0 if "assistant" in sft.train_on else 0.0] * len(answer)
    return _sample(prompt + answer, learn, None, sft.max_length)


def _spans(
    tokenizer: Any, text: str, messages: Sequence[dict[str, str]], roles: Sequence[str]
) -> list[tuple[int, int]]:
    """Find the contents of the messages of these roles in the rendered chat `text`, as (begin, end) in characters.

    The same chat is rendered with placeholders as contents, which shows the text between the contents.
    """
    if not any(message["role"] in roles for message in messages):
        return []
    placeholders = [f"[message {i} of the chat]" for i in range(len(messages))]
    chat = [{**message, "content": text} for message, text in zip(messages, placeholders, strict=True)]
    rest = render_text(tokenizer, chat, add_generation_prompt=True)
    between = []
    for placeholder in placeholders:
        piece, _, rest = rest.partition(placeholder)
        between.append(piece)
    between.append(rest)
    spans, position = [], len(between[0])
    for i, message in enumerate(messages):
        content, end = message["content"], between[i + 1]
        # Templates strip contents, and remove the reasoning from earlier turns.
        variants = (content, content.strip(), content.rpartition("</think>")[2].strip())
        rendered = next((c for c in variants if text.startswith(c + end, position)), None)
        if rendered is None or not text.startswith(between[0]):
            raise UserError(
                f"sft.train_on={','.join(roles)}: the chat template changes message {i + 1} "
                f"({content[:40]!r}), so its tokens cannot be distinguished from the others'"
            )
        if message["role"] in roles and rendered:
            spans.append((position, position + len(rendered)))
        position += len(rendered) + len(end)
    return spans


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[float]:
    """Return 1 for each token with a character in one of the spans, and 0 for the others. The spans are in order."""
    mask, i = [], 0
    for begin, end in offsets:
        while i < len(spans) and spans[i][1] <= begin:
            i += 1
        mask.append(1.0 if i < len(spans) and end > spans[i][0] and end > begin else 0.0)
    return mask


def _encode_rollout(row: dict[str, Any], sft: SFTConfig) -> Sample:
    return _sample(row["token_ids"], row["mask"], None if sft.max_weight is None else row["logprobs"], sft.max_length)


def _sample(token_ids: list[int], mask: list[float], logprobs: list[float] | None, max_length: int) -> Sample:
    return Sample(
        np.asarray(token_ids[:max_length], np.int32),
        np.asarray(mask[:max_length], np.float32),
        None if logprobs is None else np.asarray(logprobs[:max_length]),
    )
