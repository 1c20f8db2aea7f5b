"""Finds dims of parameters that number experts: products along them do as many things at once, each with its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, cast

from autopar.ir import Graph, Operator
from autopar.ir.loops import Scan

#: By value: the parameter that it is, cast or turned, and for each of its dims that of the parameter.
_Origins: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]


def expert_dims(graph: Graph) -> dict[str, int]:
    """Dim of the experts of each parameter that has one.

    A dim of a parameter is one of experts where a product of the parameter with an activation takes it as a batch dim:
    for each index along it there is a matrix of its own, used on activations of its own.

    Args:
        graph: a train step; loops over stacked layers are looked into.
    """
    dims: dict[str, int] = {}
    start = {i.name: (i.name, tuple(range(i.type.rank))) for i in graph.inputs if i.role == "parameter"}
    _look(graph, start, dims)
    return dims


def _look(graph: Graph, origins: _Origins, by_input: dict[str, int]) -> None:
    for op in graph.operators:
        known = [origins.get(o) if isinstance(o, str) else None for o in op.operands]
        if op.primitive == "dot_general":
            _product(op, known, by_input)
        elif op.primitive == "transpose" and known[0] is not None:
            name, dims = known[0]
            origins[op.results[0].name] = name, tuple(dims[d] for d in op.ints("permutation"))
        elif op.primitive in ("convert_element_type", "copy", "stop_gradient") and known[0] is not None:
            origins[op.results[0].name] = known[0]
        elif op.primitive == "scan":
            scan = Scan.of(op)
            inner: _Origins = {}
            for n, (entry, origin) in enumerate(zip(scan.body.inputs, known, strict=True)):
                if origin is not None:
                    inner[entry.name] = (origin[0], origin[1][1:]) if n >= scan.num_whole else origin
            _look(scan.body, inner, by_input)


def _product(op: Operator, known: list[tuple[str, tuple[int, ...]] | None], by_input: dict[str, int]) -> None:
    _, batch = cast("tuple[object, tuple[tuple[int, ...], ...]]", op.attr("dimension_numbers"))
    for origin, other, dims in zip(known, reversed(known), batch, strict=True):
        if origin is not None and other is None and dims:
            by_input.setdefault(origin[0], origin[1][dims[0]])


def expert_state(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """``dims`` and those of optimizer state that has the shape of such a parameter.

    Args:
        graph: the train step.
        dims: from `expert_dims`.
    """
    by_shape = {i.type.shape: dims[i.name] for i in graph.inputs if i.name in dims}
    state = {i.name: by_shape[i.type.shape] for i in graph.inputs if i.role == "optimizer" and i.type.shape in by_shape}
    return {**state, **dims}
