"""Details of a plan's operators, from the graph that it was made for: source lines, and einsum-like forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from autopar.ir import Graph, Operator, TensorType
from autopar.plan.details import Details, OperatorDetail
from autopar.sharding.factors import Dims, Rule
from autopar.sharding.registry import rule_for

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def with_operators(details: Details, graph: Graph) -> Details:
    """``details`` with the line and the form of every operator of ``graph``."""
    operators = tuple(OperatorDetail(id, op.source, form_of(op, types)) for id, op, types in every_operator(graph))
    return replace(details, operators=operators)


def form_of(op: Operator, types: Sequence[TensorType]) -> str:
    """``ab,bc->ac  f32[8,64] f32[64,32] -> f32[8,32]``: dims of one letter are split together, ``.`` is never split.

    Args:
        op: the operator. A loop or branch has its types alone.
        types: types of its operands.
    """
    results = [v.type for v in op.results]
    shown = f"{' '.join(map(str, types))} -> {' '.join(map(str, results))}".strip()
    if op.regions:
        return shown
    rule, _ = rule_for(op, tuple(types))
    return f"{letters(rule)}  {shown}"


def letters(rule: Rule) -> str:
    """Labels of operands and results as letters, as ``ab,bc->ac``."""
    names: dict[int, str] = {}

    def one(dims: Dims) -> str:
        return "".join(
            "." if d is None else names.setdefault(d, _LETTERS[len(names)] if len(names) < len(_LETTERS) else "?")
            for d in dims
        )

    operands = [one(dims) for dims in rule.operands]
    return f"{','.join(operands)}->{','.join(one(dims) for dims in rule.results)}"


def every_operator(graph: Graph, prefix: str = "") -> Iterator[tuple[str, Operator, tuple[TensorType, ...]]]:
    """(id as in a plan, operator, types of its operands) of a graph and of the loops and branches in it."""
    for op in graph.operators:
        yield prefix + op.id, op, graph.operand_types(op)
        for name, region in op.regions:
            yield from every_operator(region, f"{prefix}{op.id}/{name}/")
