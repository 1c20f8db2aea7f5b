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
from collections.abc import Iterator

from autopar.ir.graph import Attr, Graph, Literal, Operand, Operator, Output, Value
from autopar.ir.types import TensorType

# Names are written bare where reading them greedily ends where they end: brackets are closed, and a colon
# is followed by a digit (the colon before a type is followed by a blank).
_PLAIN = r"[\w./'-]"
_CLOSED = rf"\({_PLAIN}*\)"
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
