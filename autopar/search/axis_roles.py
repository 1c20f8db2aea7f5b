"""Roles of mesh axes in a plan: which dims of products with parameters each axis splits.

`axis_roles` is the place to start. The graph is needed because layouts alone do not tell a matrix from what it is
multiplied by: an axis that splits labels by examples may still share the matrices of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Final, TypeAlias

from autopar.cost.compute import operator_flops
from autopar.ir import Graph, Layout, Operator
from autopar.ir.loops import Scan, While, runs_inside
from autopar.ir.primitives import DENSE_CONTRACTIONS
from autopar.plan import AxisRole, OperatorRecord
from autopar.plan.types import AxisUse
from autopar.sharding import rule_for


class _Source(Flag):
    """Sources of a value: the batch or another stage, parameters, optimizer state."""

    DATA = auto()
    PARAMETER = auto()
    STATE = auto()


_CONSTANT: Final = _Source(0)
_SOURCES: Final[Mapping[str, _Source]] = MappingProxyType(
    {"batch": _Source.DATA, "other": _Source.DATA, "parameter": _Source.PARAMETER, "optimizer": _Source.STATE}
)
_Uses: TypeAlias = tuple[AxisUse | None, ...]


def axis_roles(
    graph: Graph, mesh_axes: Sequence[tuple[str, int]], records: Sequence[OperatorRecord]
) -> tuple[AxisRole, ...]:
    """The uses of mesh axes, each with the share of the FLOPs of products of the batch with parameters that have it.

    Args:
        graph: a train step or a stage of one.
        mesh_axes: (axis, size).
        records: layouts of the operators of ``graph``.
    """
    axes = [axis for axis, size in mesh_axes if size > 1]
    if not axes:
        return ()
    walk = _Walk()
    walk.graph(graph, [_SOURCES.get(i.role, _CONSTANT) for i in graph.inputs], "", 1.0)
    flops: dict[tuple[str, AxisUse], float] = {}
    total = 0.0
    for record in records:
        product = walk.products.get(record.id)
        if product is None:
            continue
        total += product.flops
        layouts = [Layout.parse(text) for text in record.operands[:2]]
        for axis in axes:
            if (use := product.use_of(axis, layouts)) is not None:
                flops[axis, use] = flops.get((axis, use), 0.0) + product.flops
    return tuple(AxisRole(axis, use, round(n / total, 3)) for (axis, use), n in sorted(flops.items()) if n)


@dataclass(frozen=True)
class _Product:
    """A product of the batch with parameters.

    Args:
        flops: FLOPs of a step.
        sides: for each operand, that of parameters first, its number, and the use of an axis that splits each dim.
    """

    flops: float
    sides: tuple[tuple[int, _Uses], ...]

    def use_of(self, axis: str, layouts: Sequence[Layout]) -> AxisUse | None:
        """The use of an axis that splits the operands so; of one that splits both that in the parameter."""
        for number, uses in self.sides:
            for dim, use in zip(layouts[number].dims, uses, strict=True):
                if axis in dim and use is not None:
                    return use
        return None


class _Walk:
    """Follows sources through a graph and collects products by the ids that plans have for them."""

    def __init__(self) -> None:
        self.products: dict[str, _Product] = {}

    def graph(self, graph: Graph, inputs: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the outputs of a graph, from those of its inputs."""
        known = {i.name: source for i, source in zip(graph.inputs, inputs, strict=True)}
        for op in graph.operators:
            sources = [known.get(o, _CONSTANT) if isinstance(o, str) else _CONSTANT for o in op.operands]
            region = _REGIONS.get(op.primitive) if op.regions else None
            if region is not None:
                results = region(self, op, sources, f"{prefix}{op.id}/", runs_inside(op, runs))
            else:
                results = [reduce(or_, sources, _CONSTANT)] * len(op.results)
                if (product := _product(graph, op, sources, runs)) is not None:
                    self.products[prefix + op.id] = product
            known.update((v.name, source) for v, source in zip(op.results, results, strict=True))
        return [known.get(o.operand, _CONSTANT) if isinstance(o.operand, str) else _CONSTANT for o in graph.outputs]

    def scan(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of a scan."""
        scan = Scan.of(op)
        consts, carried, stacks = scan.split(sources)
        while True:
            results = self.graph(scan.body, [*consts, *carried, *stacks], f"{prefix}body/", runs)
            passed, rows = scan.split_results(results)
            joined = [a | b for a, b in zip(carried, passed, strict=True)]
            if joined == carried:
                return [*carried, *rows]
            carried = joined

    def while_loop(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of a while loop."""
        loop = While.of(op)
        _, in_body, carried = loop.split(sources)
        while True:
            results = self.graph(loop.body, [*in_body, *carried], f"{prefix}body/", runs)
            joined = [a | b for a, b in zip(carried, results, strict=True)]
            if joined == carried:
                return carried
            carried = joined

    def cond(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of branches."""
        branches = [self.graph(branch, sources[1:], f"{prefix}{name}/", runs) for name, branch in op.regions]
        return [reduce(or_, of_result) for of_result in zip(*branches, strict=True)]


_REGIONS: Final[Mapping[str, Callable[[_Walk, Operator, Sequence[_Source], str, float], list[_Source]]]] = (
    MappingProxyType({"scan": _Walk.scan, "while": _Walk.while_loop, "cond": _Walk.cond})
)


def _product(graph: Graph, op: Operator, sources: Sequence[_Source], runs: float) -> _Product | None:
    """``op`` as a product of the batch with parameters; None of other operators."""
    is_ragged = op.primitive == "ragged_dot"
    if not is_ragged and op.primitive not in DENSE_CONTRACTIONS:
        return None
    parameter = next((n for n in (0, 1) if sources[n] == _Source.PARAMETER and sources[1 - n] & _Source.DATA), None)
    if parameter is None:
        return None
    types = graph.operand_types(op)
    flops = runs * operator_flops(op, types)
    if is_ragged:
        return _Product(flops, ((1, ("expert", "tensor", "tensor")), (0, ("data", None)))) if parameter == 1 else None
    rule, _ = rule_for(op, types)
    of_parameter, of_data, result = rule.operands[parameter], rule.operands[1 - parameter], rule.results[0]
    shared = {*of_data}.intersection(result)
    inner: AxisUse = "space" if op.primitive == "conv_general_dilated" else "context"
    brought = [f for f in result if f is not None and f in of_data and f not in of_parameter]
    weights: _Uses = tuple("expert" if f is not None and f in shared else "tensor" for f in of_parameter)
    # The first dim that the batch brings is that of examples.
    batch: _Uses = tuple(None if f not in brought else "data" if f == brought[0] else inner for f in of_data)
    return _Product(flops, ((parameter, weights), (1 - parameter, batch)))
