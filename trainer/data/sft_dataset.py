"""Supervised examples: chats and rollouts as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.chats import PromptCheck
from trainer.data.datasets import Example, as_messages, beside, read_files, render_text, where_of
from trainer.data.limits import beginning
from trainer.data.rollout_io import read_rollouts
from trainer.data.turns import Row, Stops, Write, replies_of
from trainer.episodes import Sample
from trainer.errors import UserError


def load_train(
    data: DataConfig, sft: SFTConfig, tokenizer: Any, stops: Collection[int], vocab_size: int | None = None
) -> list[list[Sample]]:
    """Return the training examples, one list per data set.

    With `sft.weights`, each file is a data set. Otherwise all files form one data set. Examples whose loss mask is all
    0 are dropped: the limit has cut off the complete answer, or the reward is too low.

    Args:
        stops: the tokens that end a reply.

    Raises:
        UserError: the data cannot be read or learnt, or a data set has no examples left.
    """
    if sft.source == "rollouts":
        remaining = None if data.train_size < 0 else data.train_size
        encoded = []
        for file in data.train_files:
            rollouts = read_rollouts(file, tokenizer, sft.min_reward, vocab_size)[:remaining]
            encoded.append([_encode_rollout(row, sft) for row in rollouts])
            remaining = None if remaining is None else remaining - len(rollouts)
    else:
        encoded = _encode_all(data, "train", tokenizer, sft, stops)
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


def load_val(data: DataConfig, sft: SFTConfig, tokenizer: Any, stops: Collection[int]) -> list[Sample]:
    """Return the validation examples whose loss mask is not all 0.

    Raises:
        UserError: the data cannot be read or learnt, or there is no such example.
    """
    encoded = [example for examples in _encode_all(data, "val", tokenizer, sft, stops) for example in examples]
    usable = [example for example in encoded if example.mask.any()]
    if not usable:
        raise UserError(
            f"sft.max_length={sft.max_length}: none of {len(encoded)} validation examples has anything to "
            "learn; raise it, or set trainer.val_interval=-1"
        )
    return usable


def _encode_all(
    data: DataConfig, split: str, tokenizer: Any, sft: SFTConfig, stops: Collection[int]
) -> list[list[Sample]]:
    """Return the examples of all rows, one list per file.

    Raises:
        UserError: the data cannot be read, or one of them cannot be learnt. It names the row.
    """
    datasets: list[list[Sample]] = []
    count, ends = 0, Stops(tokenizer, stops)
    check = PromptCheck(tokenizer, (data.name_of("system_prompt"), data.system_prompt))
    for rows in read_files(data, split):
        datasets.append([])
        for example in rows:
            where = partial(where_of, data, split, count)
            try:
                datasets[-1] += encode(example, tokenizer, data.system_prompt, sft, ends, check, where)
            except UserError as error:
                problem, at = str(error), where()
                if not problem.startswith("model."):
                    key = "messages_key" if "reply" in example else "prompt_key"
                    problem = f"{data.name_of(key)}={getattr(data, key)}: {at}: {problem}"
                raise UserError(problem if at in problem else f"{problem}; the row is {at}") from error
            count += 1
    check.close()
    return datasets


def encode(
    example: Example,
    tokenizer: Any,
    system_prompt: str | None,
    sft: SFTConfig,
    stops: Stops,
    check: PromptCheck | None = None,
    where: Callable[[], str] = lambda: "the row",
) -> list[Sample]:
    """Render an example as a chat, cut it to `sft.max_length`, and set the loss mask for the roles `sft.train_on`.

    A reply is what the chat template writes of it after the generation prompt, up to the token that ends it. Before
    each reply stands what the policy would see there. Most templates write a chat so that it is one sample; if one
    writes an earlier turn in another way later (Qwen3 drops its thought), the next reply begins a new one. Of other
    roles, the mask is 1 for the content and for an end token that follows it.

    Args:
        check: notes what the template does not write of the prompt.
        where: names the row.

    Raises:
        UserError: the chat template does not write a reply, or changes a message of another role.
    """
    reply = example.get("reply", {"role": "assistant", "content": example["answer"]})
    messages = [*as_messages(example["prompt"], system_prompt), reply]
    tools, variables = beside(example, where)

    def write(chat: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        return render_text(tokenizer, chat, is_prompt, tools, variables)

    last = len(messages) - 1
    learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    others = [role for role in sft.train_on if role != "assistant"]
    is_reply_learnt = "assistant" in sft.train_on
    rows: list[Row] = []
    for index, prompt, said in replies_of(tokenizer, stops, write, messages, learnt if is_reply_learnt else [last]):
        if not rows or not rows[-1].goes_on(prompt):
            rows.append(Row(tokenizer, stops, sft.max_length))
        rows[-1].add(index, prompt, said)
    if check is not None:
        check.add(messages[:last], rows[-1].prompt, rows[-1].token_ids, where)
    samples, begin = [], 0
    for row in rows:
        if not is_reply_learnt:
            row.mask = [0.0] * len(row.mask)
        if others:
            _learn_others(row, tokenizer, write, messages, begin, replace(sft, train_on=others), stops)
        begin = row.last + 1
        samples.append(_sample(row.token_ids, row.mask, None, sft.max_length))
    return samples


def _learn_others(
    row: Row,
    tokenizer: Any,
    write: Write,
    messages: Sequence[Mapping[str, Any]],
    begin: int,
    sft: SFTConfig,
    stops: Stops,
) -> None:
    """Set the loss mask for the roles `sft.train_on`, from index `begin` on: earlier samples have those before it."""
    roles = sft.train_on
    spans = _spans(write, row.prompt, messages[: row.last], begin, roles)
    if not spans:
        return
    problem = ""
    if not tokenizer.is_fast:
        problem = "the tokenizer does not map tokens to messages"
    else:
        text = beginning(tokenizer, row.prompt, sft.max_length)
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoding["input_ids"][: len(row.token_ids)]
        if ids != row.token_ids[: len(ids)]:
            problem = "the tokenizer joins the messages of a chat"
    if problem:
        raise UserError(f"sft.train_on={','.join(roles)}: {problem}; only replies can be learnt with it")
    learn = _mask(encoding["offset_mapping"], spans)
    for i, token in enumerate(ids):
        if learn[i] or (i and learn[i - 1] and token in stops.token_ids):
            learn[i] = row.mask[i] = 1.0


def _spans(
    write: Write, text: str, messages: Sequence[Mapping[str, Any]], begin: int, roles: Sequence[str]
) -> list[tuple[int, int]]:
    """Find the contents of the messages of these roles in the rendered chat `text`, as (begin, end) in characters.

    The same chat is rendered with placeholders as contents, which shows the text between the contents.

    Args:
        begin: index of the first message to find.
    """
    if not any(message["role"] in roles for message in messages[begin:]):
        return []
    placeholders = [f"[message {i} of the chat]" for i in range(len(messages))]
    chat = [{**message, "content": text} for message, text in zip(messages, placeholders, strict=True)]
    rest = write(chat, True)
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
        if i >= begin and message["role"] in roles and rendered:
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
