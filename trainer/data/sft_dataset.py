"""Supervised examples: chats and rollouts as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.chats import PromptCheck
from trainer.data.datasets import Example, as_messages, beside, read_examples, render_text, where_of
from trainer.data.rollout_io import read_rollouts
from trainer.data.turns import Row, Stops, replies_of
from trainer.episodes import Sample
from trainer.errors import UserError


def load_train(
    data: DataConfig, sft: SFTConfig, tokenizer: Any, stops: Collection[int], vocab_size: int | None = None
) -> list[Sample]:
    """Return the training examples.

    Examples whose loss mask is all 0 are dropped: the limit has cut off the complete answer, or the reward is too low.

    Args:
        stops: the tokens that end a reply.

    Raises:
        UserError: the data cannot be read or learnt, or no example is left.
    """
    if sft.source == "rollouts":
        rollouts = [
            row for file in data.train_files for row in read_rollouts(file, tokenizer, sft.min_reward, vocab_size)
        ]
        examples = [_encode_rollout(row, sft) for row in rollouts[: None if data.train_size < 0 else data.train_size]]
    else:
        examples = _encode_all(data, "train", tokenizer, sft, stops)
    usable = [example for example in examples if example.mask.any()]
    if not examples:
        raise UserError(f"sft.min_reward={sft.min_reward}: no rollout of training has that much")
    if not usable:
        raise UserError(
            f"sft.max_length={sft.max_length}: all {len(examples)} training prompts fill it, which leaves nothing to "
            "learn"
        )
    return usable


def load_val(data: DataConfig, sft: SFTConfig, tokenizer: Any, stops: Collection[int]) -> list[Sample]:
    """Return the validation examples whose loss mask is not all 0.

    Raises:
        UserError: the data cannot be read or learnt, or there is no such example.
    """
    encoded = _encode_all(data, "val", tokenizer, sft, stops)
    usable = [example for example in encoded if example.mask.any()]
    if not usable:
        raise UserError(
            f"sft.max_length={sft.max_length}: none of {len(encoded)} validation examples has anything to "
            "learn; raise it, or set trainer.val_interval=-1"
        )
    return usable


def _encode_all(data: DataConfig, split: str, tokenizer: Any, sft: SFTConfig, stops: Collection[int]) -> list[Sample]:
    """Return the examples of all rows.

    Raises:
        UserError: the data cannot be read, or one of them cannot be learnt. It names the row.
    """
    samples: list[Sample] = []
    ends = Stops(tokenizer, stops)
    check = PromptCheck(tokenizer, (data.name_of("system_prompt"), data.system_prompt))
    for index, example in enumerate(read_examples(data, split)):
        where = partial(where_of, data, split, index)
        try:
            samples += encode(example, tokenizer, data.system_prompt, sft, ends, check, where)
        except UserError as error:
            problem, at = str(error), where()
            if not problem.startswith("model."):
                key = "messages_key" if "reply" in example else "prompt_key"
                problem = f"{data.name_of(key)}={getattr(data, key)}: {at}: {problem}"
            raise UserError(problem if at in problem else f"{problem}; the row is {at}") from error
    check.close()
    return samples


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
    learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    rows = encode_chat(tokenizer, messages, learnt, *beside(example, where), sft.max_length, stops)
    if check is not None:
        check.add(messages[:-1], rows[-1].prompt, rows[-1].token_ids, where)
    return [_sample(row.token_ids, row.mask, None, sft.max_length) for row in rows]


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    learnt: Sequence[int],
    tools: list[Any] | None,
    variables: Mapping[str, Any],
    max_length: int,
    stops: Stops,
) -> list[Row]:
    """Return the tokens of a chat, with a mask of the replies that have the indices `learnt` (see `encode`)."""

    def write(chat: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        return render_text(tokenizer, chat, is_prompt, tools, variables)

    rows: list[Row] = []
    for prompt, said in replies_of(tokenizer, stops, write, messages, learnt):
        if not rows or not rows[-1].goes_on(prompt):
            rows.append(Row(tokenizer, stops, max_length))
        rows[-1].add(prompt, said)
    return rows


def _encode_rollout(sample: Sample, sft: SFTConfig) -> Sample:
    logprobs = None if sft.max_weight is None else np.asarray(sample.logprobs, np.float64)
    return _sample(sample.token_ids, sample.mask, logprobs, sft.max_length)


def _sample(token_ids: Any, mask: Any, logprobs: Any, max_length: int) -> Sample:
    return Sample(
        np.asarray(token_ids[:max_length], np.int32),
        np.asarray(mask[:max_length], np.float32),
        None if logprobs is None else logprobs[:max_length],
    )
