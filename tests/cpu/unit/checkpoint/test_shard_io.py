"""The ranges of bytes that a rank reads: few, and large enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.checkpoint.shard_io import RangeReader
from trainer.checkpoint.storage import open_storage

MB = 1 << 20


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([("a", 0, 10), ("a", 10, 10)], [("a", 0, 20)]),
        ([("a", 30, 10), ("a", 0, 10), ("b", 0, 5)], [("a", 0, 40), ("b", 0, 5)]),
        ([("a", 0, 10), ("a", 10 + 2 * MB, 10)], [("a", 0, 10), ("a", 10 + 2 * MB, 20 + 2 * MB)]),
        ([("a", 0, 70 * MB), ("a", 70 * MB, 10)], [("a", 0, 70 * MB), ("a", 70 * MB, 70 * MB + 10)]),
        ([("a", 0, 70 * MB), ("a", 5, 10)], [("a", 0, 70 * MB)]),
    ],
)
def test_ranges_that_are_near_are_read_as_one_up_to_a_size(tmp_path, stored, expected):
    reader = RangeReader(open_storage(str(tmp_path)), "policy")
    infos = [SimpleNamespace(relative_path=name, offset=start, length=length) for name, start, length in stored]
    reader.storage_data = dict(enumerate(infos))
    items = [SimpleNamespace(storage_index=index) for index in range(len(infos))]
    ranges = list(reader.ranges(items))
    assert [(one.name, one.start, one.end) for one in ranges] == expected
    assert sorted(item.storage_index for one in ranges for item in one.items) == list(range(len(infos)))


def test_a_range_is_fetched_from_the_folder_of_the_reader(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/a").write_bytes(b"0123456789")
    reader = RangeReader(open_storage(str(tmp_path)), "policy")
    assert reader.fetch(SimpleNamespace(name="a", start=2, end=5)) == b"234"
