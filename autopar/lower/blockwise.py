"""Attention in blocks of a bound graph: each core one operator, with what running its regions needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jax.extend.core import Primitive

from autopar.frontend import Bound, BoundGraph
from autopar.ir import Graph, Operator
from autopar.ir.blockwise import ATTENTION, BACKWARD, blockwise

_PRIMITIVES: Mapping[str, Primitive] = MappingProxyType({name: Primitive(name) for name in (ATTENTION, BACKWARD)})


def blockwise_bound(bound: BoundGraph, least_scores: int) -> BoundGraph:
    """A bound graph with attention in blocks, in the bodies of its operators too; the same where there is none.

    Args:
        bound: the graph.
        least_scores: elements of the scores of one head from which attention runs in blocks; 0 leaves all as it is.
    """
    if not least_scores:
        return bound
    inside = _bodies(bound, least_scores)
    rewritten = blockwise(inside.graph, least_scores)
    if not rewritten.cores:
        return inside
    bounds = dict(inside.bounds)
    for op in rewritten.graph.operators:
        if op.id in rewritten.cores:
            bounds[op.id] = _bound(op, inside.bounds, rewritten.cores[op.id], rewritten.origins)
    # What replaces a product comes from where that came from.
    origins = {new: inside.origins[old] for new, old in rewritten.cores.items() if old in inside.origins}
    return replace(inside, graph=rewritten.graph, bounds=bounds, origins={**inside.origins, **origins})


def _bodies(bound: BoundGraph, least_scores: int) -> BoundGraph:
    """The graph with the bodies of its operators rewritten."""
    operators: list[Operator] = []
    bounds = dict(bound.bounds)
    for op in bound.graph.operators:
        known = bounds.get(op.id)
        bodies = {} if known is None else {k: blockwise_bound(b, least_scores) for k, b in known.regions.items()}
        if known is None or all(b is known.regions[k] for k, b in bodies.items()):
            operators.append(op)
            continue
        bounds[op.id] = replace(known, regions=MappingProxyType(bodies))
        operators.append(replace(op, regions=tuple((k, bodies[k].graph) for k, _ in op.regions)))
    if all(a is b for a, b in zip(operators, bound.graph.operators, strict=True)):
        return bound
    return replace(bound, graph=replace(bound.graph, operators=tuple(operators)), bounds=bounds)


def _bound(op: Operator, bounds: Mapping[str, Bound], like: str, origins: Mapping[str, str]) -> Bound:
    """Data for running a core: its operator, regions, and the precision of the products that it replaces."""
    regions = {name: _region(graph, bounds, origins) for name, graph in op.regions}
    params = {"operator": op, "regions": regions, "precision": bounds[like].params.get("precision")}
    return Bound(_PRIMITIVES[op.primitive], MappingProxyType(params), MappingProxyType(regions))


def _region(graph: Graph, bounds: Mapping[str, Bound], origins: Mapping[str, str]) -> BoundGraph:
    return BoundGraph(graph, MappingProxyType({op.id: bounds[origins[op.id]] for op in graph.operators}), {})
