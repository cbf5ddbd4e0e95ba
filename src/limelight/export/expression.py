"""Expressions: how a manifest says a number that is known at a launch only.

    sum     =  product (("+" | "-") product)*
    product =  factor (("*" | "/" | "//") factor)*
    factor  =  ["-"] number | name | ("cdiv" | "min" | "max") "(" sum "," sum ")" | "(" sum ")"

`//` rounds down and `cdiv` up, of whole numbers; `/` is for others. A name may have dots. There is
nothing else, so that every language can evaluate it, or be generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from limelight.errors import invalid

Expression: TypeAlias = int | float | str | tuple[str, Any, Any]
"""A number, a name, or an operator with its two operands."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2}
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?|[A-Za-z_][\w.]*|//|[-+*/(),])")


def evaluate(expression: Expression, values: Mapping[str, Any]) -> Any:
    """values: of the names."""
    if isinstance(expression, str):
        return values[expression]
    if isinstance(expression, tuple):
        operator, left, right = expression
        return OPERATORS[operator](evaluate(left, values), evaluate(right, values))
    return expression


def names(expression: Expression) -> Iterator[str]:
    """Every name, in order, as often as it stands there."""
    if isinstance(expression, str):
        yield expression
    elif isinstance(expression, tuple):
        for operand in expression[1:]:
            yield from names(operand)


def text(expression: Expression) -> str:
    """
    >>> text(("*", ("cdiv", "q_len", 64), ("+", "q_heads", 1)))
    'cdiv(q_len, 64) * (q_heads + 1)'
    """
    if not isinstance(expression, tuple):
        return str(expression)
    operator, left, right = expression
    if operator not in _LEVEL:
        return f"{operator}({text(left)}, {text(right)})"
    level = _LEVEL[operator]
    return f"{_operand(left, level)} {operator} {_operand(right, level + 1)}"


def _operand(expression: Expression, least: int) -> str:
    binds = _LEVEL.get(expression[0], 3) if isinstance(expression, tuple) else 3
    return text(expression) if binds >= least else f"({text(expression)})"


def parse(written: str) -> Expression:
    """The inverse of `text`. Raises ValueError, which says where the text leaves the grammar.

    >>> parse("a * b // 2 - max(c.d, 0)")
    ('-', ('//', ('*', 'a', 'b'), 2), ('max', 'c.d', 0))
    """
    tokens, place = [], 0
    while written[place:].strip():
        found = _TOKEN.match(written, place)
        if found is None:
            raise _wrong(written, written[place:].strip()[0])
        tokens.append(found[1])
        place = found.end()
    parser = _Parser(written, tokens)
    expression = parser.chain(1)
    parser.need("")
    return expression


class _Parser:
    def __init__(self, written: str, tokens: list[str]) -> None:
        self.written, self.tokens = written, [*tokens, ""]

    def need(self, token: str) -> None:
        if self.tokens[0] != token:
            raise _wrong(self.written, self.tokens[0])
        del self.tokens[0]

    def chain(self, level: int) -> Expression:
        """Operands of a level or above it, joined by its operators from the left."""
        if level == 3:
            return self.factor()
        result = self.chain(level + 1)
        while _LEVEL.get(self.tokens[0]) == level:
            result = (self.tokens.pop(0), result, self.chain(level + 1))
        return result

    def factor(self) -> Expression:
        token = self.tokens.pop(0)
        if token == "-" and self.tokens[0][:1].isdigit():
            token += self.tokens.pop(0)
        if token == "(":
            inside = self.chain(1)
            self.need(")")
            return inside
        if token in OPERATORS and token not in _LEVEL:
            self.need("(")
            left = self.chain(1)
            self.need(",")
            right = self.chain(1)
            self.need(")")
            return (token, left, right)
        digits = token.removeprefix("-")
        if digits[:1].isdigit():
            return int(token) if digits.isdigit() else float(token)
        if not re.match(r"[A-Za-z_]", token):
            raise _wrong(self.written, token)
        return token


def _wrong(written: str, found: str) -> ValueError:
    return invalid(repr(written), found=repr(found), needed="another place for it")
