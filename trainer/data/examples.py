"""Examples of supervised training, and pairs of a better and a worse answer, as tokens and masks of what is learnt.

The replies of a chat are learnt as the policy would have to write them: after the generation prompt, up to their end
token.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from trainer.config import DataConfig, SFTConfig
from trainer.data.chats import Message, PromptCheck, beside, read_chat, template_in_use, unsaid_field
from trainer.data.datasets import Example, as_messages, read_examples, render_text, where_of
from trainer.data.rollout_io import read_rollouts
from trainer.data.tokens import beginning
from trainer.data.tokens import encode as encode_text
from trainer.episodes import REPLY_MARK, Sample
from trainer.errors import UserError

Write = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without a generation prompt."""


class Stops:
    """The tokens that end a reply, and their texts."""

    def __init__(self, tokenizer: Any, token_ids: Collection[int]):
        added = tokenizer.added_tokens_decoder
        self.token_ids = frozenset(token_ids)
        self.by_text = {added[token].content: token for token in token_ids if token in added}
        self._texts = sorted(filter(None, self.by_text), key=len, reverse=True)
        self._at_start = re.compile(rf"\s*+({'|'.join(map(re.escape, self._texts)) or '(?!)'})")

    def end(self, text: str) -> int | None:
        """Return where a reply ends in what the template writes of it: behind the first of its last stop tokens."""
        end, rest = None, len(text)
        while rest:
            stop = next((stop for stop in self._texts if text.endswith(stop, 0, rest)), "")
            if not stop and not text[rest - 1].isspace():
                break
            end = rest if stop else end
            rest -= len(stop) or 1
        return end

    def beginning(self, text: str) -> str:
        """Return the stop token that a text begins with, blanks included; empty: it begins with another one."""
        found = self._at_start.match(text)
        return found[0] if found else ""

    def last(self, text: str) -> str:
        """Return the stop token that a text ends with; empty: it ends with another one."""
        return next((stop for stop in self.by_text if text.endswith(stop)), "")


class Row:
    """A row of training data, as it grows: tokens, and a mask of those that are learnt."""

    def __init__(self, tokenizer: Any, stops: Stops, max_length: int):
        self._tokenizer, self._stops, self._max_length = tokenizer, stops, max_length
        self._text = ""
        self.token_ids: list[int] = []
        self.mask: list[float] = []
        self.prompt = ""  # the text before the last reply

    def goes_on(self, prompt: str) -> bool:
        """Return whether a prompt begins with this row, which ends with a stop token."""
        return bool(self._stops.last(self._text)) and prompt.startswith(self._text)

    def add(self, prompt: str, reply: str) -> None:
        """Add a reply, which is learnt, and what the prompt has before it."""
        stop = self._stops.last(self._text)
        new = stop + prompt[len(self._text) :]  # some tokens take the blanks behind them
        self._text, self.prompt = prompt + reply, prompt
        if len(self.token_ids) >= self._max_length:  # the rest is cut off
            return
        before = self._encode(new)
        whole = self._encode(new + reply)
        if whole[: len(before)] == before:
            said = whole[len(before) :]
        else:  # the tokenizer joins the end of the prompt and the beginning of the reply, which the policy cannot do
            said = self._encode(reply)
        if not self._stops.last(reply):
            said.append(self._tokenizer.eos_token_id)
        before = before[bool(stop) :]
        self.token_ids += before + said
        self.mask += [0.0] * len(before) + [1.0] * len(said)

    def _encode(self, text: str) -> list[int]:
        """Return at least the first tokens of a text, as many as may be learnt."""
        return encode_text(self._tokenizer, beginning(self._tokenizer, text, self._max_length), math.inf)


def load_train(
    data: DataConfig, sft: SFTConfig, tokenizer: Any, stops: Collection[int], vocab_size: int | None = None
) -> list[Sample]:
    """Return the training examples.

    Examples whose loss mask is all 0 are dropped: the limit has cut off the complete answer, or the reward is too low.

    Raises:
        UserError: the data cannot be read or learnt, or no example is left.
    """
    if sft.source == "rollouts":
        rollouts = [
            row for file in data.train_files for row in read_rollouts(file, tokenizer, sft.min_reward, vocab_size)
        ]
        chosen = rollouts[: None if data.train_size < 0 else data.train_size]
        weighs, most = sft.max_weight is not None, sft.max_length
        examples = [_sample(one.token_ids, one.mask, one.logprobs if weighs else None, most) for one in chosen]
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
                problem = str(data.refusal("messages_key" if "reply" in example else "prompt_key", f"{at}: {problem}"))
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


def _sample(token_ids: Any, mask: Any, logprobs: Any, max_length: int) -> Sample:
    return Sample(
        np.asarray(token_ids[:max_length], np.int32),
        np.asarray(mask[:max_length], np.float32),
        None if logprobs is None else np.asarray(logprobs[:max_length], np.float64),
    )


