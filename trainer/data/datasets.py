"""Examples from files, the Hub and generators, and prompts as token ids."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trainer.config import DataConfig
from trainer.data.generators import generate
from trainer.data.limits import TextTooLong, encode, max_characters
from trainer.data.reasoning_tasks import check_task
from trainer.errors import UserError, as_list
from trainer.files.atomic_io import file_problem
from trainer.files.documents import parse_json
from trainer.files.hf_hub import first_line, is_connection_error, pin_data, pinned, with_retries
from trainer.process import time_limits

_LINE_BYTES = 64 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_MAX_PROBLEMS = 10
_ARROW_FILE = b"ARROW1"
_SLICE = 64
"""Rows of a table that are Python objects at the same time: a token of them takes ten times the memory."""
_CHECKED_ROWS = 10
"""Number of rows of each file that are checked before anything starts."""
_CHECKED_BYTES = 64 << 20
"""Number of bytes of further JSON lines that are checked as well. This takes about a second. Larger files are not read
twice."""

Example = dict[str, Any]
"""`prompt` (a string or chat messages), `answer` (a string) and, from files, the complete `row`."""


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


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    dropped: int
    """Number of prompts that were too long."""


def load_prompts(data: DataConfig, split: str, tokenizer: Any, max_prompt_tokens: int) -> PromptSet:
    """Render the prompts of `train` or `val` with the chat template. Drop and count those that are too long.

    Raises:
        UserError: the data cannot be read (see `read_examples`), or every prompt is too long.
    """
    prompts, lengths, total = [], [], 0
    limit = max_characters(tokenizer, max_prompt_tokens)
    for index, example in enumerate(read_examples(data, split)):
        messages = as_messages(example["prompt"], data.system_prompt)
        total += 1
        try:
            token_ids = render(tokenizer, messages, add_generation_prompt=True, limit=limit)
        except TextTooLong:
            continue
        lengths.append(len(token_ids))
        if len(token_ids) <= max_prompt_tokens:
            text, answer, row = messages[-1]["content"], example["answer"], example.get("row", example)
            prompts.append(Prompt(index, tuple(token_ids), text, answer, row, messages))
    if not prompts:
        shortest = f"{min(lengths)} tokens" if lengths else f"more than {limit:,} characters"
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: all {total} {split} prompts are longer; the shortest has "
            f"{shortest}"
        )
    return PromptSet(prompts, total - len(prompts))


def load_rows(data: DataConfig, split: str) -> PromptSet:
    """Return the rows of `train` or `val` for an environment, which makes its own prompts from them.

    Raises:
        UserError: the data cannot be read (see `read_files`).
    """
    rows = [row for dataset in read_files(data, split, as_rows=True) for row in dataset]
    return PromptSet([Prompt(index, (), "", "", row) for index, row in enumerate(rows)], dropped=0)


def read_examples(data: DataConfig, split: str) -> list[Example]:
    """Return the examples of `train` or `val` (see `read_files`)."""
    return [example for dataset in read_files(data, split) for example in dataset]


def read_files(data: DataConfig, split: str, as_rows: bool = False) -> list[list[Example]]:
    """Return the first `data.{split}_size` examples of `train` or `val`, one list per file.

    Args:
        as_rows: return the rows unchanged. They may have any columns.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column. The message lists up to ten problems.
    """
    limit = data.train_size if split == "train" else data.val_size
    if data.synthetic:
        return [generate(data.synthetic, data.synthetic_args, limit, split, data.task)]
    key, files = f"data.{split}_files", data.train_files if split == "train" else data.val_files
    if not files:
        raise UserError(f"{key}: names no file")
    convert, problems = _row if as_rows else _example, _Problems()
    datasets: list[list[Example]] = []
    for file in files:
        remaining = None if limit < 0 else limit - sum(len(dataset) for dataset in datasets)
        rows = itertools.islice(_lines(file, key), remaining)
        datasets.append(list(problems.skip_invalid(rows, key, lambda row, where: convert(row, where, data))))
    problems.check()
    return datasets


def check_files(data: DataConfig, examples: bool = True, validation: bool = True, as_rows: bool = False) -> None:
    """Check the local files, large ones partially, so that bad data is refused before anything starts.

    `read_files` checks the remaining rows when it reads the data.

    Args:
        examples: the training files contain examples, and not rollouts.
        validation: the validation files will be read.
        as_rows: rows may have any columns.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column. The message lists up to ten problems. Or
            the task of a generator cannot be made.
    """
    if data.synthetic:
        if data.task is not None:
            check_task(data.task, data.synthetic_args)
        return
    problems, remaining_bytes = _Problems(), _CHECKED_BYTES

    def first(lines: Rows) -> Rows:
        nonlocal remaining_bytes
        for number, (where, line) in enumerate(lines):
            if number >= _CHECKED_ROWS and (remaining_bytes <= 0 or not isinstance(line, bytes)):
                return
            remaining_bytes -= len(line) if isinstance(line, bytes) else 0
            yield where, line

    val_files = data.val_files if validation else []
    for split, files, limit in (("train", data.train_files, data.train_size), ("val", val_files, data.val_size)):
        key, is_example = f"data.{split}_files", examples or split == "val"

        def convert(row: Any, where: str, is_example: bool = is_example) -> Any:
            return _row(row, where, data) if as_rows else _example(row, where, data) if is_example else row

        for file in (file for file in files if not file.startswith("hf://")):
            rows = itertools.islice(first(_lines(file, key)), None if limit < 0 else limit)
            for _ in problems.skip_invalid(rows, key, convert):
                pass
    problems.check()


class _Problems:
    """Collects problems of files and rows, so that a user can repair all of them at once."""

    def __init__(self) -> None:
        self._locations: dict[str, list[str]] = {}  # by message without its location: the first message, all locations
        self._seen: set[str] = set()
        self._count = 0

    def skip_invalid(self, lines: Rows, key: str, convert: Callable[[Any, str], Example]) -> Iterator[Example]:
        """Yield what `convert` returns for each row and its location. Skip the rows that it refuses.

        Raises:
            UserError: this is the tenth problem.
        """
        while True:
            try:
                where, line = next(lines)
            except StopIteration:
                return
            except UserError as error:  # a problem of the complete file
                self._add(error)
                return
            try:
                example = convert(_parsed(line, where, key), where)
            except UserError as error:
                self._add(error, where)
            else:
                yield example

    def _add(self, error: UserError, where: str = "") -> None:
        message = str(error)
        if message in self._seen:  # the same file is used for training and validation
            return
        self._seen.add(message)
        self._locations.setdefault(message.replace(where, "") if where else message, [message]).append(where)
        self._count += 1
        if self._count == _MAX_PROBLEMS:
            self.check()

    def check(self) -> None:
        """Check that there was no problem.

        Raises:
            UserError: lists all problems. Problems that differ only in their location are listed once.
        """
        messages = []
        for message, _, *further in self._locations.values():
            messages.append(f"{message}; the same holds for {', '.join(further)}" if further else message)
        if messages:
            first = f" (the first {_MAX_PROBLEMS} problems)" if self._count == _MAX_PROBLEMS else ""
            raise UserError(as_list(f"the data cannot be used{first}:", messages))


def as_messages(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    """Return a prompt as chat messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def render(
    tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool, limit: float = math.inf
) -> list[int]:
    """Return the token ids of a chat (see `render_text`).

    Raises:
        TextTooLong: the text has more than `limit` characters.
    """
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt), limit)


