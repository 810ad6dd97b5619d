"""Examples from files, the Hub and generators, and prompts as token ids."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainer.config import DataConfig
from trainer.data.generators import generate
from trainer.errors import UserError

Example = dict[str, Any]
"""`prompt` (a string, or chat messages) and `answer` (a string)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, ready for an engine."""

    index: int
    """Position in the data set as read."""
    token_ids: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    dropped: int
    """Prompts that were longer than allowed."""


def load_prompts(data: DataConfig, split: str, tokenizer: Any, max_prompt_tokens: int) -> PromptSet:
    """The prompts of `train` or `val` through the chat template; over-long ones are dropped and counted.

    Raises:
        UserError: the data cannot be read (see `read_examples`), or every prompt is too long.
    """
    prompts, lengths = [], []
    for index, example in enumerate(read_examples(data, split)):
        messages = as_messages(example["prompt"], data.system_prompt)
        token_ids = render(tokenizer, messages, add_generation_prompt=True)
        lengths.append(len(token_ids))
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, tuple(token_ids), messages[-1]["content"], example["answer"]))
    if not prompts:
        raise UserError(f"rollout.max_prompt_tokens={max_prompt_tokens}: all {len(lengths)} {split} prompts are longer; "
                        f"the shortest has {min(lengths)} tokens")  # fmt: skip
    return PromptSet(prompts, len(lengths) - len(prompts))


def read_examples(data: DataConfig, split: str) -> list[Example]:
    """The examples of `train` or `val`, at most `data.{split}_size` of them.

    Raises:
        UserError: a file is missing, empty or malformed, or lacks a column.
    """
    limit = data.train_size if split == "train" else data.val_size
    if data.generator:
        return generate(data.generator, data.generator_args, limit, split)
    key, files = f"data.{split}_files", data.train_files if split == "train" else data.val_files
    examples: list[Example] = []
    for file in files:
        for where, row in _rows(file, key):
            if 0 <= limit <= len(examples):
                return examples
            examples.append(_example(row, where, data))
    return examples


def as_messages(prompt: Any, system_prompt: str | None) -> list[dict[str, str]]:
    """A prompt as chat messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def render(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
    """Token ids of a chat."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _example(row: Any, where: str, data: DataConfig) -> Example:
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object with {data.prompt_key} and {data.answer_key}")
    for key, name in (("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)):
        if name not in row:
            raise UserError(f"{key}={name}: {where} has no such key; it has {', '.join(row)}")
    prompt = row[data.prompt_key]
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
    if not (isinstance(prompt, str) or is_chat):
        raise UserError(f"data.prompt_key={data.prompt_key}: {where} must hold a string or a list of chat messages")
    return {"prompt": prompt, "answer": str(row[data.answer_key])}


def _rows(file: str, key: str):
    """Yield (where, row) for each row of a file or Hub data set."""
    if file.startswith("hf://"):
        yield from _hub_rows(file, key)
        return
    if not os.path.isfile(file):
        raise UserError(f"{key}={file}: no such file")
    if file.endswith(".parquet"):
        import datasets

        count = 0
        for count, row in enumerate(datasets.Dataset.from_parquet(file), start=1):  # noqa: B007
            yield f"{file}, row {count}", row
    elif file.endswith(".jsonl"):
        count = 0
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{key}: {file}:{number} is not JSON ({error})") from error
                count += 1
                yield f"{file}:{number}", row
    else:
        raise UserError(f"{key}={file}: must end in .jsonl or .parquet, or be hf://OWNER/NAME?config=C&split=S")
    if count == 0:
        raise UserError(f"{key}={file}: the file is empty")


def _hub_rows(url: str, key: str):
    import datasets

    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    name = f"{parts.netloc}{parts.path}".strip("/")
    try:
        dataset = datasets.load_dataset(name, options.get("config"), split=options.get("split", "train"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{key}={url}: cannot be loaded from the Hub ({reason})") from error
    for number, row in enumerate(dataset, start=1):
        yield f"{url}, row {number}", row
