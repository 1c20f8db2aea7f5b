"""Products in another order in a bound graph, with what running the new operators needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import jax
from jax.extend.core import Primitive

from autopar.frontend import Bound, BoundGraph
from autopar.ir import Graph, Operator
from autopar.ir.algebra import Change, reassociated
from autopar.ir.analysis import dependents, names_made

_PRIMITIVES: Mapping[str, Primitive] = MappingProxyType(
    {
        "add": jax.lax.add_p,
        "dot_general": jax.lax.dot_general_p,
        "neg": jax.lax.neg_p,
        "transpose": jax.lax.transpose_p,
    }
)


def reassociated_bound(
    bound: BoundGraph, batch: Collection[str], pays: Callable[[Change], bool]
) -> tuple[BoundGraph, tuple[Change, ...]]:
    """A bound graph with products in another order where that pays, in the bodies of its operators too.

    Args:
        bound: the graph.
        batch, pays: see `autopar.ir.algebra.reassociated`.

    Returns it, and what was changed; the same graph where nothing was.
    """
    inside, changes = _bodies(bound, batch, pays)
    rewritten = reassociated(inside.graph, batch, pays)
    if not rewritten.changes:
        return inside, changes
    bounds = {
        op.id: inside.bounds.get(op.id) or _bound(op, inside.bounds, rewritten.likes)
        for op in rewritten.graph.operators
        if op.id not in inside.constants
    }
    return replace(inside, graph=rewritten.graph, bounds=bounds), (*changes, *rewritten.changes)


def _bodies(
    bound: BoundGraph, batch: Collection[str], pays: Callable[[Change], bool]
) -> tuple[BoundGraph, tuple[Change, ...]]:
    """The graph with the bodies of its operators rewritten, and what was changed."""
    of_batch = {*batch, *names_made(dependents(bound.graph.operators, batch))}
    operators: list[Operator] = []
    bounds = dict(bound.bounds)
    changes: list[Change] = []
    for op in bound.graph.operators:
        known = bounds.get(op.id)
        regions = {} if known is None else known.regions
        bodies = {k: reassociated_bound(b, _batch_inside(op, b.graph, of_batch), pays) for k, b in regions.items()}
        inside = [change for _, changes in bodies.values() for change in changes]
        if known is None or not inside:
            operators.append(op)
            continue
        changes += inside
        bounds[op.id] = replace(known, regions=MappingProxyType({k: b for k, (b, _) in bodies.items()}))
        operators.append(replace(op, regions=tuple((k, bodies[k][0].graph) for k, _ in op.regions)))
    if not changes:
        return bound, ()
    return replace(bound, graph=replace(bound.graph, operators=tuple(operators)), bounds=bounds), tuple(changes)


def _batch_inside(op: Operator, body: Graph, of_batch: Collection[str]) -> set[str]:
    """Inputs of a body that hold what is computed of the batch; of others than loops with a fixed length all."""
    if op.primitive != "scan":
        return {i.name for i in body.inputs}
    fixed, carried = op.integer("num_consts"), op.integer("num_carry")
    inside = {i.name for i, o in zip(body.inputs, op.operands, strict=True) if o in of_batch}
    while True:
        reached = {*inside, *names_made(dependents(body.operators, inside))}
        carries = zip(body.inputs[fixed : fixed + carried], body.outputs, strict=False)
        more = {i.name for i, out in carries if out.operand in reached} - inside
        if not more:
            return inside
        inside |= more


def _bound(op: Operator, bounds: Mapping[str, Bound], likes: Mapping[str, str]) -> Bound:
    """Data for running a new operator: parameters of one like it, with its own dims."""
    like = bounds.get(likes.get(op.id, ""))
    primitive = _PRIMITIVES[op.primitive] if like is None else like.primitive
    params = {} if like is None else dict(like.params)
    if op.primitive == "dot_general":
        params["dimension_numbers"] = op.attr("dimension_numbers")
    if op.primitive == "transpose":
        params["permutation"] = op.attr("permutation")
    return Bound(primitive, MappingProxyType(params), MappingProxyType({}))
