"""Reads the text of graphs that `autopar.ir.text` writes; the grammar is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import TraceError
from autopar.ir.graph import Attr, Graph, Input, Literal, Operand, Operator, Output, Value
from autopar.ir.text import DTYPE, LITERAL, NAME, WORD
from autopar.ir.types import TensorType, item_bytes

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_INT = re.compile(r"-?\d+(?![\w.])", re.ASCII)
_NUMBER = re.compile(r"-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|inf|nan)(?![\w.])", re.ASCII)
_CONSTANTS: tuple[tuple[str, Attr], ...] = (("None", None), ("True", True), ("False", False))
_T = TypeVar("_T")


class GraphSyntaxError(ValueError):
    """A text is not a graph.

    Args:
        what: what was expected, and what is there.
        line: where, from 1.
        column: where in the line, from 1.
    """

    def __init__(self, what: str, line: int, column: int) -> None:
        self.line = line
        self.column = column
        super().__init__(f"line {line}, column {column}: {what}")


def parse_graph(text: str) -> Graph:
    """The graph that `graph_text` wrote.

    Args:
        text: the whole text of one graph.

    Raises:
        GraphSyntaxError: the text does not follow the grammar; names the line and the column.
    """
    reader = _Reader(text)
    graph = reader.graph()
    reader.end()
    return graph


class _Reader:
    """A position in a text, and one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def fail(self, expected: str) -> GraphSyntaxError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - (self.text.rfind("\n", 0, self.at) + 1) + 1
        rest = self.text[self.at : self.at + 20].split("\n")[0]
        what = f"expected {expected}, found {rest!r}" if rest else f"expected {expected}"
        return GraphSyntaxError(what, line, column)

    def end(self) -> None:
        self.blank()
        if self.at < len(self.text):
            raise self.fail("the end of the text")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        self.blank()
        match_at = pattern.match(self.text, self.at)
        if match_at is None:
            return None
        self.at = match_at.end()
        return match_at.group()

    def found(self, mark: str) -> bool:
        """Takes a mark, or a word that ends here, if it comes next."""
        self.blank()
        end = self.at + len(mark)
        whole = not mark[-1].isalnum() or re.match(r"[\w-]", self.text[end : end + 1]) is None
        if self.text.startswith(mark, self.at) and whole:
            self.at = end
            return True
        return False

    def need(self, mark: str) -> None:
        if not self.found(mark):
            raise self.fail(repr(mark))

    def many(self, item: Callable[[], _T], close: str) -> tuple[_T, ...]:
        """Items divided by commas, up to the mark ``close``."""
        items: list[_T] = []
        while not self.found(close):
            items.append(item())
            if not self.found(","):
                if not self.found(close):
                    raise self.fail(f"',' or {close!r}")
                break
        return tuple(items)

    def string(self) -> str:
        self.blank()
        start = self.at
        text = self.match(_STRING)
        if text is None:
            raise self.fail("a string")
        try:
            return str(json.loads(text))
        except ValueError:
            self.at = start
            raise self.fail("a JSON string") from None

    def word(self, pattern: re.Pattern[str], what: str) -> str:
        word = self.match(pattern)
        if word is not None:
            return word
        if self.text.startswith('"', self.at):
            return self.string()
        raise self.fail(what)

    def name(self) -> str:
        self.need("%")
        return self.word(NAME, "a name")

    def integer(self) -> int:
        text = self.match(_INT)
        if text is None:
            raise self.fail("a whole number")
        return int(text)

    def type(self) -> TensorType:
        dtype = self.word(DTYPE, "a dtype")
        try:
            item_bytes(dtype)
        except TraceError:
            raise self.fail(f"a dtype whose size is known, which {dtype!r} is not,") from None
        self.need("[")
        return TensorType(self.many(self.integer, "]"), dtype)

    def typed(self) -> TensorType:
        self.need(":")
        return self.type()

    def operand(self) -> Operand:
        self.blank()
        if self.text.startswith("%", self.at):
            return self.name()
        return Literal(self.word(LITERAL, "a name or a literal"), self.typed())

    def constant(self) -> Attr:
        for text, value in _CONSTANTS:
            if self.found(text):
                return value
        self.blank()
        if self.text.startswith('"', self.at):
            return self.string()
        if self.found("("):
            return self.constants()
        start = self.at
        number = self.match(_NUMBER)
        try:
            if number is not None:
                return int(number) if re.fullmatch(r"-?\d+", number) else float(number)
        except ValueError:
            self.at = start
        raise self.fail("a constant")

    def constants(self) -> tuple[Attr, ...]:
        start = self.at
        items = self.many(self.constant, ")")
        if len(items) == 1 and self.text[start : self.at - 1].rstrip()[-1:] != ",":
            self.at -= 1
            raise self.fail("',' (a tuple of one item ends with a comma)")
        return items

    def attr(self) -> tuple[str, Attr]:
        key = self.word(WORD, "the name of an attribute")
        self.need("=")
        return key, self.constant()

    def value(self) -> Value:
        return Value(self.name(), self.typed())

    def input(self) -> Input:
        return Input(self.name(), self.typed(), self.word(WORD, "a role"))

    def output(self) -> Output:
        operand, type = self.operand(), self.typed()
        self.need("at")
        path = self.string()
        return Output(operand, path, type, self.name() if self.found("updates") else None)

    def words(self, what: str) -> tuple[str, ...]:
        self.need("(")
        start = self.at
        items = self.constants()
        if not all(isinstance(i, str) for i in items):
            self.at = start
            raise self.fail(f"names of {what}")
        return tuple(str(i) for i in items)

    def operator(self) -> Operator:
        id = self.name()
        if self.found("->"):
            self.need("(")
            results = self.many(self.value, ")")
        else:
            results = (Value(id, self.typed()),)
        self.need("=")
        primitive = self.word(WORD, "the name of a primitive")
        self.need("(")
        operands = self.many(self.operand, ")")
        attrs = self.many(self.attr, "}") if self.found("{") else ()
        scope = self.string() if self.found("scope") else ""
        source = self.string() if self.found("source") else ""
        effects = self.words("effects") if self.found("effects") else ()
        marks = self.words("marks") if self.found("marks") else ()
        regions: list[tuple[str, Graph]] = []
        while not self.operator_ends():
            name = self.word(WORD, "the name of a region, an operator or 'return'")
            self.need(":")
            regions.append((name, self.graph()))
        return Operator(id, primitive, operands, results, attrs, tuple(regions), source, scope, effects, marks)

    def operator_ends(self) -> bool:
        """Whether another operator or the return comes next; neither is taken."""
        self.blank()
        start = self.at
        ends = self.found("%") or self.found("return")
        self.at = start
        return ends

    def graph(self) -> Graph:
        self.need("graph")
        name = self.string()
        self.need("(")
        inputs = self.many(self.input, ")")
        self.need("{")
        operators: list[Operator] = []
        while not self.found("return"):
            operators.append(self.operator())
        self.need("(")
        outputs = self.many(self.output, ")")
        self.need("}")
        return Graph(name, inputs, tuple(operators), outputs)
