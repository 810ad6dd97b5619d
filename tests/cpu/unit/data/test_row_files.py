"""Rows of files. `test_datasets.py` has the formats."""

from __future__ import annotations

import pytest

from trainer.data.row_files import read_rows
from trainer.errors import UserError


def test_a_very_long_line_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "data.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"prompt": "a", "answer": "b"}\n')
        file.truncate(2**36)  # a sparse file: one line of 64 GB
    rows = read_rows(str(path), "data.train_files")
    assert next(rows)[1] == {"prompt": "a", "answer": "b"}
    with pytest.raises(UserError, match="data.train_files: .*data.jsonl:2 is longer than 64 MiB"):
        next(rows)


def test_a_deeply_nested_line_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(UserError, match="data.train_files: .*data.jsonl:1 is not JSON .*nested too deeply"):
        next(read_rows(str(path), "data.train_files"))