def render_text(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """Render a chat as the text whose tokens the model sees.

    Raises:
        UserError: the chat template refuses it (some support no system message, others require alternating roles).
    """
    try:
        # transformers renders in Jinja's sandbox: a template has access to the messages and nothing else.
        with deadline(time_limits.RENDER_S):
            return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    except Exception as error:  # a template is a program and can raise anything
        raise UserError(
            f"model.chat_template: the chat template in use (that of {tokenizer.name_or_path}, if the key is not set) "
            f"cannot render a chat of {', '.join(m['role'] for m in messages)} ({first_line(error)})"
        ) from error


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`. Works only on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise TimeoutError(f"it ran for more than {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


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
                f"data.messages_key={data.messages_key}: {where} must have a list of chat messages there, "
                "with role and content, and the last one must be the assistant's"
            )
        return _checked({"prompt": chat[:-1], "answer": chat[-1]["content"], "row": row}, where)
    for key, name in (("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)):
        if name not in row:
            chats = [column for column, value in row.items() if _is_chat(value)]
            hint = f"; if {chats[0]} contains complete chats, set data.messages_key={chats[0]}" if chats else ""
            raise UserError(f"{key}={name}: {where} has no such key; it has {', '.join(row)}{hint}")
    prompt, answer = row[data.prompt_key], row[data.answer_key]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise UserError(
            f"data.prompt_key={data.prompt_key}: {where} must have a string, or a list of chat messages "
            "with role and content"
        )
    if not isinstance(answer, (str, int, float)):
        raise UserError(
            f"data.answer_key={data.answer_key}: {where} must have a string or a number, not {type(answer).__name__}"
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
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which no tokenizer accepts
        raise UserError(f"{where}: contains half of a surrogate pair ({error})") from error
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
"""(where, row): the location for error messages, and the row."""


def read_rows(file: str, key: str) -> Rows:
    """Yield each row of a file or Hub data set.

    Args:
        key: the config key that names the file, for errors.

    Raises:
        UserError: the file is missing, empty or malformed.
    """
    return ((where, _parsed(line, where, key)) for where, line in _lines(file, key))


def _parsed(line: Any, where: str, key: str) -> Any:
    """Return the row in a line of JSON. A row of another format is returned unchanged."""
    if not isinstance(line, bytes):
        return line
    try:
        return parse_json(line.rstrip())  # otherwise the line break would count as a second line
    except json.JSONDecodeError as error:  # its line number is always 1, because the row is one line
        raise UserError(f"{key}: {where} is not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:  # nested too deeply, or, for UnicodeDecodeError, not UTF-8
        raise UserError(f"{key}: {where} is not JSON ({error})") from error


def _lines(file: str, key: str) -> Rows:
    """Yield the rows of a file or Hub data set like `read_rows`, but JSON lines as bytes."""
    if file.startswith("hf://"):
        rows = _hub_rows(file, key)
    elif not file.endswith((".jsonl", ".parquet", ".arrow")):
        raise UserError(
            f"{key}={file}: must end in .jsonl, .parquet or .arrow, or be hf://OWNER/NAME?config=C&split=S"
            f"{_conversion(file)}"
        )
    elif os.path.exists(file) and (problem := file_problem(file)) is not None:
        raise UserError(
            f"{key}={file}: {problem}; the data is read again when the run is resumed, so write it to a file first"
        )
    elif not os.path.isfile(file):
        here = "" if os.path.isabs(file) else f" in {os.getcwd()}"
        raise UserError(
            f"{key}={file}: no such file{here}; correct the path, or set hf://OWNER/NAME?split=S for a data set of "
            "the Hub"
        )
    else:
        rows = _jsonl_rows(file, key) if file.endswith(".jsonl") else _table_rows(file, key)
    empty = True
    for item in rows:
        empty = False
        yield item
    if empty:
        raise UserError(f"{key}={file}: is empty")


def _conversion(file: str) -> str:
    """Return how to convert `file` to JSON lines, as the end of a message. Empty for an unknown file type."""
    stem, suffix = os.path.splitext(file)
    if suffix in (".csv", ".tsv"):
        separator = ", sep='\\t'" if suffix == ".tsv" else ""
        code = f"read_csv('{file}'{separator}, dtype=str).to_json('{stem}.jsonl', orient='records', lines=True)"
        return f'; convert it with python -c "import pandas; pandas.{code}"'
    if suffix == ".json":
        code = f"[print(json.dumps(row)) for row in json.load(open('{file}'))]"
        return f'; convert its list of objects with python -c "import json; {code}" > {stem}.jsonl'
    return ""


def _jsonl_rows(file: str, key: str) -> Rows:
    with open(file, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_LINE_BYTES + 1), b""), start=1):
            if len(line) > _LINE_BYTES:
                raise UserError(
                    f"{key}: {file}:{number} is longer than {_LINE_BYTES >> 20} MiB; a .jsonl file has one "
                    "JSON object per line, not one for all rows"
                )
            if line.strip():
                yield f"{file}:{number}", line


def _table_rows(file: str, key: str) -> Rows:
    import pyarrow

    is_arrow = file.endswith(".arrow")
    try:
        batches = _arrow_batches(file) if is_arrow else _parquet_batches(file)
        slices = (batch.slice(start, _SLICE) for batch in batches for start in range(0, len(batch), _SLICE))
        for number, row in enumerate((row for part in slices for row in part.to_pylist()), start=1):
            yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        kind = "an Arrow" if is_arrow else "a Parquet"
        raise UserError(f"{key}={file}: is not {kind} file ({first_line(error)})") from error


def _parquet_batches(file: str) -> Iterator[Any]:
    import pyarrow.parquet

    yield from pyarrow.parquet.ParquetFile(file).iter_batches()


def _arrow_batches(file: str) -> Iterator[Any]:
    """Yield the batches of a file in either format of Arrow: the one of files (Feather), and that of streams."""
    import pyarrow

    with pyarrow.memory_map(file) as source:
        if source.read(len(_ARROW_FILE)) != _ARROW_FILE:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)
            return
        reader = pyarrow.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            yield batch


def _hub_rows(url: str, key: str) -> Rows:
    import datasets
    import huggingface_hub

    address = urlsplit(url)
    options = dict(parse_qsl(address.query))
    unknown = options.keys() - {"config", "split", "revision"}
    if unknown:
        raise UserError(f"{key}={url}: takes config, split and revision, not {', '.join(sorted(unknown))}")
    name = f"{address.netloc}{address.path}".strip("/")
    commit = options.get("revision", pinned(f"hf://{name}"))
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise UserError(f"{key}={url}: revision must be a commit, of 40 hexadecimal digits")
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        if not offline:
            # Queried first, because `load_dataset` would retry for half a minute without a network.
            with_retries(lambda: huggingface_hub.HfApi().dataset_info(name, revision=commit, timeout=10))
        split = options.get("split", "train")
        dataset = datasets.load_dataset(name, options.get("config"), split=split, revision=commit)
    except Exception as error:  # each of the libraries below has its own error classes
        hint = "; with HF_HUB_OFFLINE=1 a copy in the cache is used" if is_connection_error(error) else ""
        at = f" at the commit {commit}" if commit is not None else ""
        raise UserError(f"{key}={url}: cannot be loaded from the Hub{at} ({first_line(error)}){hint}") from error
    loaded = _commit_of(dataset)
    if offline and commit not in (None, loaded):  # the library uses the newest copy in its cache, of any commit
        why = "the address names" if "revision" in options else "the run began with"
        raise UserError(
            f"{key}={url}: the newest copy in the cache is of the commit {loaded}, and {why} "
            f"{commit}; start without HF_HUB_OFFLINE, or remove the newer copy"
        )
    if loaded is not None and "revision" not in options:
        pin_data(f"hf://{name}", loaded)
    for number, row in enumerate(dataset, start=1):
        yield f"{url}, row {number}", row


def _commit_of(dataset: Any) -> str | None:
    """Return the commit of a Hub data set: the name of the directory with its copy in the cache."""
    folders = {os.path.basename(os.path.dirname(file["filename"])) for file in dataset.cache_files}
    return folders.pop() if len(folders) == 1 and all(map(_COMMIT.fullmatch, folders)) else None
