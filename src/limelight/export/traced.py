"""Numbers that remember how they were made, so that a plan made once says all launches to come.

The plan of a call is Python: it computes grids, strides and sizes of scratch memory from shapes.
Run on these numbers, it returns expressions of them instead. Where it decides by one of them, the
decision holds for some problems only:

- An order, such as `stride < 2**23`, is answered for the example's value, and kept as a condition
  that each launch has to fulfil.
- What needs the number itself, such as a cache of earlier results, raises `Unknown`.
- Equality is of expressions: an unknown number equals itself alone, not 1, and not another one.
  What a plan does for unequal numbers is right for equal ones too, perhaps slower; tests hold
  exports to the plans of such problems.
- Divisibility is what was promised of the number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from limelight.export.expression import OPERATORS, Expression, names, text


class Unknown(Exception):
    """A plan needs to know a number. names: in its expression."""

    def __init__(self, expression: Expression, doing: str) -> None:
        self.names = frozenset(names(expression))
        super().__init__(f"{text(expression)} {doing}")


@dataclass
class Trace:
    """conditions: (expression, operator, expression), all of them true of the example, in order."""

    conditions: list[tuple[Expression, str, Expression]] = field(default_factory=list)

    def decide(self, left: Any, operator: str, right: Any, answer: bool) -> bool:
        if not answer:
            operator = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[operator]
        condition = (expression_of(left), operator, expression_of(right))
        if condition not in self.conditions:
            self.conditions.append(condition)
        return answer


def expression_of(value: Any) -> Any:
    """Of a traced number its expression; of any other value itself."""
    return value.expression if isinstance(value, (Whole, Number)) else value


class _Traced:
    """What whole numbers and others have in common."""

    expression: Expression
    trace: Trace

    def __lt__(self, other: Any) -> bool:
        return self.trace.decide(self, "<", other, self._plain() < _plain(other))

    def __le__(self, other: Any) -> bool:
        return self.trace.decide(self, "<=", other, self._plain() <= _plain(other))

    def __gt__(self, other: Any) -> bool:
        return self.trace.decide(self, ">", other, self._plain() > _plain(other))

    def __ge__(self, other: Any) -> bool:
        return self.trace.decide(self, ">=", other, self._plain() >= _plain(other))

    def __eq__(self, other: object) -> bool:
        return self.expression == expression_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise Unknown(self.expression, "is looked up")

    def __bool__(self) -> bool:
        return True  # unequal to 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.expression!r})"

    def _plain(self) -> Any:
        raise NotImplementedError


class Whole(_Traced, int):  # type: ignore[misc]
    """A whole number. multiple_of: what is promised to divide it."""

    multiple_of: int

    def __new__(
        cls, expression: Expression, example: int, trace: Trace, multiple_of: int = 1
    ) -> Whole:
        self = int.__new__(cls, example)
        self.expression, self.trace, self.multiple_of = expression, trace, multiple_of
        return self

    def _plain(self) -> int:
        return int.__int__(self)

    def _made(self, operator: str, left: Any, right: Any) -> Any:
        if not all(isinstance(each, int) for each in (left, right)):
            return NotImplemented
        result = OPERATORS[operator](_plain(left), _plain(right))
        expression = _simple(operator, expression_of(left), expression_of(right))
        return expression if isinstance(expression, int) else Whole(expression, result, self.trace)

    def __add__(self, other: Any) -> Any:
        return self._made("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._made("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._made("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._made("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._made("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._made("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        negated = _negated(self.expression)
        if negated is not None and isinstance(other, int):  # the inside of -(-a // b)
            return -self._made("cdiv", Whole(negated, -self._plain(), self.trace), other)
        return self._made("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._made("//", other, self)

    def smaller(self, other: int) -> Any:
        return self._made("min", self, other)

    def larger(self, other: int) -> Any:
        return self._made("max", self, other)

    def __neg__(self) -> Any:
        negated = _negated(self.expression)
        if negated is not None:
            return Whole(negated, -self._plain(), self.trace)
        return self._made("-", 0, self)

    def __abs__(self) -> Whole:
        """A negative stride is nothing that callers have."""
        self.trace.decide(self, ">=", 0, self._plain() >= 0)
        return self

    def __mod__(self, other: int) -> int:
        return 0 if self.multiple_of % other == 0 else 1

    def __and__(self, other: Any) -> int:
        """The least bit, as `value & -value`."""
        if expression_of(other) != expression_of(-self):
            raise Unknown(self.expression, "is taken apart into bits")
        return self.multiple_of


class Number(_Traced, float):  # type: ignore[misc]
    """A number that need not be whole."""

    def __new__(cls, expression: Expression, example: float, trace: Trace) -> Number:
        self = float.__new__(cls, example)
        self.expression, self.trace = expression, trace
        return self

    def _plain(self) -> float:
        return float.__float__(self)

    def __rtruediv__(self, other: Any) -> Number:
        expression = ("/", expression_of(other), self.expression)
        return Number(expression, _plain(other) / self._plain(), self.trace)


def _plain(value: Any) -> Any:
    return value._plain() if isinstance(value, _Traced) else value


def _negated(expression: Expression) -> Expression | None:
    """The expression e of 0 - e."""
    if isinstance(expression, tuple) and expression[:2] == ("-", 0):
        return expression[2]
    return None


def _simple(operator: str, left: Any, right: Any) -> Expression:
    """The expression, without what adds 0 or multiplies by 1."""
    if operator == "*" and 0 in (left, right):
        return 0
    if (operator, left) in (("+", 0), ("*", 1)):
        return right
    if (operator, right) in (("+", 0), ("-", 0), ("*", 1), ("//", 1), ("cdiv", 1)):
        return left
    return (operator, left, right)
