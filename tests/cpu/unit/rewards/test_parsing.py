"""Values that count as rewards, and the messages about those that do not."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.parsing import read_number, read_terms, read_value, read_values
from trainer.sandbox.limits import LARGEST_REWARD, MAX_TERMS


class Hostile(dict):
    def __len__(self):
        raise KeyboardInterrupt


class NotFloat:
    def __float__(self):
        raise SystemExit(3)


def test_whatever_converts_to_a_float_is_a_number():
    for value in [1, 1.0, True, np.float32(1), np.int64(1), torch.tensor(1), Decimal(1), Fraction(1), np.array(1)]:
        assert read_number(value) == 1.0 and type(read_number(value)) is float
        assert read_value(value) == {"": 1.0}


def test_what_is_no_number_has_a_reason():
    for value, reason in [
        ("1", "returned str, which is not a number"),
        (b"1", "returned bytes, which is not a number"),
        (None, "returned NoneType, which is not a number"),
        ([1.0], "returned list, which is not a number"),
        (math.nan, "is nan"),
        (-math.inf, "is -inf"),
        (2 * LARGEST_REWARD, "is 2e+12, beyond 1e+12"),
        (10**400, "raised OverflowError: int too large to convert to float"),
    ]:
        assert read_number(value) == reason and read_value(value) == reason


def test_whatever_user_code_raises_while_it_is_read_is_a_reason():
    """Also exceptions that would end the process."""
    assert read_number(NotFloat()).startswith("raised SystemExit: 3")
    for read in (read_value, read_terms):
        assert read(Hostile(a=1)).startswith("raised KeyboardInterrupt")
    assert read_values(Hostile(a=1), 2)[0].startswith("returned Hostile, which is not a list")


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_the_largest_rewards_are_numbers_and_all_beyond_are_not(value):
    found = read_number(value)
    assert found == value if abs(value) <= LARGEST_REWARD else isinstance(found, str)


def test_terms_of_a_reward_have_names_and_are_numbers():
    for terms, reason in [
        ({}, f"returned 0 terms; a reward has 1 to {MAX_TERMS}"),
        ({str(i): 0 for i in range(MAX_TERMS + 1)}, f"returned {MAX_TERMS + 1} terms"),
        ({"a b": 1}, "returned a term called 'a b'; names are letters, digits, _, . and -"),
        ({"": 1}, "returned a term called ''"),
        ({"x" * 65: 1}, "returned a term called"),
        ({1: 1}, "returned a term called 1;"),
        ({"a/b": 1}, "returned a term called 'a/b'"),
        ({"a": "1"}, "term a is a str, which is not a number"),
    ]:
        assert read_value(terms).startswith(reason)


def test_terms_of_a_step_may_be_none_and_metrics_may_be_paths():
    assert read_terms({}) == {} and read_terms([]) == "are a list, not a dict"
    assert read_terms({"a/b": 1}, paths=True) == {"a/b": 1.0}
    for name in ("/a", "a/", "a//b", "a/" * 32 + "a"):
        assert read_terms({name: 1}, paths=True).startswith("returned a term called")
    many = {str(i): 0.0 for i in range(4 * MAX_TERMS)}
    assert read_terms(many, paths=True) == many
    assert read_terms(many) == f"are {4 * MAX_TERMS}; a step has at most {MAX_TERMS}"


def test_a_group_needs_one_reward_for_each_completion():
    assert read_values([1, {"a": 2}, "x"], 3) == [{"": 1.0}, {"a": 2.0}, "returned str, which is not a number"]
    assert read_values(np.ones(2), 2) == [{"": 1.0}] * 2
    assert read_values([1], 2) == ["returned 1 rewards for 2 completions"] * 2
    for value in ("ab", {"a": 1, "b": 2}, iter([1, 2]), 1.0):
        assert read_values(value, 2)[1].endswith("which is not a list of rewards")
