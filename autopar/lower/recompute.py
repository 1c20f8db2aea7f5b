"""Recomputation of a bound graph: what runs again, with what running it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

from autopar._compat.primitives import optimization_barrier_p
from autopar.cost import total_flops
from autopar.frontend import Bound, BoundGraph, Traced
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_fusible
from autopar.microbatch import analyze
from autopar.recompute import Level, Phases, recomputed
from autopar.stages.layers import cluster, forward_operators

_T = TypeVar("_T")
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


def recomputed_step(
    traced: Traced, level: Level, ends: Sequence[str] | None = None, held: Set[str] = frozenset()
) -> tuple[Traced, tuple[str, ...] | None]:
    """A step whose backward pass recomputes what ``level`` does not hold, for plans of one stage.

    Args:
        traced: the step.
        level: what is held.
        ends: ids of the last operators of the layers of its forward pass but the last; None finds layers.
        held: ids of operators whose results are held at any level.

    Returns the rewritten step, and the ends of its layers; None of these where nothing is recomputed.
    """
    if level == "none":
        return traced, None
    graph = traced.graph
    microbatching = analyze(graph, 1)
    forward = [op.id for op in forward_operators(graph, microbatching)]
    if ends is None:
        # k layers hold k boundaries and one layer's values: least for k as the root of their ratio, which in
        # transformers is about twice the number of products.
        heavy = sum(total_flops(graph, graph.by_id[id]) > 0 and not is_fusible(graph.by_id[id]) for id in forward)
        ends = [layer[-1] for layer in cluster(graph, microbatching, max(1, round(math.sqrt(2 * heavy)))).members[:-1]]
    cuts = [-1, *(forward.index(id) for id in ends), len(forward) - 1]
    layers = [[id for id in forward[a + 1 : b + 1] if id not in held] for a, b in pairwise(cuts)]
    by_pass = {op.id: phase_of(op) for op in graph.operators}
    passes = [frozenset(id for id, phase in by_pass.items() if phase == p) for p in ("forward", "backward")]
    phases = Phases(passes[0] - held, passes[1])
    program, _ = recomputed_bound(traced.program, phases, layers, level)
    return replace(traced, program=program), tuple(ends)


def for_copies(decisions: Mapping[str, _T], copies: Mapping[str, str]) -> Mapping[str, _T]:
    """``decisions`` by operator, with those of copies: the same as those of the originals, also inside regions.

    Args:
        decisions: by id of an operator, behind the ids of enclosing operators and regions.
        copies: from `recomputed_bound`.
    """
    if not copies:
        return decisions
    originals = set(copies.values())
    inside: dict[str, list[str]] = {}
    for key in decisions:
        head = key
        end = key.find("/")
        while end >= 0:
            if key[:end] in originals:
                head = key[:end]
                break
            end = key.find("/", end + 1)
        inside.setdefault(head, []).append(key)
    extended = dict(decisions)
    for new, old in copies.items():
        extended.update((new + key[len(old) :], decisions[key]) for key in inside.get(old, ()))
    return extended
