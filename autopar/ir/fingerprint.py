"""Hashes of graphs and of operators that say what is computed, not how it is called.

Values are numbered in the order in which they are made, so that ids, scopes and source lines do not
count. The order of operators does: two graphs that list the same operators in another order differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TypeAlias

from autopar.ir.graph import Attr, Graph, Literal, Operator
from autopar.ir.types import TensorType

# What `json.dumps` writes; it keeps 1, True and "1" apart.
_Form: TypeAlias = "bool | int | str | dict[str, str] | tuple[_Form, ...] | None"


def fingerprint(graph: Graph) -> str:
    """Identity of a program: sha256, 64 hexadecimal digits.

    Equal for graphs with the same primitives, attributes, types and wiring, the same paths and roles of inputs,
    paths of outputs and updates. The graph's own name, ids of operators, names of what they make, names of regions'
    inputs, source lines and scopes do not count; nor do the values of ``constant`` operators, which are no part of
    a graph.

    Args:
        graph: a graph in which every name is defined before it is used.

    Raises:
        KeyError: an operand names no value.
    """
    names = (
        tuple((i.name, i.role) for i in graph.inputs),
        tuple((o.path, o.updates) for o in graph.outputs),
    )
    return _digest((names, graph.fact(_exact_body)))


def structural_hash(op: Operator, operand_types: Sequence[TensorType]) -> str:
    """Equal for operators that can be sharded in the same way and cost the same: sha256, 64 hexadecimal digits.

    It is made of the primitive, attributes, types of operands and results, and regions. Of literals only the
    type counts, and whether they are 0 (padding with zeros keeps partial sums). Which values the operator takes
    does not count: the same operator of two layers has one hash.

    Args:
        op: the operator.
        operand_types: one an operand, as from `Graph.operand_types`.
    """
    operands = tuple(
        (str(t), _literal(o, exact=False) if isinstance(o, Literal) else "value")
        for o, t in zip(op.operands, operand_types, strict=True)
    )
    return _digest((operands, _own(op, exact=False)))


def exact_hash(op: Operator, operand_types: Sequence[TensorType]) -> str:
    """Equal for operators that compute the same of the same operands.

    Args:
        op: the operator.
        operand_types: one an operand.
    """
    return _digest((tuple(map(str, operand_types)), _own(op, exact=True)))


def _digest(form: _Form) -> str:
    return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()


def _exact_body(graph: Graph) -> _Form:
    return _body(graph, exact=True)


def _structural_body(graph: Graph) -> _Form:
    return _body(graph, exact=False)


def _body(graph: Graph, exact: bool) -> _Form:
    """Inputs by type, operators and outputs by the numbers of values."""
    numbers = {i.name: n for n, i in enumerate(graph.inputs)}
    operators: list[_Form] = []
    for op in graph.operators:
        operands = tuple(_literal(o, exact) if isinstance(o, Literal) else numbers[o] for o in op.operands)
        operators.append((operands, _own(op, exact)))
        for v in op.results:
            numbers[v.name] = len(numbers)
    outputs = tuple(
        (_literal(o.operand, exact) if isinstance(o.operand, Literal) else numbers[o.operand], str(o.type))
        for o in graph.outputs
    )
    return tuple(str(i.type) for i in graph.inputs), tuple(operators), outputs


def _own(op: Operator, exact: bool) -> _Form:
    """An operator but for what it takes."""
    return (
        op.primitive,
        tuple((name, _attr(value)) for name, value in sorted(op.attrs, key=lambda item: item[0])),
        tuple(str(v.type) for v in op.results),
        tuple((name, region.fact(_exact_body if exact else _structural_body)) for name, region in op.regions),
        op.effects,
    )


def _literal(literal: Literal, exact: bool) -> _Form:
    return (literal.text if exact else "zero" if literal.is_zero else "literal", str(literal.type))


def _attr(value: Attr) -> _Form:
    # A dict, since attributes have none: no other value looks like it. Text keeps nan and the sign of 0.0.
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    return tuple(_attr(v) for v in value) if isinstance(value, tuple) else value
