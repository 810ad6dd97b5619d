"""Supervised examples: chats and rollouts as tokens, with a mask of the tokens to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.datasets import Example, as_messages, read_parts, render_text
from trainer.data.limits import beginning
from trainer.data.rollout_io import read_rollouts
from trainer.episodes import Sample
from trainer.errors import UserError


def load_train(data: DataConfig, sft: SFTConfig, tokenizer: Any, vocab_size: int | None = None) -> list[list[Sample]]:
    """Return the training examples, one list per data set.

    With `sft.weights` each file is a data set; else all files form one. Examples without a token to learn are left
    out: the limit has cut off the whole answer, or the reward is too low.

    Raises:
        UserError: the data cannot be read, or a data set has nothing to learn.
    """
    if sft.source == "rollouts":
        left = None if data.train_size < 0 else data.train_size
        encoded = []
        for file in data.train_files:
            part = read_rollouts(file, tokenizer, sft.min_reward, vocab_size)[:left]
            encoded.append([_encode_rollout(row, sft) for row in part])
            left = None if left is None else left - len(part)
    else:
        encoded = [[encode(e, tokenizer, data.system_prompt, sft) for e in part] for part in read_parts(data, "train")]
    kept = [[example for example in part if example.mask.any()] for part in encoded]
    if not sft.weights:
        encoded, kept = [[e for part in encoded for e in part]], [[e for part in kept for e in part]]
    for i, (all_of_it, part) in enumerate(zip(encoded, kept, strict=True)):
        if not part:
            where = data.train_files[i] if sft.weights else "training"
            if not all_of_it and (sft.source == "examples" or sum(map(len, encoded)) == data.train_size):
                raise UserError(
                    f"data.train_size={data.train_size}: leaves nothing of {where}, which sft.weights names"
                )
            if not all_of_it:
                raise UserError(f"sft.min_reward={sft.min_reward}: no rollout of {where} has that much")
            roles = ",".join(sft.train_on)
            raise UserError(
                f"sft.max_length={sft.max_length}: all {len(all_of_it)} {where} prompts fill it, or hold "
                f"nothing of sft.train_on={roles}, which leaves nothing to learn"
            )
    return kept


def load_val(data: DataConfig, sft: SFTConfig, tokenizer: Any) -> list[Sample]:
    """Return the held-out examples that have a token to learn.

    Raises:
        UserError: the data cannot be read, or no example has a token to learn.
    """
    encoded = [encode(e, tokenizer, data.system_prompt, sft) for part in read_parts(data, "val") for e in part]
    kept = [example for example in encoded if example.mask.any()]
    if not kept:
        raise UserError(
            f"sft.max_length={sft.max_length}: none of {len(encoded)} held-out examples has anything to "
            "learn; raise it, or set trainer.val_interval=-1"
        )
    return kept


def encode(example: Example, tokenizer: Any, system_prompt: str | None, sft: SFTConfig) -> Sample:
    """Render the example as a chat, cut it to `sft.max_length`, and mask the messages of the roles `sft.train_on`.

    The answer (the last message) is tokenised as the policy would have generated it: by itself, after the generation
    prompt, with the end token. In earlier messages the content is learnt, and an end token that follows it.

    Raises:
        UserError: the chat template changes a message, so its tokens cannot be found.
    """
    messages = as_messages(example["prompt"], system_prompt)
    text = render_text(tokenizer, messages, add_generation_prompt=True)
    spans = _spans(tokenizer, text, messages, sft.train_on)
    if spans:
        if not tokenizer.is_fast:
            raise UserError(
                f"sft.train_on={','.join(sft.train_on)}: the tokenizer cannot tell which tokens are whose; "
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
    """Find the contents of the messages of these roles in the rendered chat `text`, as (begin, end) of characters.

    The same chat is rendered with other contents, which shows the text between the contents.
    """
    if not any(message["role"] in roles for message in messages):
        return []
    marks = [f"[message {i} of the chat]" for i in range(len(messages))]
    others = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = render_text(tokenizer, others, add_generation_prompt=True)
    between = []
    for mark in marks:
        piece, _, rest = rest.partition(mark)
        between.append(piece)
    between.append(rest)
    spans, position = [], len(between[0])
    for i, message in enumerate(messages):
        content, end = message["content"], between[i + 1]
        # Templates strip, and take the reasoning out of earlier turns.
        known_as = (content, content.strip(), content.rpartition("</think>")[2].strip())
        shown = next((c for c in known_as if text.startswith(c + end, position)), None)
        if shown is None or not text.startswith(between[0]):
            raise UserError(
                f"sft.train_on={','.join(roles)}: the chat template changes message {i + 1} "
                f"({content[:40]!r}), so its tokens cannot be told from the others'"
            )
        if message["role"] in roles and shown:
            spans.append((position, position + len(shown)))
        position += len(shown) + len(end)
    return spans


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[float]:
    """Return 1 for each token that has a character in one of the spans, which are in order."""
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
