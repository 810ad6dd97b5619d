"""Rows of files. `test_datasets.py` has the formats."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from trainer.data.row_files import lines, parsed, read_rows
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


CALLS = [
    {"id": 1, "calls": [{"name": "weather", "arguments": {"city": "Rome"}}], "hint": None},
    {"id": 2, "calls": [{"name": "time", "arguments": {"zone": ["CET", None], "at": [{"day": 1}, {"hour": 2}]}}, None]},
]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_structs_of_tables_lack_the_fields_of_other_rows(tmp_path, kind):
    """Columns, elements of lists and values of maps that are null were written so."""
    table = pyarrow.Table.from_pylist(CALLS)
    maps = pyarrow.array([[("a", None)], [("b", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = table.append_column("map", maps)
    table = table.append_column("any", pyarrow.array(['{"x": null}', "[1]"], pyarrow.json_()))
    path = str(tmp_path / f"rows.{kind}")
    (pyarrow.parquet.write_table if kind == "parquet" else pyarrow.feather.write_feather)(table, path)
    rows = [row for _, row in lines(path, "data.train_files")]
    assert rows[0] == {**CALLS[0], "map": {"a": None}, "any": {"x": None}}
    assert rows[1] == {**CALLS[1], "hint": None, "map": {"b": 2}, "any": [1]}
    kept = [row for _, row in read_rows(path, "data.train_files")]
    assert kept[0]["calls"][0]["arguments"] == {"city": "Rome", "zone": None, "at": None}


def test_nulls_of_json_lines_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"call": {"arguments": {"city": None}}}
    path.write_text(json.dumps(row) + "\n")
    [(where, line)] = lines(str(path), "data.train_files")
    assert parsed(line, where, "data.train_files") == row
