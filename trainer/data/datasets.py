"""Examples from files, the Hub and generators, and prompts as token ids."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jinja2

from trainer.config import DataConfig
from trainer.data.chats import PromptCheck, beside, read_chat, template_in_use, with_other_arguments, writes_strings
from trainer.data.generators import generate
from trainer.data.reasoning_tasks import check_task
from trainer.data.row_files import lines, parsed
from trainer.data.tokens import TextTooLong, encode, encode_together, is_plain, max_characters
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.files.hf_hub import first_line
from trainer.process import time_limits
from trainer.process.watchdog import deadline

_CHECKED_ROWS = 1000  # number of rows of each file that are checked before anything starts
_BATCH = 256  # prompts that are rendered and encoded together

Example = dict[str, Any]
"""`prompt` (a string or chat messages), `answer` (a string) and, from files, the complete `row`; of a complete chat the
`reply`, too, its last message."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, ready for an engine."""

    index: int
    """Index in the data set."""
    token_ids: tuple[int, ...]
    text: str
    """Content of the last message."""
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The complete row of the file."""
    messages: Sequence[Mapping[str, str]] = ()
    """The chat from which `token_ids` were rendered, including the system prompt."""
    source: str = ""
    """The row's source: its dotted name below `data`, such as `mix.math`. Empty: the run's own data."""
    recorded: Sequence[Episode] = ()
    """The episodes of the prompt, if they are recorded: nothing is sampled."""


def name_in_mix(source: str) -> str:
    """Return the name of a source in `data.mix`; empty if it is none of a mix."""
    return source.partition("mix.")[2]


def of_source(purpose: str, sources: Iterable[str]) -> str:
    """Return what episodes are for, in messages, with the name of their source if all are of one source of a mix."""
    names = set(map(name_in_mix, sources))
    name = names.pop() if len(names) == 1 else ""
    return f"{purpose} for {name}" if name else purpose


@dataclass(frozen=True)
class PromptSet:
    prompts: Sequence[Prompt]
    dropped: int  # number of prompts that were too long
    first_dropped: str = ""  # which row of the data the first of them is, if there is one

    def dropped_line(self, max_prompt_tokens: int) -> str:
        """Return a line for the log; empty: none was dropped."""
        if not self.dropped:
            return ""
        those = "1 prompt is" if self.dropped == 1 else f"{self.dropped} prompts are"
        total = self.dropped + len(self.prompts)
        return (
            f"{those} longer than rollout.max_prompt_tokens={max_prompt_tokens}, of {total}, and left out; the first "
            f"is {self.first_dropped}"
        )


def load_prompts(data: DataConfig, split: str, tokenizer: Any, max_prompt_tokens: int) -> PromptSet:
    """Render the prompts of `train` or `val` with the chat template. Drop and count those that are too long.

    Raises:
        UserError: the data cannot be read (see `read_examples`), a prompt is empty, or every prompt is too long.
    """
    prompts: list[Prompt] = []
    reader = PromptReader(data, split, tokenizer, max_prompt_tokens)
    for index, (example, messages, token_ids) in enumerate(reader.read(read_examples(data, split))):
        if token_ids is not None:
            prompts.append(prompt_of(index, example, messages, token_ids))
    reader.check.close()
    return PromptSet(prompts, reader.dropped, reader.first_dropped)


def prompt_of(index: int, example: Example, messages: list[dict[str, str]], token_ids: Sequence[int]) -> Prompt:
    """Return the prompt of an example."""
    row = example.get("row", example)
    return Prompt(index, tuple(token_ids), messages[-1]["content"], example["answer"], row, messages)


class PromptReader:
    """Makes prompts of examples, and counts those that are too long.

    Raises:
        UserError: the chat template lacks a generation prompt.
    """

    def __init__(self, data: DataConfig, split: str, tokenizer: Any, max_prompt_tokens: int):
        self.check = PromptCheck(tokenizer, (data.name_of("system_prompt"), data.system_prompt))
        self.dropped = 0
        self.first_dropped = ""
        self._data, self._split, self._tokenizer = data, split, tokenizer
        self._most, self._limit = max_prompt_tokens, max_characters(tokenizer, max_prompt_tokens)
        self._shortest: int | None = None
        self._total = 0

    def read(self, examples: Iterable[Example]) -> Iterator[tuple[Example, list[dict[str, str]], Sequence[int] | None]]:
        """Yield each example with its messages and token ids; None in place of those: the prompt is too long.

        Raises:
            UserError: a prompt is empty, or cannot be rendered; or, at the end, every prompt is too long.
        """
        remaining = iter(examples)
        while batch := list(itertools.islice(remaining, _BATCH)):
            chats = [as_messages(example["prompt"], self._data.system_prompt) for example in batch]
            texts = self._render_together(batch, chats)
            encoded = encode_together(self._tokenizer, texts) if texts is not None else None
            for place, (example, messages) in enumerate(zip(batch, chats, strict=True)):
                text, tokens = (texts[place] if texts else None), (encoded[place] if encoded else None)
                yield example, messages, self._tokens(example, messages, text, tokens)
        if self.dropped == self._total:
            longer = f"more than {self._limit:,} characters"
            raise UserError(
                f"rollout.max_prompt_tokens={self._most}: all {self._total} {self._split} prompts are longer; the "
                f"shortest has {longer if self._shortest is None else f'{self._shortest} tokens'}"
            )

    def _tokens(
        self, example: Example, messages: list[dict[str, str]], text: str | None, tokens: list[int] | None
    ) -> Sequence[int] | None:
        where = partial(where_of, self._data, self._split, self._total)
        self._total += 1
        if not any(message["content"] for message in messages):
            raise _refusal_of_prompt(self._data, f"{where()} has an empty prompt")
        if text is None:
            text = render_text(self._tokenizer, messages, True, *beside(example, where))
        try:
            token_ids = encode(self._tokenizer, text, self._limit, tokens)
        except TextTooLong:
            return self._drop()
        if not token_ids:
            problem = f"{where()} has a prompt of which the chat template writes no token"
            raise _refusal_of_prompt(self._data, problem)
        self.check.add(messages, text, token_ids, where)
        if self._shortest is None or len(token_ids) < self._shortest:
            self._shortest = len(token_ids)
        return token_ids if len(token_ids) <= self._most else self._drop()

    def _drop(self) -> None:
        self.dropped += 1
        self.first_dropped = self.first_dropped or f"row {self._total}"

    def _render_together(self, examples: Sequence[Example], chats: Sequence[Sequence[Any]]) -> list[str] | None:
        """Return the texts of plain chats; None: they must be rendered one by one, perhaps to name a bad one."""
        rows = [example.get("row", {}) for example in examples]
        if any("tools" in row or "chat_template_kwargs" in row for row in rows):
            return None
        if not is_plain(self._tokenizer) or any(message.get("tool_calls") for chat in chats for message in chat):
            return None
        try:
            with deadline(time_limits.RENDER_S):
                return self._tokenizer.apply_chat_template(
                    list(chats), tools=None, add_generation_prompt=True, tokenize=False
                )
        except Exception:  # a template is a program and can raise anything
            return None


def load_rows(data: DataConfig, split: str) -> PromptSet:
    """Return the rows of `train` or `val` for an environment, which makes its own prompts from them.

    Raises:
        UserError: the data cannot be read (see `read_examples`).
    """
    rows = read_examples(data, split, as_rows=True)
    return PromptSet([Prompt(index, (), "", "", row) for index, row in enumerate(rows)], dropped=0)


def read_examples(data: DataConfig, split: str, as_rows: bool = False) -> list[Example]:
    """Return the first `data.{split}_size` examples of `train` or `val`.

    Args:
        as_rows: return the rows unchanged. They may have any columns.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column. The message names the first bad row.
    """
    limit = data.train_size if split == "train" else data.val_size
    if data.synthetic:
        task, options = data.task_with_options()
        try:
            generated = generate(data.synthetic, options, limit, split, task)
        except UserError as error:
            raise data.with_own_names(error) from error
        is_made = as_rows or data.messages_key is None
        where = f"{data.name_of('synthetic')}={data.synthetic}"
        return generated if is_made else [example_of(row, where, data) for row in generated]
    key, files = files_of(data, split)
    if not files:
        raise UserError(f"{key}: names no file")
    rows = itertools.chain.from_iterable(lines(file, key) for file in files)
    chosen = itertools.islice(rows, None if limit < 0 else limit)
    return [example_of(parsed(line, where, key), where, data, as_rows) for where, line in chosen]


def files_of(data: DataConfig, split: str) -> tuple[str, list[str]]:
    """Return the key of the files of `train` or `val`, and the files."""
    return data.name_of(f"{split}_files"), data.train_files if split == "train" else data.val_files


def where_of(data: DataConfig, split: str, index: int) -> str:
    """Return the location of an example, for errors. The files are read again."""
    if data.synthetic:
        return f"example {index + 1} of {data.name_of('synthetic')}={data.synthetic}"
    key, files = files_of(data, split)
    rows = itertools.chain.from_iterable(lines(file, key) for file in files)
    return next(itertools.islice(rows, index, None))[0]


def check_files(
    data: DataConfig,
    examples: bool = True,
    validation: bool = True,
    as_rows: bool = False,
    check: Callable[[Any, Callable[[], str], DataConfig], Any] | None = None,
) -> None:
    """Check the first rows of the local files, so that bad data is refused before anything starts.

    `read_examples` checks the remaining rows when it reads the data.

    Args:
        examples: the training files contain examples, and not rollouts.
        validation: the validation files will be read.
        as_rows: rows may have any columns.
        check: of each row, in place of that of an example: called with the row, what names it, and `data`.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column; or the task of a generator cannot be made.
    """
    if data.synthetic:
        task, options = data.task_with_options()
        if task is not None:
            check_task(task, options)
        return
    val_files = data.val_files if validation else []
    for split, files, limit in (("train", data.train_files, data.train_size), ("val", val_files, data.val_size)):
        key, is_example = data.name_of(f"{split}_files"), examples or split == "val"
        for file in (file for file in files if not file.startswith("hf://")):
            count = _CHECKED_ROWS if limit < 0 else min(limit, _CHECKED_ROWS)
            for where, line in itertools.islice(lines(file, key), count):
                row = parsed(line, where, key)
                if check is not None:
                    check(row, lambda where=where: where, data)
                elif as_rows or is_example:
                    example_of(row, where, data, as_rows)


def as_messages(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as chat messages, which `read_chat` has read."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    limit: float = math.inf,
) -> list[int]:
    """Return the token ids of a chat (see `render_text`).

    Raises:
        TextTooLong: the text has more than `limit` characters.
    """
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt), limit)


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat as the text whose tokens the model sees.

    The arguments of calls are objects, or JSON text as the API of OpenAI has them. A template that cannot write them as
    they are, or that writes a text as a JSON string, gets them in the other form.

    Raises:
        UserError: the chat template refuses it (some support no system message, others require alternating roles).
    """

    def write(chat: Sequence[Mapping[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            list(chat), tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False, **given
        )

    given = variables or {}
    try:
        # transformers renders in Jinja's sandbox: a template has access to the messages and nothing else.
        with deadline(time_limits.RENDER_S):
            other = with_other_arguments(messages)
            if other is None:
                return write(messages)
            try:
                text = write(messages)
            except Exception:
                return write(other)
            with contextlib.suppress(jinja2.TemplateError, TypeError):
                text = write(other) if writes_strings(text, messages) else text
            return text
    except Exception as error:  # a template is a program and can raise anything
        raise UserError(
            f"model.chat_template: {template_in_use(tokenizer)} cannot render a chat of "
            f"{', '.join(m['role'] for m in messages)} ({first_line(error)})"
        ) from error


def example_of(row: Any, where: str, data: DataConfig, as_rows: bool = False) -> Example:
    """Return the example in a row of a file, or the row as it is.

    Raises:
        UserError: it lacks a column, or has something else there. `where` names it.
    """
    if not isinstance(row, dict):
        keys = data.messages_key or f"{data.prompt_key} and {data.answer_key}"
        raise _refusal_of_prompt(data, f"{where} must be an object with {keys}")
    if as_rows:
        return row
    if data.messages_key is not None:
        chat = read_chat(row.get(data.messages_key))
        if chat is None or len(chat) < 2 or chat[-1]["role"] != "assistant":
            problem = "must have a list of chat messages there, with role and content, and the last one must be the"
            raise data.refusal("messages_key", f"{where} {problem} assistant's")
        *prompt, reply = chat
        return _checked({"prompt": prompt, "answer": reply["content"], "reply": reply, "row": row}, where)
    for key, name in (("prompt_key", data.prompt_key), ("answer_key", data.answer_key)):
        if name not in row:
            chats = [column for column, value in row.items() if read_chat(value) is not None]
            chat_key = data.name_of("messages_key")
            hint = f"; if {chats[0]} contains complete chats, set {chat_key}={chats[0]}" if chats else ""
            raise data.refusal(key, f"{where} has no such key; it has {', '.join(row)}{hint}")
    prompt, answer = row[data.prompt_key], row[data.answer_key]
    prompt = prompt if isinstance(prompt, str) else read_chat(prompt)
    if prompt is None:
        problem = "must have a string, or a list of chat messages with role and content"
        raise data.refusal("prompt_key", f"{where} {problem}")
    if not isinstance(answer, (str, int, float)):
        problem = f"{where} must have a string or a number, not {type(answer).__name__}"
        raise data.refusal("answer_key", problem)
    return _checked({"prompt": prompt, "answer": str(answer), "row": row}, where)


def _refusal_of_prompt(data: DataConfig, problem: str) -> UserError:
    return data.refusal("messages_key" if data.messages_key else "prompt_key", problem)


def _checked(example: Example, where: str) -> Example:
    said = [example["prompt"], example["answer"], example.get("reply")]
    try:
        json.dumps(said, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which no tokenizer accepts
        raise UserError(f"{where}: contains half of a surrogate pair ({error})") from error
    return example
