"""The tool `calculator`: exact arithmetic on expressions that the policy writes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, localcontext
from fractions import Fraction
from typing import Any

_LONGEST = 1000  # most characters of an expression
_BITS = 1024  # most bits of a number, below and above the fraction line
_DIGITS = 20  # most digits of an exact result that is not whole
_LARGEST_EXPONENT = 400
_GROUPED = re.compile(r"(?<![\w.,])\d{1,3}(,\d{3})+(?![\d_,])")
"""A number with commas between its thousands."""
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
    source = _GROUPED.sub(lambda number: number[0].replace(",", ""), expression).replace("^", "**").strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression} is no arithmetic expression") from None
    try:
        return _written(_value(tree.body, source))
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None


def _value(node: ast.AST, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return _bounded(Fraction(value))
        case ast.Constant(value=float()):
            return _bounded(_decimal(ast.get_source_segment(source, node) or ""))
        case ast.BinOp(left, ast.Pow(), right):
            return _power(_value(left, source), _value(right, source))
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(left, source), _value(right, source)))
        case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand, source))
        case ast.Call(ast.Name(name), [value], []) if name in _FUNCTIONS:
            return _bounded(Fraction(_FUNCTIONS[name](_value(value, source))))
        case ast.Call(ast.Name(name), [_, *_], []) if name in _FUNCTIONS:
            raise ValueError(f"{name} takes one number")
    raise ValueError("an expression has numbers, + - * / // % ** and parentheses alone")


def _decimal(text: str) -> Fraction:
    """Return a number as it is written, so that 0.1 is a tenth."""
    number = Decimal(text)
    if abs(number.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError("a number is too large or too small")
    return Fraction(number)


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
    """Return a number as text: exact if it is whole or has up to `_DIGITS` digits, else with 12 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(Context(prec=_DIGITS)) as context:  # a new one: a copy would have the flags of the thread
        exact = Decimal(value.numerator) / Decimal(value.denominator)
        if not context.flags[Inexact]:
            return f"{exact:.{_DIGITS}g}"
    return f"{float(value):.12g}"
