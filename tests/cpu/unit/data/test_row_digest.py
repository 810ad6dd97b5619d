"""The digest of the rows of a data set, which decides whether a run may continue with it."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import Config
from trainer.data.datasets import Prompt, load_rows
from trainer.data.row_files import digest_rows
from trainer.errors import UserError
from trainer.sources.routes import prompt_ledger

ROW = {"prompt": "1+1", "answer": "2", "bonus": 1, "tests": [{"in": "1", "out": "2"}], "weight": 0.5}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
rows = st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=4)


@given(rows, rows)
def test_rows_have_the_same_digest_if_and_only_if_they_are_equal(left, right):
    def text(found: Any) -> str:
        return json.dumps(found, sort_keys=True)

    assert (digest_rows(left) == digest_rows(right)) == (text(left) == text(right))


def test_every_column_counts():
    for other in [
        {**ROW, "bonus": 2},
        {**ROW, "tests": [{"in": "1", "out": "x"}]},
        {**ROW, "more": None},
        {name: value for name, value in ROW.items() if name != "weight"},
    ]:
        assert digest_rows([ROW, ROW]) != digest_rows([ROW, other])


def test_the_order_of_columns_does_not_count_and_parquet_is_as_json(tmp_path):
    turned = {name: ROW[name] for name in reversed(ROW)}
    assert digest_rows([ROW]) == digest_rows([turned])
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(turned) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([turned, ROW]), tmp_path / "rows.parquet")
    digests = set()
    for name in ("rows.jsonl", "rows.parquet"):
        cfg = Config()
        cfg.data.synthetic, cfg.data.train_files = None, [str(tmp_path / name)]
        digests.add(digest_rows(prompt.row for prompt in load_rows(cfg.data, "train").prompts))
    assert len(digests) == 1


class Image:
    """Has no text of its own, as images of the Hub have none."""

    size = (2, 2)

    def __init__(self, data: bytes):
        self.data = data

    def tobytes(self) -> bytes:
        return self.data


def test_values_without_json_form_are_digested_by_content():
    def row(pixel: int = 0, **other: Any) -> dict[str, Any]:
        array = np.zeros(3000)
        array[1500] = pixel  # `str` leaves it out
        special = {"array": array, "image": Image(bytes([pixel])), "object": object(), "bytes": b"\0"}
        return {**special, "time": datetime.datetime(2026, 1, 1), "price": decimal.Decimal("1.50"), 7: "a", **other}

    assert digest_rows([row()]) == digest_rows([row()])
    others: list[dict[str, Any]] = [{"pixel": 1}, {"time": datetime.datetime(2026, 1, 2)}]
    for other in [*others, {"price": decimal.Decimal(2)}, {"bytes": b"1"}]:
        assert digest_rows([row()]) != digest_rows([row(**other)]), other
    code = f"from trainer.data.row_files import digest_rows; print(digest_rows([{ROW!r}, {{'a': object()}}]))"
    root = Path(__file__).parents[4]
    found = {
        subprocess.check_output([sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": seed}) for seed in "12"
    }
    assert len(found) == 1


def test_a_resume_refuses_other_columns_that_a_reward_reads():
    def prompts(bonus: int, token: int = 1) -> list[Prompt]:
        return [Prompt(i, (i, token), "text", "answer", {**ROW, "bonus": bonus}) for i in range(4)]

    cfg = Config()
    state = json.loads(json.dumps(prompt_ledger(cfg, prompts(1)).state_dict()))
    prompt_ledger(cfg, prompts(1)).load_state_dict(state)
    for others in (prompts(2), prompts(1, token=2)):
        with pytest.raises(UserError, match="data: the prompts' content is not that of .*; restore the data"):
            prompt_ledger(cfg, others).load_state_dict(state)
