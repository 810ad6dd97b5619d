"""Episodes as an Arrow table."""

from __future__ import annotations

import dataclasses
import datetime
import io
import itertools
import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.records import decode_groups, decode_scores, encode, encode_groups, keys_in
from trainer.episodes import Episode, Sample, TokenScores

texts = st.text(max_size=8) | st.text("\0json \ud83d", max_size=12)
doubles = st.floats(allow_nan=True, width=64)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw: Any) -> Sample:
    n = draw(st.integers(0, 6))
    singles = st.lists(st.floats(width=32, allow_nan=True), min_size=n, max_size=n)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    logprobs = draw(st.none() | singles)
    versions = draw(st.none() | st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)))
    return Sample(
        np.asarray(tokens, np.int32),
        np.asarray(draw(singles), np.float32),
        None if logprobs is None else np.asarray(logprobs, np.float32),
        versions,
        reward=draw(st.none() | doubles),
        player=draw(st.sampled_from(["", "", "x", "o"])),
        sampled_by=draw(st.sampled_from(["", "another"])),
    )


episodes = st.builds(
    Episode,
    uid=texts,
    group=texts,
    samples=st.lists(samples(), max_size=3),
    reward=st.none() | doubles,
    rewards=st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.floats(allow_nan=False)),
    status=texts,
    baseline=st.none() | doubles,
    failure=texts,
    metrics=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False)),
    messages=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=3),
    turns=st.integers(0, 2**40),
    answer=texts,
)


def bits(value: Any) -> Any:
    """A value as something that is equal only if all bits and types are."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return [(name, bits(one)) for name, one in value.items()]
    if dataclasses.is_dataclass(value):
        return {field.name: bits(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value), value


@settings(deadline=None, max_examples=15)
@given(groups=st.dictionaries(st.text("abc", min_size=1), st.lists(episodes, min_size=1, max_size=3), max_size=3))
def test_episodes_come_back_bit_for_bit(groups):
    data = encode_groups(7, groups, {"history": "h"})
    found, about = decode_groups(data)
    assert bits(found) == bits(groups) and list(found) == list(groups) and about == {"history": "h"}
    assert encode_groups(7, groups, {"history": "h"}) == data, "the same groups give the same bytes"
    for key, group in groups.items():
        assert bits(decode_groups(data, [key])[0]) == bits({key: group})


@given(st.lists(episodes, max_size=4), st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_scores_come_back_bit_for_bit(some, data):
    def array(length: int) -> np.ndarray | None:
        numbers = st.lists(st.floats(width=32), min_size=length, max_size=length)
        found = data.draw(st.none() | numbers)
        return None if found is None else np.asarray(found, np.float32)

    scores = [
        TokenScores(*(array(len(sample.token_ids)) for _ in range(3))) for episode in some for sample in episode.samples
    ]
    file = encode(3, some, scores=scores)
    found = decode_scores(file)
    assert found is not None and [len(own) for own in found] == [len(episode.samples) for episode in some]
    for one, own in zip(scores, itertools.chain.from_iterable(found), strict=True):
        for name in ("logprobs", "entropy", "advantages"):
            before, after = getattr(one, name), getattr(own, name)
            assert (before is None) == (after is None)
            assert before is None or before.tobytes() == after.tobytes()
    assert decode_scores(encode(3, some)) is None
    assert sum(map(len, decode_groups(file)[0].values())) == len(some)


def sample_file() -> bytes:
    sample = Sample(np.arange(5, dtype=np.int32), np.ones(5, np.float32), np.zeros(5, np.float32), (1, 1))
    chat = [{"role": "user", "content": "é"}]
    episodes = [Episode(f"0:1:{i}", "0:1", [sample], 0.1, {"a": 1.0}, messages=chat) for i in range(4)]
    return encode(3, episodes)


@settings(deadline=None, max_examples=15)
@given(length=st.integers(0, 10_000))
def test_a_file_that_is_cut_short_is_refused(length):
    data = sample_file()
    if length < len(data):
        with pytest.raises(ValueError):
            decode_groups(data[:length])


def test_the_keys_of_a_file_are_read_alone():
    one = [Episode("0:1:0", "0:1", [], 0.1)] * 2
    data = encode_groups(7, {"a": one, "b": one}, {"history": "h"})
    assert keys_in(data) == (["a", "b"], {"history": "h"})
    for length in (0, 8, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            keys_in(data[:length])


def test_a_table_of_another_kind_is_refused():
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="other columns"):
        decode_groups(sink.getvalue().to_pybytes())
    with pytest.raises(ValueError, match="other columns"):
        keys_in(sink.getvalue().to_pybytes())


def test_values_of_messages_that_are_no_json_become_text():
    """Else rollouts ahead of rows with a time, as Parquet files have, could not be in a checkpoint."""
    message = {"role": "user", "content": "a", "time": datetime.datetime(2026, 1, 2)}
    found, _ = decode_groups(encode_groups(1, {"g": [Episode("u", "g", [], messages=[message])]}, {}))
    assert found["g"][0].messages == [{**message, "time": "2026-01-02 00:00:00"}]


@given(st.dictionaries(st.text(max_size=4) | st.integers(0, 9), st.text(max_size=9) | json_values, max_size=3))
def test_messages_are_stored_as_the_json_library_writes_them(message):
    file = encode(1, [Episode("u", "g", [], messages=[message])])
    stored = pyarrow.feather.read_table(io.BytesIO(file)).column("messages").to_pylist()
    assert stored == [json.dumps([message])]


numbers = st.floats() | st.integers(-5, 5) | st.booleans() | st.floats(width=16).map(np.float64)


@given(st.dictionaries(st.text(max_size=4), numbers, max_size=3))
def test_terms_of_rewards_are_stored_as_the_json_library_writes_them(terms):
    file = encode(1, [Episode("u", "g", [], rewards=terms, metrics=terms)])
    table = pyarrow.feather.read_table(io.BytesIO(file))
    assert table.column("rewards").to_pylist() == table.column("metrics").to_pylist() == [json.dumps(terms)]


@given(st.lists(st.text(max_size=4) | st.sampled_from(["\ud800", "\0json ", "\0json 1"]), max_size=4))
def test_texts_come_back_beside_others_of_any_kind(texts):
    groups, _ = decode_groups(encode_groups(1, {"g": [Episode("u", "g", [], answer=text) for text in texts]}, {}))
    assert [episode.answer for episode in groups.get("g", [])] == texts


def test_a_message_with_keys_that_are_no_text_is_refused():
    with pytest.raises(ValueError):
        encode(1, [Episode("u", "g", [], messages=[{(1, 2): "a"}])])


def test_people_read_a_file_with_pandas():
    frame = pyarrow.feather.read_table(io.BytesIO(sample_file())).to_pandas()
    assert list(frame.reward) == [0.1] * 4 and list(frame.uid) == [f"0:1:{i}" for i in range(4)]
