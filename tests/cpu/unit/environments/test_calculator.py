"""The tool `calculator`."""

from __future__ import annotations

import contextlib
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.environments.calculator import calculator
from trainer.environments.tools import tool_schema


def test_expressions_are_calculated_exactly():
    for expression, value in [
        ("6 * 7", "42"),
        ("(3 + 4.5) * 2", "15"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("7 // 2 + 7 % 4", "6"),
        ("-2 ** 2", "-4"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("2 ** 0.5", "1.41421356237"),
        ("1,000,000 / 8", "125000"),
        (".5*20", "10"),
        ("1e3", "1000"),
        ("round(2.6) + abs(-1)", "4"),
        (" 10 ", "10"),
        ("12,345.5 + abs(-1,200)", "13545.5"),
        ("12345678901234567.5 * 2", "24691357802469135"),
        ("1234567890123.45 + 0", "1234567890123.45"),
        ("5. * .25", "1.25"),
        ("1 / 2 ** 20", "9.5367431640625e-7"),
    ]:
        assert calculator(expression) == value
        _ = Decimal(1) / 3  # leaves a flag in the context of the thread
        assert calculator(expression) == value


def test_what_is_no_expression_or_too_large_is_an_error():
    for expression, problem in [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 2 ** 20", "too large"),
        ("1.5 ** 100000", "too large"),
        ("1e999", "too large"),
        ("1e-999999999", "too small"),
        ("0e999999999", "too large"),
        ("round(3.14159,2)", "round takes one number"),
        ("abs(1,2)", "abs takes one number"),
        ("3,14 + 1", "numbers"),
        ("1234,567", "numbers"),
        ("1,000,00", "numbers"),
        ("1e308 * 1e308", "too large"),
        ("0 ** -1", "division by zero"),
        ("(-2) ** 0.5", "no number"),
        ("two", "numbers"),
        ("__import__('os')", "numbers"),
        ("(1).real", "numbers"),
        ("[1][0]", "numbers"),
        ("True + 1", "numbers"),
        ("'a' * 1000", "numbers"),
        ("lambda: 1", "numbers"),
        ("1 if 1 else 2", "numbers"),
        ("round(1.5)(2)", "numbers"),
        ("round()", "numbers"),
        ("print(1)", "numbers"),
        ("1 +", "is no arithmetic expression"),
        ("", "is no arithmetic expression"),
        ("(" * 900 + "1", "is no arithmetic expression"),
        ("1 + " * 300 + "1", "at most 1000 characters"),
    ]:
        with pytest.raises((ValueError, ZeroDivisionError, TypeError), match=problem):
            calculator(expression)


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda parts: st.tuples(parts, st.sampled_from(["+", "-", "*", "/"]), parts).map(lambda p: f"({''.join(p)})"),
)


@settings(max_examples=30, deadline=None)
@given(EXPRESSIONS)
def test_it_agrees_with_fractions(expression):
    exact = re.sub(r"[\d.]+", lambda number: f"Fraction('{number[0]}')", expression)
    try:
        value = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculator(expression)
        return
    try:
        found = Fraction(Decimal(calculator(expression)))
    except ValueError as error:
        assert "too large" in str(error) or "at most" in str(error)
        return
    assert abs(found - value) <= abs(value) * Fraction(1, 10**11)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="0123456789+-*/%()., e^abs", max_size=60))
def test_any_text_gives_a_number_or_an_error(text):
    with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):
        Decimal(calculator(text))


def test_the_policy_is_told_what_it_takes():
    assert tool_schema(calculator)["function"]["parameters"]["required"] == ["expression"]
