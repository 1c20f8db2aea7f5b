"""Recomputation of a bound graph: what runs again, with what running it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

from autopar._compat.primitives import optimization_barrier_p
from autopar.cost import total_flops
from autopar.frontend import Bound, BoundGraph, Traced
from autopar.ir import Graph, Operator
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_fusible
from autopar.microbatch import Microbatching, analyze
from autopar.recompute import Level, Phases, recomputed
from autopar.stages.layers import cluster, forward_operators

_BARRIER = Bound(optimization_barrier_p, MappingProxyType({}), MappingProxyType({}))


def recomputed_bound(
    bound: BoundGraph, phases: Phases, layers: Sequence[Sequence[str]], level: Level
) -> tuple[BoundGraph, Mapping[str, str]]:
    """A bound graph whose backward pass runs parts of the forward pass again.

    Args:
        bound: the graph.
        phases: see `autopar.recompute.select`.
        layers: likewise.
        level: likewise.

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
    return tuple(layer[-1] for layer in layers.members[:-1])


def recomputed_step(
    traced: Traced, level: Level, ends: Sequence[str] | None = None, held: Set[str] = frozenset()
) -> tuple[Traced, tuple[str, ...] | None]:
    """A step whose backward pass recomputes what ``level`` does not hold, for plans of one stage.

    Args:
        traced: the step.
        level: what is held.
        ends: see `layer_ends`.
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
