"""Examples from files, the Hub and generators, and prompts as token ids."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trainer.config import DataConfig
from trainer.data.generators import generate
from trainer.documents import parse_json
from trainer.errors import UserError
from trainer.hub import first_line, is_connection_error, with_retries

_LINE_BYTES = 64 << 20
_RENDER_S = 20.0

Example = dict[str, Any]
"""`prompt` (a string, or chat messages), `answer` (a string) and, from files, the whole `row`."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, ready for an engine."""

    index: int
    """Position in the data set as read."""
    token_ids: tuple[int, ...]
    text: str
    """Of the last message."""
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The whole row, as it was read."""
    messages: Sequence[Mapping[str, str]] = ()
    """The chat that `token_ids` render, the system prompt included."""


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    dropped: int
    """Prompts that were longer than allowed."""


def load_prompts(data: DataConfig, split: str, tokenizer: Any, max_prompt_tokens: int) -> PromptSet:
    """Render the prompts of `train` or `val` through the chat template; drop and count those that are too long.

    Raises:
        UserError: the data cannot be read (see `read_examples`), or every prompt is too long.
    """
    prompts, lengths = [], []
    for index, example in enumerate(read_examples(data, split)):
        messages = as_messages(example["prompt"], data.system_prompt)
        token_ids = render(tokenizer, messages, add_generation_prompt=True)
        lengths.append(len(token_ids))
        if len(token_ids) <= max_prompt_tokens:
            text, answer, row = messages[-1]["content"], example["answer"], example.get("row", example)
            prompts.append(Prompt(index, tuple(token_ids), text, answer, row, messages))
    if not prompts:
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: all {len(lengths)} {split} prompts are "
            f"longer; the shortest has {min(lengths)} tokens"
        )
    return PromptSet(prompts, len(lengths) - len(prompts))


def load_rows(data: DataConfig, split: str) -> PromptSet:
    """Return the rows of `train` or `val` for an environment, which makes its own prompts of them.

    Raises:
        UserError: the data cannot be read (see `read_parts`).
    """
    rows = [row for part in read_parts(data, split, as_rows=True) for row in part]
    return PromptSet([Prompt(index, (), "", "", row) for index, row in enumerate(rows)], dropped=0)


def read_examples(data: DataConfig, split: str) -> list[Example]:
    """Return the examples of `train` or `val` (see `read_parts`)."""
    return [example for part in read_parts(data, split) for example in part]


def read_parts(data: DataConfig, split: str, as_rows: bool = False) -> list[list[Example]]:
    """Return the first `data.{split}_size` examples of `train` or `val`, one list per file.

    Args:
        as_rows: the rows as they are, which may have any columns.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column.
    """
    limit = data.train_size if split == "train" else data.val_size
    if data.generator:
        return [generate(data.generator, data.generator_args, limit, split)]
    key, files = f"data.{split}_files", data.train_files if split == "train" else data.val_files
    if not files:
        raise UserError(f"{key}: names no file")
    parts: list[list[Example]] = []
    for file in files:
        left = None if limit < 0 else limit - sum(len(part) for part in parts)
        rows = itertools.islice(read_rows(file, key), left)
        parts.append([_row(row, where, data) if as_rows else _example(row, where, data) for where, row in rows])
    return parts


def check_files(data: DataConfig, examples: bool = True, validation: bool = True, as_rows: bool = False) -> None:
    """Read the first rows of each local file, so that bad data is refused before anything starts.

    Args:
        examples: the training files hold examples, not rollouts.
        validation: the held-out files will be read.
        as_rows: rows may have any columns.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column.
    """
    if data.generator:
        return
    val_files = data.val_files if validation else []
    for split, files, limit in (("train", data.train_files, data.train_size), ("val", val_files, data.val_size)):
        first = 10 if limit < 0 else min(10, limit)
        for file in (file for file in files if not file.startswith("hf://")):
            for where, row in itertools.islice(read_rows(file, f"data.{split}_files"), first):
                if as_rows:
                    _row(row, where, data)
                elif examples or split == "val":
                    _example(row, where, data)


def as_messages(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as chat messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def render(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
    """Return the token ids of a chat (see `render_text`)."""
    return tokenizer.encode(render_text(tokenizer, messages, add_generation_prompt), add_special_tokens=False)


def render_text(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """Render a chat as the text whose tokens the model sees.

    Raises:
        UserError: the chat template refuses it (some know no system message, others want roles in turn).
    """
    try:
        # transformers renders in Jinja's sandbox: a template reaches the messages, and nothing else of this process.
        with deadline(_RENDER_S):
            return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    except Exception as error:  # a template is a program, and raises anything
        raise UserError(
            f"model.chat_template: the chat template in use (that of {tokenizer.name_or_path}, if the key is not set) "
            f"cannot render a chat of {', '.join(m['role'] for m in messages)} ({first_line(error)})"
        ) from error


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`. Only the main thread has this limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise TimeoutError(f"it ran for more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _row(row: Any, where: str, data: DataConfig) -> Example:
    if not isinstance(row, dict):
        keys = data.messages_key or f"{data.prompt_key} and {data.answer_key}"
        name = "messages_key" if data.messages_key else "prompt_key"
        raise UserError(f"data.{name}={getattr(data, name)}: {where} must be an object with {keys}")
    return row


def _example(row: Any, where: str, data: DataConfig) -> Example:
    row = _row(row, where, data)
    if data.messages_key is not None:
        chat = row.get(data.messages_key)
        if not (_is_chat(chat) and len(chat) > 1 and chat[-1]["role"] == "assistant"):
            raise UserError(
                f"data.messages_key={data.messages_key}: {where} must hold a list of chat messages there, "
                "with role and content, the last one the assistant's"
            )
        return _checked({"prompt": chat[:-1], "answer": chat[-1]["content"], "row": row}, where)
    for key, name in (("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)):
        if name not in row:
            chats = [column for column, value in row.items() if _is_chat(value)]
            hint = f"; if {chats[0]} holds whole chats, set data.messages_key={chats[0]}" if chats else ""
            raise UserError(f"{key}={name}: {where} has no such key; it has {', '.join(row)}{hint}")
    prompt, answer = row[data.prompt_key], row[data.answer_key]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise UserError(
            f"data.prompt_key={data.prompt_key}: {where} must hold a string, or a list of chat messages "
            "with role and content"
        )
    if not isinstance(answer, (str, int, float)):
        raise UserError(
            f"data.answer_key={data.answer_key}: {where} must hold a string or a number, not {type(answer).__name__}"
        )
    return _checked({"prompt": prompt, "answer": str(answer), "row": row}, where)


def _checked(example: Example, where: str) -> Example:
    prompt = example["prompt"]
    try:
        for text in (
            example["answer"],
            *([prompt] if isinstance(prompt, str) else (m[key] for m in prompt for key in ("role", "content"))),
        ):
            text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a pair, which no tokenizer takes
        raise UserError(f"{where}: holds half of a surrogate pair ({error})") from error
    return example


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


Rows = Iterator[tuple[str, Any]]
"""(where, row): the place as an error message names it, and what is there."""


def read_rows(file: str, key: str) -> Rows:
    """Yield each row of a file or Hub data set.

    Args:
        key: the config key that names the file, for errors.
    """
    if file.startswith("hf://"):
        rows = _hub_rows(file, key)
    elif not file.endswith((".jsonl", ".parquet")):
        raise UserError(f"{key}={file}: must end in .jsonl or .parquet, or be hf://OWNER/NAME?config=C&split=S")
    elif not os.path.isfile(file):
        here = "" if os.path.isabs(file) else f" in {os.getcwd()}"
        raise UserError(
            f"{key}={file}: no such file{here}; correct the path, or give hf://OWNER/NAME?split=S for a data set of "
            "the Hub"
        )
    else:
        rows = _jsonl_rows(file, key) if file.endswith(".jsonl") else _parquet_rows(file, key)
    empty = True
    for item in rows:
        empty = False
        yield item
    if empty:
        raise UserError(f"{key}={file}: is empty")


def _jsonl_rows(file: str, key: str) -> Rows:
    with open(file, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_LINE_BYTES + 1), b""), start=1):
            if len(line) > _LINE_BYTES:
                raise UserError(
                    f"{key}: {file}:{number} is longer than {_LINE_BYTES >> 20} MiB; a .jsonl file has one "
                    "JSON object a line, not one for all rows"
                )
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:  # neither JSON nor, for UnicodeDecodeError, UTF-8
                raise UserError(f"{key}: {file}:{number} is not JSON ({error})") from error
            yield f"{file}:{number}", row


def _parquet_rows(file: str, key: str) -> Rows:
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches()
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}={file}: is not a Parquet file ({first_line(error)})") from error


def _hub_rows(url: str, key: str) -> Rows:
    import datasets
    import huggingface_hub

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - {"config", "split"}
    if unknown:
        raise UserError(f"{key}={url}: takes config and split, not {', '.join(sorted(unknown))}")
    name = f"{parts.netloc}{parts.path}".strip("/")
    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            # Asked first, because `load_dataset` would try for half a minute where there is no network.
            with_retries(lambda: huggingface_hub.HfApi().dataset_info(name, timeout=10))
        dataset = datasets.load_dataset(name, options.get("config"), split=options.get("split", "train"))
    except Exception as error:  # each of the clients below has a family of errors of its own
        hint = "; with HF_HUB_OFFLINE=1 a copy in the cache is used" if is_connection_error(error) else ""
        raise UserError(f"{key}={url}: cannot be loaded from the Hub ({first_line(error)}){hint}") from error
    for number, row in enumerate(dataset, start=1):
        yield f"{url}, row {number}", row
