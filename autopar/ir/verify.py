"""Checks that a graph is well formed: names, order, types, regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autopar.ir.graph import ROLES, Graph, Literal, Operand, Operator
from autopar.ir.phases import mark_problems
from autopar.ir.regions import region_problems
from autopar.ir.results import result_problems
from autopar.ir.types import TensorType


class GraphError(ValueError):
    """A graph is not well formed: a fault of what made it, not of the user.

    Args:
        graph: name of the graph.
        problems: everything that was found, each with the operator that it is about.
    """

    def __init__(self, graph: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"graph {graph!r} is not well formed:\n" + "\n".join(f"  - {p}" for p in problems))


def verify(graph: Graph) -> None:
    """Checks a graph and all graphs inside it.

    Names are unique and defined before use; roles are known; updates name an input of the same type, at most one output
    each; outputs have the types of what they return; results have the types that the primitive gives, where
    `autopar.ir.results` knows it; bodies of scan, while and cond take and return what the operator does; marks are
    known, and of operators that can have them.

    Args:
        graph: any graph.

    Raises:
        GraphError: lists all problems, not the first alone.
    """
    problems = list(_problems(graph, ""))
    if problems:
        raise GraphError(graph.name, problems)


def _problems(graph: Graph, where: str) -> Iterator[str]:
    """Problems of one graph; ``where`` is the path of regions to it, ending in ``/``."""
    repeated = _repeated(op.id for op in graph.operators)
    yield from (f"{where}{id}: {n} operators have this id" for id, n in repeated)
    names = [i.name for i in graph.inputs] + [v.name for op in graph.operators for v in op.results]
    yield from (f"{where}{name}: {n} values have this name" for name, n in _repeated(names))
    yield from (
        f"{where}{path or 'the output'}: {n} outputs have this path {path!r}"
        for path, n in _repeated(o.path for o in graph.outputs)
    )
    for i in graph.inputs:
        if i.role not in ROLES:
            yield f"{where}{i.name}: role {i.role!r} is none of {', '.join(ROLES)}"
    for name, type in [(i.name, i.type) for i in graph.inputs] + [
        (v.name, v.type) for op in graph.operators for v in op.results
    ]:
        if any(n < 0 for n in type.shape):
            yield f"{where}{name}: {type} has a negative dim"

    later = set(names)
    types = {i.name: i.type for i in graph.inputs}
    for op in graph.operators:
        yield from (f"{where}{op.id}: {p}" for p in _operator_problems(op, types, later))
        for name, region in op.regions:
            yield from _problems(region, f"{where}{op.id}/{name}/")
        types.update((v.name, v.type) for v in op.results)
    yield from (where + p for p in _output_problems(graph, types))


def _operator_problems(op: Operator, types: dict[str, TensorType], later: set[str]) -> Iterator[str]:
    """Problems of one operator; ``types`` has what is defined before it, ``later`` is every name of the graph."""
    keys = [key for key, _ in op.attrs]
    if keys != sorted(set(keys)):
        yield f"attributes are not sorted by name, each once: {', '.join(keys)}"
    yield from mark_problems(op)
    yield from (f"{n} regions are called {name!r}" for name, n in _repeated(name for name, _ in op.regions))
    operand_types: list[TensorType] = []
    for operand in op.operands:
        faults = list(_operand_problems(operand, types, later))
        yield from faults
        if isinstance(operand, Literal):
            operand_types.append(operand.type)
        elif not faults:
            operand_types.append(types[operand])
    if len(operand_types) == len(op.operands):
        yield from result_problems(op, tuple(operand_types))
        yield from region_problems(op, tuple(operand_types))


def _operand_problems(operand: Operand, types: dict[str, TensorType], later: set[str]) -> Iterator[str]:
    if isinstance(operand, Literal):
        if operand.type.shape:
            yield f"literal {operand.text} has type {operand.type}; a literal is a scalar"
        if not _is_number(operand.text):
            yield f"literal {operand.text!r} is no number"
    elif operand not in types:
        yield f"uses {operand} before it is made" if operand in later else f"uses {operand}, which nothing makes"


def _output_problems(graph: Graph, types: dict[str, TensorType]) -> Iterator[str]:
    inputs = {i.name: i for i in graph.inputs}
    for o in graph.outputs:
        label = f"output {o.path!r}"
        faults = list(_operand_problems(o.operand, types, set()))
        yield from (f"{label}: {p}" for p in faults)
        if not faults:
            type = graph.type_of(o.operand)
            if type != o.type:
                yield f"{label}: has type {o.type}, but what it returns has {type}"
        if o.updates is None:
            continue
        if o.updates not in inputs:
            yield f"{label}: updates {o.updates}, which is no input"
        elif inputs[o.updates].type != o.type:
            yield f"{label}: has type {o.type}, but the input {o.updates} that it updates has {inputs[o.updates].type}"
    updated = _repeated(o.updates for o in graph.outputs if o.updates is not None)
    yield from (f"{n} outputs update the input {name}" for name, n in updated)


def _is_number(text: str) -> bool:
    if text in ("True", "False"):
        return True
    try:
        complex(text)
    except ValueError:
        return False
    return True


def _repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that come more than once, with how often."""
    return [(name, n) for name, n in Counter(names).items() if n > 1]
