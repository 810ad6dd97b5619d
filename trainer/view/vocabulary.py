"""The text of single tokens, from the tokenizer that a checkpoint, or the model's directory, has."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from trainer.checkpoint.inspection import find_store
from trainer.errors import UserError

_ASSETS = "policy/huggingface"
"""Where a checkpoint has the files of the tokenizer."""
_FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""Stands for a space in the tokens of SentencePiece."""


class Vocabulary:
    """Gives the text of tokens. Without a tokenizer it has none.

    Args:
        path: a `tokenizer.json`.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, path: str | None):
        self._tokenizer: Any = None
        self._special: dict[int, str] = {}
        if path is None:
            return
        import tokenizers  # slow to import

        try:
            with open(path, "rb") as file:
                data = file.read()
            content = json.loads(data)
            self._special = {int(token["id"]): str(token["content"]) for token in content["added_tokens"]}
            self._decoder = json.dumps(content.get("decoder"))
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except BaseException as error:  # tokenizers raises plain `Exception`, and panics of Rust are no `Exception`
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise ValueError(f"{path}: {error}") from error

    def decode(self, ids: Iterable[int]) -> str | None:
        """Return the text of tokens, with its special tokens; None: it is not known."""
        return None if self._tokenizer is None else self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def texts(self, ids: Iterable[int]) -> dict[str, list[Any]]:
        """Return the tokens with a known text: `ids`, and `texts`.

        A text is a string, or a list of bytes if the bytes of the token are not whole characters. `special` has the ids
        of tokens that are marks and no text.
        """
        known: dict[str, list[Any]] = {"ids": [], "texts": [], "special": []}
        if self._tokenizer is None:
            return known
        for token in ids:
            text = self._text(token)
            if text is not None:
                known["ids"].append(token)
                known["texts"].append(text)
                if token in self._special:
                    known["special"].append(token)
        return known

    def _text(self, token: int) -> str | list[int] | None:
        if token in self._special:
            return self._special[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        if "ByteLevel" in self._decoder:  # each character stands for a byte
            table = _byte_table()
            data = b"".join(bytes([table[c]]) if c in table else c.encode(errors="replace") for c in piece)
        elif match := _BYTE.fullmatch(piece):  # of SentencePiece or WordPiece, as in the next line
            data = bytes([int(match[1], 16)])
        else:
            data = piece.replace(_SPACE, " ").encode(errors="replace")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)


def find_tokenizer(run_dir: str, model_path: object) -> str | None:
    """Return the path of the run's `tokenizer.json`; None: it is not on this machine.

    Args:
        model_path: the run's `model.path`.
    """
    paths: list[str] = []
    with contextlib.suppress(OSError, UserError):  # checkpoints in an object store that cannot be reached
        store = find_store(run_dir)
        paths = [] if store is None else [os.path.join(store.path(step), _ASSETS) for step in reversed(store.steps())]
    paths += [model_path] if isinstance(model_path, str) else []
    return next((file for path in paths if os.path.isfile(file := os.path.join(path, _FILE))), None)


@functools.cache
def _byte_table() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
