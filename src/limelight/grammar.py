"""The names of masks and biases, on the command line and in exports.

    mask  =  all ("|" all)*           all   =  one ("&" one)*
    one   =  name [arguments]  |  "(" mask ")"
    bias  =  name [arguments] ("+" name [arguments])*

Arguments are numbers or `none`, by place or by name: `sliding_window(512, right=0)`. A tensor, such
as the lengths of `key_lengths`, is an example of the right shape. Nothing is evaluated as code.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from limelight.biases import Bias
from limelight.errors import invalid
from limelight.examples import example, kinds, spelled
from limelight.masks import And, Mask
from limelight.terms import Composite, Term
from limelight.tile import Size

LONGEST = 400  # characters of a text, so that nested parentheses end before Python's stack does
_TOKEN = re.compile(r"\s*([A-Za-z_][\w-]*|-?\d+(?:\.\d+)?(?:[eE]-?\d+)?|[&|+(),=])")


def parse_mask(text: str, size: Size) -> Mask:
    """The mask that a text names, with an `examples.Array` in the place of each tensor.

    Raises ValueError, which says what was expected where.
    """
    parser = _Parser(text, Mask, size)
    return parser.whole(parser.any_of)


def parse_bias(text: str, size: Size, head_dim: int = 64) -> Bias:
    """The bias that a text names; as `parse_mask`. head_dim: of the query that it may read."""
    parser = _Parser(text, Bias, size, head_dim)
    return parser.whole(parser.sum_of)


def parse_term(text: str, size: Size) -> Mask | Bias:
    """The mask or bias that a text names, whichever its first name belongs to."""
    first = re.search(r"[A-Za-z_][\w-]*", text)
    name = _folded(first[0]) if first else ""
    if name in {_folded(known) for known in kinds(Bias)}:
        return parse_bias(text, size)
    if first and name not in {_folded(known) for known in kinds(Mask)}:
        known = ", ".join([*kinds(Mask), *kinds(Bias)])
        raise invalid("name", found=repr(first[0]), needed=f"one of {known}")
    return parse_mask(text, size)


def written(term: Term) -> str:
    """The text that names a term, whatever the order of its parts, without fields at defaults.

    >>> from limelight import KeyLengths, SlidingWindow
    >>> written(SlidingWindow(512, 0) & KeyLengths([7]))
    'key_lengths & sliding_window(left=512, right=0)'
    """
    if isinstance(term, Composite):
        sign = " + " if isinstance(term, Bias) else " & " if isinstance(term, And) else " | "
        parts = [(written(child), isinstance(child, Composite)) for child in term.children]
        return sign.join(sorted(f"({text})" if joined else text for text, joined in parts))
    given = [
        f"{field.name}={'none' if value is None else value}"
        for field in fields(term)  # type: ignore[arg-type]
        if field.name in term.plain_fields and (value := getattr(term, field.name)) != field.default
    ]
    return spelled(type(term)) + (f"({', '.join(given)})" if given else "")


class _Parser:
    """A recursive descent over the tokens of a text; one method for each rule."""

    def __init__(self, text: str, base: type[Term], size: Size, head_dim: int = 64) -> None:
        self.text = text
        self.kinds = {_folded(name): (name, kind) for name, kind in kinds(base).items()}
        self.base = base
        self.size, self.head_dim = size, head_dim
        self.tokens: list[str] = []
        if len(text) > LONGEST:
            raise invalid(self.base.argument, found=f"{len(text)} characters", needed=f"{LONGEST}")
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise self.wrong(repr(text[place:].strip()[0]), "names, numbers and & | + ( ) , =")
            self.tokens.append(found[1])
            place = found.end()

    def wrong(self, found: str, needed: str) -> ValueError:
        return invalid(repr(self.text), found=found, needed=needed)

    @property
    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, *wanted: str) -> bool:
        """Goes past the next token where it is one of these."""
        if self.next in wanted:
            del self.tokens[0]
            return True
        return False

    def need(self, *wanted: str) -> None:
        if not self.take(*wanted):
            raise self.wrong(repr(self.next) if self.tokens else "the end", " or ".join(wanted))

    def whole(self, rule: Any) -> Any:
        term = rule()
        if self.tokens:
            signs = "& or |" if self.base is Mask else "+"
            raise self.wrong(repr(self.next), f"{signs} or the end")
        return term

    def any_of(self) -> Any:
        term = self.all_of()
        while self.take("|"):
            term = term | self.all_of()
        return term

    def all_of(self) -> Any:
        term = self.one()
        while self.take("&"):
            term = term & self.one()
        return term

    def sum_of(self) -> Any:
        term = self.named()
        while self.take("+"):
            term = term + self.named()
        return term

    def one(self) -> Any:
        if self.take("("):
            term = self.any_of()
            self.need(")")
            return term
        return self.named()

    def named(self) -> Any:
        what = self.base.argument
        known = ", ".join(name for name, _ in self.kinds.values())
        if not re.match(r"[A-Za-z_]", self.next):
            found = repr(self.next) if self.tokens else "the end"
            raise self.wrong(found, f"a {what}: {known}")
        if _folded(self.next) not in self.kinds:
            raise invalid(what, found=repr(self.next), needed=f"one of {known}")
        name, kind = self.kinds[_folded(self.next)]
        del self.tokens[0]
        return example(kind, self.size, self.arguments(name, kind), self.head_dim)

    def arguments(self, name: str, kind: type[Term]) -> dict[str, Any]:
        """Plain fields with their values; fields that are tensors cannot be given."""
        given: dict[str, Any] = {}
        if not self.take("(") or self.take(")"):
            return given
        order = [field.name for field in fields(kind) if field.name in kind.plain_fields]  # type: ignore[arg-type]
        needed = f"one of {', '.join(order)}" if order else "none: its tensors are made up here"
        while True:
            if len(self.tokens) > 1 and self.tokens[1] == "=":
                field, self.tokens = self.next, self.tokens[2:]
            elif len(given) < len(order):
                field = order[len(given)]
            else:
                raise invalid(name, found=f"argument {self.next}", needed=needed)
            if field not in order or field in given:
                raise invalid(name, found=f"argument {field!r}", needed=needed)
            given[field] = self.value()
            if not self.take(","):
                self.need(")")
                return given

    def value(self) -> int | float | None:
        token = self.next
        if self.take("none", "None"):
            return None
        if not re.match(r"-?\d", token):
            raise self.wrong(repr(token) if token else "the end", "a number or none")
        del self.tokens[0]
        return int(token) if re.fullmatch(r"-?\d+", token) else float(token)


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
