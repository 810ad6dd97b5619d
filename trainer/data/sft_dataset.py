"""Supervised examples: chats and rollouts as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.chats import PromptCheck
from trainer.data.datasets import Example, as_messages, beside, read_files, render_text, where_of
from trainer.data.rollout_io import read_rollouts
from trainer.data.turns import Row, Stops, replies_of
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
            raise UserError(
                f"sft.max_length={sft.max_length}: all {len(examples)} {where} prompts fill it, which leaves nothing "
                "to learn"
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
    """Render an example as a chat, cut it to `sft.max_length`, and set the loss mask for its replies.

    A reply is what the chat template writes of it after the generation prompt, up to the token that ends it. Before
    each reply stands what the policy would see there. Most templates write a chat so that it is one sample; if one
    writes an earlier turn in another way later (Qwen3 drops its thought), the next reply begins a new one.

    Args:
        check: notes what the template does not write of the prompt.
        where: names the row.

    Raises:
        UserError: the chat template does not write a reply.
    """
    reply = example.get("reply", {"role": "assistant", "content": example["answer"]})
    messages = [*as_messages(example["prompt"], system_prompt), reply]
    tools, variables = beside(example, where)

    def write(chat: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        return render_text(tokenizer, chat, is_prompt, tools, variables)

    last = len(messages) - 1
    learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    rows: list[Row] = []
    for prompt, said in replies_of(tokenizer, stops, write, messages, learnt):
        if not rows or not rows[-1].goes_on(prompt):
            rows.append(Row(tokenizer, stops, sft.max_length))
        rows[-1].add(prompt, said)
    if check is not None:
        check.add(messages[:last], rows[-1].prompt, rows[-1].token_ids, where)
    return [_sample(row.token_ids, row.mask, None, sft.max_length) for row in rows]


def _encode_rollout(row: dict[str, Any], sft: SFTConfig) -> Sample:
    return _sample(row["token_ids"], row["mask"], None if sft.max_weight is None else row["logprobs"], sft.max_length)


def _sample(token_ids: list[int], mask: list[float], logprobs: list[float] | None, max_length: int) -> Sample:
    return Sample(
        np.asarray(token_ids[:max_length], np.int32),
        np.asarray(mask[:max_length], np.float32),
        None if logprobs is None else np.asarray(logprobs[:max_length]),
    )