def replies_of(
    tokenizer: Any, stops: Stops, write: Write, messages: Sequence[Message], indices: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the prompts that the policy sees before the replies with these indices, each with its reply.

    Raises:
        UserError: the chat template does not write one of them, or a part of it, after its prompt.
    """
    found, in_use = [], template_in_use(tokenizer)
    for index in indices:
        name = f"message {index + 1}"
        prompt = write(messages[:index], True) if index else ""
        whole = write(messages[: index + 1], False)
        reply: str | None = None
        if prompt and whole.startswith(prompt):
            reply = whole[len(prompt) :]
        elif prompt:
            reply = _after_header(write, messages, index, prompt, whole)
            reply = reply or _after_thought(messages[index], prompt, whole, stops)
        if reply is None:
            raise UserError(
                f"{name}: {in_use} does not write this reply after its generation prompt, "
                "so the policy could not learn it; change the row, or choose another template (model.chat_template)"
            )
        if unsaid := unsaid_field(reply, messages[index]):
            raise UserError(
                f"{name}.{unsaid}: {in_use} does not write all of it in a reply, so the "
                "policy could not learn it; leave it out, or choose another template (model.chat_template)"
            )
        found.append((prompt, _ended(write, messages, index, reply, stops)))
    return found


def _after_header(write: Write, messages: Sequence[Message], index: int, prompt: str, whole: str) -> str:
    """Return what follows the generation prompt where the template writes the history in another way before a reply.

    gpt-oss drops earlier thoughts when the last message is a final one.
    """
    try:
        header = prompt[len(os.path.commonprefix([prompt, write(messages[:index], False)])) :]
        reply_begins = _where_differs(write, messages[: index + 1], index, whole)
        history_ends = _where_differs(write, messages[: index + 1], index - 1, whole)
    except UserError:
        return ""
    at = whole.rfind(header, history_ends, reply_begins) if header else -1
    return whole[at + len(header) :] if at >= 0 else ""


def _where_differs(write: Write, messages: Sequence[Message], index: int, whole: str) -> int:
    """Return where a chat changes if all texts of a message do."""
    message = dict(messages[index])
    for name, value in message.items():
        if name not in ("role", "tool_call_id") and isinstance(value, str) and value:
            message[name] = REPLY_MARK + value
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_other_name(call) for call in message["tool_calls"]]
    other = write([*messages[:index], message, *messages[index + 1 :]], False)
    return len(os.path.commonprefix([whole, other]))


def _with_other_name(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_other_name(function)}
    return {**call, "name": f"{REPLY_MARK}{call.get('name', '')}"}


def _after_thought(message: Message, prompt: str, whole: str, stops: Stops) -> str | None:
    """Return a reply with a thought that the generation prompt opens, and the template drops (DeepSeek-R1)."""
    opened = re.search(r"(<[^<>\s]+>)(\s*)\Z", prompt)
    content = message["content"].lstrip()
    if opened is None or message.get("tool_calls") or not content.startswith(opened[1]) or "</think>" not in content:
        return None
    end = stops.end(whole)
    said = content[len(opened[1]) :].removeprefix(opened[2])
    return said + (stops.last(whole[:end]) if end is not None else "")


def _ended(write: Write, messages: Sequence[Message], index: int, reply: str, stops: Stops) -> str:
    """Return a reply up to its end token, if the template writes one: in the reply, or where the next message begins.

    GLM writes none in the reply: the next message begins with the token that ends it.
    """
    end = stops.end(reply)
    if end is not None:
        return reply[:end]
    message: Message = {"role": "tool" if messages[index].get("tool_calls") else "user"}
    if index + 1 < len(messages):
        message = dict(messages[index + 1])
    try:
        text = write([*messages[: index + 1], {**message, "content": REPLY_MARK}], False)
    except UserError:
        return reply
    before, _, _ = text.partition(REPLY_MARK)
    tail = reply.rstrip()[-40:]
    _, is_found, rest = before.rpartition(tail) if tail else ("", "", "")
    stop = stops.beginning(rest) if is_found else ""
    return reply.rstrip() + stop if stop else reply


# ---------------------------------------------------------------------------------------------------
# Pairs of a better and a worse answer to one prompt

LOG = logging.getLogger(__name__)
_ANSWERS = ("chosen_key", "rejected_key")
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Columns of rows with more than text, which no model here reads."""


@dataclass(frozen=True)
class Pair:
    """One row of preferences."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0  # by how much the score of the chosen answer should be higher

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
        chosen, rejected = (_sample(one.token_ids, one.mask, None, longest) for one in rows)
        are_equal = np.array_equal(chosen.token_ids, rejected.token_ids)
        if (cuts or not is_long) and chosen.mask.any() and rejected.mask.any() and not are_equal:
            margin = row.get(data.margin_key)
            is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool) and math.isfinite(margin)
            if margin is not None and not is_number:
                raise data.refusal("margin_key", f"{where()} must have a number there, or null")
            pairs.append(Pair(chosen, rejected, float(margin or 0.0)))
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
        raise data.refusal("chosen_key", f"{where()}: {error}") from error
    return rows


def read_pair(row: Any, where: Callable[[], str], data: DataConfig) -> tuple[list[Message], ...]:
    """Return the messages of the prompt, and those of the chosen and of the rejected answer after it.

    Answers are texts, or lists of messages, which may begin with the prompt. Without a prompt, it is what the two lists
    have in common at their begin.

    Raises:
        UserError: names the row, the column and what is wrong.
    """

    def refuse(key: str, problem: str) -> NoReturn:
        raise data.refusal(key, f"{where()} {problem}")

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
