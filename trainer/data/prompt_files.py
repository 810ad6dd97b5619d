"""Prompts of large files of JSON lines, which are decoded when they are drawn.

The first start reads and checks every row, and keeps of each where it stands. Later starts find that in the run
directory, if the files, the tokenizer and the settings are the same.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from trainer import __version__
from trainer.config import DataConfig
from trainer.data import datasets
from trainer.data.chats import Unseen, beside, log_unseen
from trainer.data.row_files import RowDigest, json_lines, parsed
from trainer.data.tokens import encode, is_plain
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes, read_file, write_file

LOG = logging.getLogger(__name__)

FOLDER = ".data"  # in the run directory, with an index of the rows of each source
_FORMAT = 1
_LARGE = 16 << 20  # bytes of files whose prompts are not held in memory
_MOST_FILES = 64  # they stay open, so that a run does not notice that one is replaced
_SETTLED_S = 2.0
"""A file that was changed so shortly before may change again without another time, on file systems with coarse ones."""
_ROW = np.dtype([("index", "u4"), ("file", "u1"), ("line", "u4"), ("start", "u8"), ("bytes", "u4"), ("hash", "u8")])
_ROWS = 4096  # rows that are Python objects at the same time


@dataclasses.dataclass(frozen=True)
class _Index:
    """What is kept of the rows of files."""

    rows: np.ndarray  # of the prompts that are not too long, as `_ROW`
    digest: str  # of the prompts, as a ledger compares them
    dropped: int = 0
    first_dropped: str = ""
    unseen: Sequence[Unseen] = ()


def load_large(
    data: DataConfig, tokenizer: Any, max_prompt_tokens: int, run_dir: str, as_rows: bool = False
) -> datasets.PromptSet | None:
    """Return the training prompts, if they are in large files of JSON lines; None: they are not.

    Raises:
        UserError: see `load_prompts` and `load_rows`.
    """
    key, files = datasets.files_of(data, "train")
    if data.synthetic or not 0 < len(files) <= _MOST_FILES or not all(file.endswith(".jsonl") for file in files):
        return None
    try:
        if sum(os.stat(file).st_size for file in files) < _LARGE:
            return None
    except OSError:  # whatever reads the file says why
        return None
    reader = None if as_rows else datasets.PromptReader(data, "train", tokenizer, max_prompt_tokens)
    path, began = os.path.join(run_dir, FOLDER, key), time.time()
    decides = data, files, tokenizer, max_prompt_tokens, as_rows
    identity = _identity(*decides)
    index = _kept(path, identity)
    if index is None:
        gc.freeze()  # else a third of the time goes into collections, which look at all modules again and again
        index = _read(data, key, files, reader)
        changed = max(max(status.st_mtime, status.st_ctime) for status in map(os.stat, files))
        if identity and changed + _SETTLED_S < began and identity == _identity(*decides):
            _keep(path, identity, index)
    log_unseen(index.unseen)
    tokenizer = copy.deepcopy(tokenizer)  # the event loop draws prompts, and the main thread uses the other one
    prompts = FilePrompts(data, tokenizer, key, files, index, as_rows)
    return datasets.PromptSet(prompts, index.dropped, index.first_dropped)


def _identity(data: DataConfig, files: Sequence[str], tokenizer: Any, max_prompt_tokens: int, as_rows: bool) -> str:
    """Return a digest of all that decides an index; empty: that cannot be known."""
    stats = [(file, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for file in files for s in [os.stat(file)]]
    columns = [data.train_size, data.name_of("train_files")]
    encodes: list[Any] = []
    if not as_rows:
        if not is_plain(tokenizer):
            return ""
        columns += [data.prompt_key, data.answer_key, data.messages_key, data.system_prompt]
        kind, backend = type(tokenizer).__name__, digest_bytes(tokenizer.backend_tokenizer.to_str().encode())
        encodes = [kind, backend, tokenizer.chat_template, tokenizer.special_tokens_map, max_prompt_tokens]
        encodes += [version(name) for name in ("transformers", "tokenizers", "jinja2")]
    return digest_bytes(json.dumps([_FORMAT, __version__, stats, columns, encodes], default=str).encode())


def _read(data: DataConfig, key: str, files: Sequence[str], reader: datasets.PromptReader | None) -> _Index:
    """Read and check every row."""
    places: deque[tuple[int, ...]] = deque()
    examples = _examples(data, key, files, reader is None, places)
    digest, rows = RowDigest(None if reader is None else data.system_prompt), list[np.ndarray]()
    made = reader.read(examples) if reader is not None else ((row, [], ()) for row in examples)
    indexed = enumerate(made)
    while some := list(islice(indexed, _ROWS)):
        kept = []
        for index, (example, _, token_ids) in some:
            place = places.popleft()
            if token_ids is None:
                continue
            answer, row = (example["answer"], example["row"]) if reader is not None else ("", example)
            digest.add({"seen": (index, token_ids, answer), "row": row})
            kept.append((index, *place))
        rows.append(np.array(kept, _ROW))
    table = np.concatenate(rows)
    if reader is None:
        return _Index(table, digest.hexdigest())
    return _Index(table, digest.hexdigest(), reader.dropped, reader.first_dropped, reader.check.unseen())


def _examples(
    data: DataConfig, key: str, files: Sequence[str], as_rows: bool, places: deque[tuple[int, ...]]
) -> Iterator[datasets.Example]:
    """Yield each example, and append its place to `places`: file, line, first byte, bytes, hash."""
    remaining = data.train_size if data.train_size >= 0 else sys.maxsize
    for number, file in enumerate(files):
        before = remaining
        for line in islice(json_lines(file, key), remaining):
            where = f"{file}:{line.number}"
            example = datasets.example_of(parsed(line.text, where, key), where, data, as_rows)
            places.append((number, line.number, line.start, len(line.text), xxhash.xxh3_64_intdigest(line.text)))
            remaining -= 1
            yield example
        if before == remaining > 0:
            raise UserError(f"{key}={file}: is empty")


def _keep(path: str, identity: str, index: _Index) -> None:
    """Write an index. A run works without it, so a full disk does not end it."""
    about, content = {**vars(index), "rows": len(index.rows), "identity": identity}, io.BytesIO()
    np.savez(content, rows=index.rows, about=np.array(json.dumps(about)))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, content.getvalue())
    except OSError as error:
        LOG.warning("%s: cannot be written (%s), so the next start reads all data again", path, error.strerror)


def _kept(path: str, identity: str) -> _Index | None:
    """Return the index with this identity; None: there is none, or it is damaged."""
    try:
        with np.load(io.BytesIO(read_file(path))) as kept:  # compares checksums
            about = json.loads(str(kept["about"]))
            is_same = bool(identity) and about.pop("identity") == identity
            return _Index(**{**about, "rows": kept["rows"]}) if is_same else None
    except Exception:  # what a damaged archive raises has many classes
        return None


class _Prompts(Sequence[datasets.Prompt]):
    """Prompts that are found one by one."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.prompt(one) for one in range(*place.indices(len(self)))]
        return self.prompt(range(len(self))[place])

    def prompt(self, place: int) -> datasets.Prompt:
        """Return the prompt at a place from 0 on."""
        raise NotImplementedError


