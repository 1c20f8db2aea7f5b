"""Graphs as text that people read and that `parse_graph` reads back to an equal graph.

One operator a line, regions indented below it::

    graph "step"(
      %state.w: f32[16,16] parameter,
      %batch['x']: f32[16,16] batch,
    ) {
      %mul.0: f32[16,16] = mul(%batch['x'], %state.w) {out_dtype=None} source "mlp.py:12 (loss)"
      %while.0 -> (%while.0:0: i32[]) = while(0: i32[]) {body_nconsts=0, cond_nconsts=0} cond: graph "cond"(
        %in.0: i32[] other,
      ) {
        %lt.0: bool[] = lt(%in.0, 3: i32[])
        return (
          %lt.0: bool[] at "out.0",
        )
      } body: graph "body"(
        %in.0: i32[] other,
      ) {
        %add.0: i32[] = add(%in.0, 1: i32[])
        return (
          %add.0: i32[] at "out.0",
        )
      }
      return (
        %mul.0: f32[16,16] at "['w']" updates %state.w,
      )
    }

The grammar (`?` optional, `*` any number, items of a list divided by commas, a comma after the last allowed; blanks
and line ends divide words, nothing else; ``#`` begins a comment that ends with the line)::

    graph    = "graph" STRING "(" input* ")" "{" operator* "return" "(" output* ")" "}"
    input    = NAME ":" type role
    operator = (NAME ":" type | NAME "->" "(" value* ")") "=" word "(" operand* ")" ("{" attr* "}")?
               ("scope" STRING)? ("source" STRING)? ("effects" tuple)? ("marks" tuple)? (word ":" graph)*
    value    = NAME ":" type
    output   = operand ":" type "at" STRING ("updates" NAME)?
    operand  = NAME | literal ":" type          (an output that is a literal has two types: 0.0: f32[]: f32[])
    type     = word "[" INT* "]"
    attr     = word "=" constant
    constant = "None" | "True" | "False" | INT | FLOAT | STRING | tuple
    tuple    = "(" constant* ")"                as Python writes it, with the comma of (1,)
    literal  = word | "(" word ")"              the text of an `autopar.ir.Literal`

NAME is ``%`` and the name as it is; names with blanks, commas or brackets that do not close are STRINGs after the
``%``. STRING is a JSON string. A word that has other characters than its place allows is a STRING
too, and so is the name of a region that is a word of this grammar. The first form
of an operator is for one result that is called as the operator is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from autopar.errors import TraceError
from autopar.ir.graph import Attr, Graph, Input, Literal, Operand, Operator, Output, Value
from autopar.ir.types import TensorType, item_bytes

# Names are written bare where reading them greedily ends where they end: brackets are closed, and a colon
# is followed by a digit (the colon before a type is followed by a blank).
_PLAIN = r"[\w./'-]"
_CLOSED = rf"\({_PLAIN}*\)"
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_INT = re.compile(r"-?\d+(?![\w.])", re.ASCII)
_NUMBER = re.compile(r"-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|inf|nan)(?![\w.])", re.ASCII)
_CONSTANTS: tuple[tuple[str, Attr], ...] = (("None", None), ("True", True), ("False", False))
_T = TypeVar("_T")


for _ in range(5):  # jvp(transpose(..)) as deep as derivatives go; deeper names are quoted
    _CLOSED = rf"\((?:{_PLAIN}|{_CLOSED})*\)"
NAME = re.compile(rf"(?:{_PLAIN}|:(?=\d)|{_CLOSED}|\[[\w'-]*\])+", re.ASCII)
WORD = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
DTYPE = re.compile(r"[A-Za-z_]\w*(?:<\w+>)?", re.ASCII)
LITERAL = re.compile(r"[\w.+-]+|\([\w.+-]+\)", re.ASCII)

_INDENT = "  "
# Words that follow an operator: a region that is called so is quoted.
_RESERVED = ("effects", "marks", "return", "scope", "source")


def graph_text(graph: Graph) -> str:
    """The graph as text, one operator a line; `parse_graph` of it equals ``graph``.

    Args:
        graph: any graph; it need not pass `verify`.
    """
    return "\n".join(_graph_lines(graph)) + "\n"


def graph_digest(graph: Graph) -> str:
    """A hash of the text of a graph, made once; 24 hexadecimal digits. Graphs of one digest are equal."""
    kept = vars(graph)
    if "digest" not in kept:
        kept["digest"] = hashlib.sha256(graph_text(graph).encode()).hexdigest()[:24]
    digest: str = kept["digest"]
    return digest


def with_digest(graph: Graph, digest: str) -> Graph:
    """A graph whose `graph_digest` is known from how it was made: no other graph may have it."""
    vars(graph)["digest"] = digest
    return graph


def operator_text(op: Operator) -> str:
    """One operator as text, with its regions on further lines."""
    return "\n".join(_operator_lines(op))


def _graph_lines(graph: Graph) -> Iterator[str]:
    yield f"graph {quoted(graph.name)}(" + ("" if graph.inputs else ") {")
    for i in graph.inputs:
        yield f"{_INDENT}{name_text(i.name)}: {type_text(i.type)} {_word(WORD, i.role)},"
    if graph.inputs:
        yield ") {"
    for op in graph.operators:
        yield from (_INDENT + line for line in _operator_lines(op))
    yield f"{_INDENT}return (" + ("" if graph.outputs else ")")
    for o in graph.outputs:
        yield f"{_INDENT * 2}{_output_text(o)},"
    if graph.outputs:
        yield f"{_INDENT})"
    yield "}"


def _operator_lines(op: Operator) -> Iterator[str]:
    parts = [f"{_results_text(op)} = {_word(WORD, op.primitive)}({', '.join(map(operand_text, op.operands))})"]
    if op.attrs:
        parts.append("{" + ", ".join(f"{_word(WORD, k)}={attr_text(v)}" for k, v in op.attrs) + "}")
    if op.scope:
        parts.append(f"scope {quoted(op.scope)}")
    if op.source:
        parts.append(f"source {quoted(op.source)}")
    if op.effects:
        parts.append(f"effects {attr_text(op.effects)}")
    if op.marks:
        parts.append(f"marks {attr_text(op.marks)}")
    line = " ".join(parts)
    for name, region in op.regions:
        first, *middle, last = _graph_lines(region)
        yield f"{line} {quoted(name) if name in _RESERVED else _word(WORD, name)}: {first}"
        yield from middle
        line = last
    yield line


def _results_text(op: Operator) -> str:
    if len(op.results) == 1 and op.results[0].name == op.id:
        return _value_text(op.results[0])
    return f"{name_text(op.id)} -> ({', '.join(map(_value_text, op.results))})"


def _value_text(value: Value) -> str:
    return f"{name_text(value.name)}: {type_text(value.type)}"


def _output_text(output: Output) -> str:
    updates = "" if output.updates is None else f" updates {name_text(output.updates)}"
    return f"{operand_text(output.operand)}: {type_text(output.type)} at {quoted(output.path)}{updates}"


def operand_text(operand: Operand) -> str:
    """Text of an operand: ``%name`` of a value, ``0.5: f32[]`` of a literal."""
    if isinstance(operand, Literal):
        return f"{_word(LITERAL, operand.text)}: {type_text(operand.type)}"
    return name_text(operand)


def name_text(name: str) -> str:
    """``%name``, quoted where the name would not be read back bare."""
    return "%" + _word(NAME, name)


def type_text(type: TensorType) -> str:
    """Text of a type, as ``f32[16,32]``."""
    return f"{_word(DTYPE, type.dtype)}[{','.join(map(str, type.shape))}]"


def attr_text(value: Attr) -> str:
    """A parameter's value: as Python writes it, strings as JSON does."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(attr_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is None or isinstance(value, bool):
        return str(value)
    # The base class's form: numpy's scalars and enums are numbers too, and print otherwise.
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


def quoted(text: str) -> str:
    """Text in quotes, escaped as in JSON."""
    return json.dumps(text)


def _word(pattern: re.Pattern[str], text: str) -> str:
    return text if pattern.fullmatch(text) else quoted(text)


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
