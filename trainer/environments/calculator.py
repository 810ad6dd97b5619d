"""The tool `calculator`: exact arithmetic on expressions that the policy writes."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_LONGEST = 1000
"""Most characters of an expression."""
_BITS = 1024
"""Most bits of a number, below and above the fraction line."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "round": round}


def calculator(expression: str) -> str:
    """Calculate an expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4.5) * 2.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    try:
        tree = ast.parse(expression.replace(",", "").replace("^", "**").strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression} is no arithmetic expression") from None
    try:
        return _written(_value(tree.body))
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(Fraction(_exact(value)))
        case ast.BinOp(left, ast.Pow(), right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand))
        case ast.Call(ast.Name(name), [_, *_] as values, []) if name in _FUNCTIONS:
            return _bounded(Fraction(_FUNCTIONS[name](*map(_value, values))))
    raise ValueError("an expression has numbers, + - * / // % ** and parentheses alone")


def _exact(value: float) -> str:
    """Return a number as it is written, so that 0.1 is a tenth."""
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return repr(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > _BITS:
        raise ValueError("the number is too large")
    if exponent.denominator == 1:
        return _bounded(base ** int(exponent))
    root = float(base) ** float(exponent)
    if isinstance(root, complex):
        raise ValueError("a root of a negative number is no number")
    return _bounded(Fraction(root))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError("the number is too large")
    return Fraction(value)


def _written(value: Fraction) -> str:
    """Return a number as text: exact if it is whole, else with up to 12 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}"