class FilePrompts(_Prompts):
    """The prompts of files, which are decoded when they are drawn. Several threads may draw, one at a time decodes."""

    def __init__(self, data: DataConfig, tokenizer: Any, key: str, files: Sequence[str], index: _Index, as_rows: bool):
        self._data, self._tokenizer, self._key, self._files = data, tokenizer, key, files
        self._rows, self._as_rows, self._name = index.rows, as_rows, ""
        self.digest = index.digest  # what `digest_rows` returns for them, as a ledger calls it
        self._handles = [os.open(file, os.O_RDONLY) for file in files]
        self._lock = threading.Lock()
        weakref.finalize(self._lock, lambda handles: [os.close(handle) for handle in handles], self._handles)

    def of_source(self, name: str) -> FilePrompts:
        """Return the same prompts, which name their source (see `Prompt.source`)."""
        named = copy.copy(self)
        named._name = name
        return named

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, place: int) -> datasets.Prompt:
        """Decode a prompt.

        Raises:
            UserError: its row has changed since the files were read.
        """
        index, file, number, start, size, expected = self._rows[place].item()
        where = f"{self._files[file]}:{number}"
        line = os.pread(self._handles[file], size, start)
        if xxhash.xxh3_64_intdigest(line) != expected:
            raise UserError(
                f"{self._key}: {where} has changed since the run read it; restore the file, or start another run"
            )
        example = datasets.example_of(parsed(line, where, self._key), where, self._data, self._as_rows)
        if self._as_rows:
            return datasets.Prompt(index, (), "", "", example, source=self._name)
        with self._lock:  # a tokenizer works for one thread at a time
            messages = datasets.as_messages(example["prompt"], self._data.system_prompt)
            text = datasets.render_text(self._tokenizer, messages, True, *beside(example, lambda: where))
            token_ids = encode(self._tokenizer, text, math.inf)
        return dataclasses.replace(datasets.prompt_of(index, example, messages, token_ids), source=self._name)


class MixedPrompts(_Prompts):
    """The prompts of the sources of a mix, one source after another."""

    def __init__(self, sources: Mapping[str, Sequence[datasets.Prompt]]):
        self.sources = sources

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    def prompt(self, place: int) -> datasets.Prompt:
        for prompts in self.sources.values():
            if place < len(prompts):
                return prompts[place]
            place -= len(prompts)
        raise AssertionError
