"""Rewritings of graphs that the planner makes without jax, with the data that running their new operators needs.

`reassociated_bound`: products in another order (`autopar.ir.algebra`). `blockwise_bound`: attention in blocks
(`autopar.ir.blockwise`). `recomputed_bound` and `recomputed_step`: recomputation (`autopar.recompute`). Rewritings
that are traced by jax start at `autopar.lower.retrace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import jax
from jax.extend.core import Primitive

from autopar._compat.primitives import optimization_barrier_p
from autopar.cost import total_flops
from autopar.frontend import Bound, BoundGraph, Traced
from autopar.ir import Graph, Operator
from autopar.ir.algebra import Change, reassociated
from autopar.ir.analysis import dependents, names_made
from autopar.ir.blockwise import ATTENTION, BACKWARD, blockwise
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_fusible
from autopar.microbatch import Microbatching, analyze
from autopar.recompute import Level, Phases, recomputed
from autopar.stages.layers import cluster, forward_operators

_PRIMITIVES: Mapping[str, Primitive] = MappingProxyType(
    {
        "add": jax.lax.add_p,
        "dot_general": jax.lax.dot_general_p,
        "neg": jax.lax.neg_p,
        "transpose": jax.lax.transpose_p,
    }
)
_ATTENTION: Mapping[str, Primitive] = MappingProxyType({name: Primitive(name) for name in (ATTENTION, BACKWARD)})
_BARRIER = Bound(optimization_barrier_p, MappingProxyType({}), MappingProxyType({}))


def _with_bodies(bound: BoundGraph, rewrite: Callable[[Operator, BoundGraph], BoundGraph]) -> BoundGraph:
    """The graph with the bodies of its operators rewritten; the same graph where ``rewrite`` changes none.

    Args:
        bound: the graph.
        rewrite: from an operator and a body of it to another body, or to the same object.
    """
    operators: list[Operator] = []
    bounds = dict(bound.bounds)
    for op in bound.graph.operators:
        data = bounds.get(op.id)
        bodies = {} if data is None else {k: rewrite(op, b) for k, b in data.regions.items()}
        if data is None or all(b is data.regions[k] for k, b in bodies.items()):
            operators.append(op)
            continue
        bounds[op.id] = replace(data, regions=MappingProxyType(bodies))
        operators.append(replace(op, regions=tuple((k, bodies[k].graph) for k, _ in op.regions)))
    if all(a is b for a, b in zip(operators, bound.graph.operators, strict=True)):
        return bound
    return replace(bound, graph=replace(bound.graph, operators=tuple(operators)), bounds=bounds)


def reassociated_bound(
    bound: BoundGraph, batch: Collection[str], pays: Callable[[Change], bool]
) -> tuple[BoundGraph, tuple[Change, ...]]:
    """A bound graph with products in another order where that pays, in the bodies of its operators too.

    Args:
        bound: the graph.
        batch, pays: see `autopar.ir.algebra.reassociated`.

    Returns it, and what was changed; the same graph where nothing was.
    """
    of_batch = {*batch, *names_made(dependents(bound.graph.operators, batch))}
    changes: list[Change] = []

    def body(op: Operator, within: BoundGraph) -> BoundGraph:
        rewritten, more = reassociated_bound(within, _batch_inside(op, within.graph, of_batch), pays)
        changes.extend(more)
        return rewritten

    inside = _with_bodies(bound, body)
    rewritten = reassociated(inside.graph, batch, pays)
    if not rewritten.changes:
        return inside, tuple(changes)
    bounds = {
        op.id: inside.bounds.get(op.id) or _bound(op, inside.bounds, rewritten.likes)
        for op in rewritten.graph.operators
        if op.id not in inside.constants
    }
    return replace(inside, graph=rewritten.graph, bounds=bounds), (*changes, *rewritten.changes)


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


def blockwise_bound(bound: BoundGraph, least_scores: int) -> BoundGraph:
    """A bound graph with attention in blocks, in the bodies of its operators too; the same where there is none.

    Args:
        bound: the graph.
        least_scores: elements of the scores of one head from which attention runs in blocks; 0 leaves all as it is.
    """
    if not least_scores:
        return bound
    inside = _with_bodies(bound, lambda op, body: blockwise_bound(body, least_scores))
    rewritten = blockwise(inside.graph, least_scores)
    if not rewritten.cores:
        return inside
    bounds = dict(inside.bounds)
    for op in rewritten.graph.operators:
        if op.id in rewritten.cores:
            bounds[op.id] = _core(op, inside.bounds, rewritten.cores[op.id], rewritten.origins)
    # What replaces a product comes from where that came from.
    origins = {new: inside.origins[old] for new, old in rewritten.cores.items() if old in inside.origins}
    return replace(inside, graph=rewritten.graph, bounds=bounds, origins={**inside.origins, **origins})


def _core(op: Operator, bounds: Mapping[str, Bound], like: str, origins: Mapping[str, str]) -> Bound:
    """Data for running a core: its operator, regions, and the precision of the products that it replaces."""
    regions = {name: _region(graph, bounds, origins) for name, graph in op.regions}
    params = {"operator": op, "regions": regions, "precision": bounds[like].params.get("precision")}
    return Bound(_ATTENTION[op.primitive], MappingProxyType(params), MappingProxyType(regions))


def _region(graph: Graph, bounds: Mapping[str, Bound], origins: Mapping[str, str]) -> BoundGraph:
    return BoundGraph(graph, MappingProxyType({op.id: bounds[origins[op.id]] for op in graph.operators}), {})


def recomputed_bound(
    bound: BoundGraph, phases: Phases, layers: Sequence[Sequence[str]], level: Level
) -> tuple[BoundGraph, Mapping[str, str]]:
    """A bound graph whose backward pass runs parts of the forward pass again.

    Args:
        bound: the graph.
        phases: by id of an operator whether it is of the forward pass, the backward pass or the update.
        layers: by layer the ids of its operators in the forward pass.
        level: what the backward pass keeps, as "selective"; the rest is recomputed.

    Returns it, and for each operator that it has more (barriers too) the id of the one that it stands for.
    """
    rewritten = recomputed(bound.graph, phases, layers, level)
    bounds = {**bound.bounds, **{new: bound.bounds[old] for new, old in rewritten.copies.items()}}
    bounds.update((id, _BARRIER) for id in rewritten.barriers)
    firsts = dict(rewritten.barriers)
    return replace(bound, graph=rewritten.graph, bounds=bounds), {**rewritten.copies, **firsts}


def layer_ends(traced: Traced, level: Level, ends: Sequence[str] | None = None) -> tuple[str, ...] | None:
    """Ids of the last forward operators of the layers but the last, between which ``level`` holds what layers take.

    Args:
        traced: a step.
        level: what is held; None is returned where nothing is recomputed.
        ends: those that are known; None finds layers.
    """
    if level == "none" or ends is not None:
        return None if level == "none" or ends is None else tuple(ends)
    microbatching, forward = _forward(traced.graph)
    # k layers hold k boundaries and one layer's values: least for k as the root of their ratio, which in
    # transformers is about twice the number of products.
    heavy = sum(total_flops(traced.graph, op) > 0 and not is_fusible(op) for op in forward)
    layers = cluster(traced.graph, microbatching, max(1, round(math.sqrt(2 * heavy))))
    return tuple(layer[-1] for layer in layers.recomputed[:-1])


def recomputed_step(
    traced: Traced, level: Level, ends: Sequence[str] | None = None, held: Set[str] = frozenset()
) -> tuple[Traced, tuple[str, ...] | None]:
    """A step whose backward pass recomputes what ``level`` does not hold, for plans of one stage.

    Args:
        traced: the step.
        level: what is held.
        ends: last operator of each layer; None finds layers.
        held: ids of operators whose results are held at any level.

    Returns the rewritten step, and the ends of its layers; None of these where nothing is recomputed.
    """
    ends = layer_ends(traced, level, ends)
    if ends is None:
        return traced, None
    forward = [op.id for op in _forward(traced.graph)[1]]
    cuts = [-1, *(forward.index(id) for id in ends), len(forward) - 1]
    layers = [[id for id in forward[a + 1 : b + 1] if id not in held] for a, b in pairwise(cuts)]
    by_pass = {op.id: phase_of(op) for op in traced.graph.operators}
    passes = [frozenset(id for id, phase in by_pass.items() if phase == p) for p in ("forward", "backward")]
    phases = Phases(passes[0] - held, passes[1])
    program, _ = recomputed_bound(traced.program, phases, layers, level)
    return replace(traced, program=program), ends


def _forward(graph: Graph) -> tuple[Microbatching, list[Operator]]:
    """The step at once, and the operators of its forward pass."""
    microbatching = analyze(graph, 1)
    return microbatching, list(forward_operators(graph, microbatching))
