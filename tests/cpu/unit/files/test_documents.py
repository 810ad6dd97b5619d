"""JSON and YAML from files that may be damaged or hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.odd_files import DEEP_JSON
from trainer.files.documents import is_count, is_number, mismatch, parse_json, parse_object, parse_yaml


def test_text_that_is_not_json_is_a_value_error():
    for text in (b"{", b"\xff", DEEP_JSON):
        with pytest.raises(ValueError):
            parse_json(text)


@given(st.text() | st.binary())
def test_any_text_is_a_mapping_or_a_value_error(text):
    for parse in (parse_object, parse_yaml):
        try:
            assert isinstance(parse(text), dict)
        except ValueError as error:
            assert str(error)


def test_yaml_with_an_alias_is_refused():
    for text in ("a: &x {b: *x}", "a: &x 1\nb: *x"):
        with pytest.raises(ValueError, match="alias"):
            parse_yaml(text)


NUMBERS = [
    *((0, True, True), (-1, False, True), (2**63, False, False), (True, False, False), (1.5, False, True)),
    *((float("nan"), False, False), (float("inf"), False, False), ("1", False, False), (None, False, False)),
]


def test_counts_and_numbers():
    assert [(value, is_count(value), is_number(value)) for value, *_ in NUMBERS] == NUMBERS


def test_shapes():
    for value, shape, fits in [
        ({"a": 1, "more": 2}, {"a": int}, True),
        ({}, {"a": int}, False),
        ({"a": True}, {"a": is_count}, False),
        ({"a": "1"}, {"a": (int, str)}, True),
        ({"a": [1, "2"]}, {"a": [int]}, False),
        ({"a": [1, 2]}, {"a": [int]}, True),
        ({"x": 1.0, "y": 2}, {str: is_number}, True),
        ({"x": None}, {str: is_number}, False),
        ([], {"a": int}, False),
    ]:
        assert (mismatch(value, shape) is None) == fits, (value, shape)


def test_the_invalid_field_is_named():
    with pytest.raises(ValueError, match=r"a\.b is 'text'"):
        parse_object('{"a": {"b": "text"}}', {"a": {"b": int}})
