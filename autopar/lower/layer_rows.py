"""Finds the operators of an update that treat the layers of stacks independently, and those that only add up over
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Layout, Literal, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_generator
from autopar.lower.split_layers import layer_count
from autopar.microbatch import pseudo_mesh
from autopar.microbatch.base import split
from autopar.microbatch.inside import zeros_of
from autopar.microbatch.match import Match, local_match, match

_STATE = ("parameter", "optimizer")


@dataclass(frozen=True)
class LayerRows:
    """Operators of the update that run layer by layer, in two loops: one adds up, the other updates.

    Args:
        length: number of layers.
        matches: by id of an operator of the second loop, in running order, the layouts over layers in which it runs.
        results: names of their results that leave that loop.
        terms: likewise of the first loop; each trip makes terms of sums over layers, as norms of all gradients need.
        totals: names of these sums.
        whole: ids of all other operators, on whole values, in running order; those behind a total read what it decides.
    """

    length: int
    matches: Mapping[str, Match]
    results: tuple[str, ...]
    terms: Mapping[str, Match]
    totals: tuple[str, ...]
    whole: tuple[str, ...]


def rows_of(graph: Graph, phases: Sequence[str] = ("update",)) -> LayerRows:
    """The rows of a step that run layer by layer; without ``results`` where there are none.

    Args:
        graph: a step.
        phases: of operators that may: those of the backward pass add up and cast stacks of gradients.
    """
    length = layer_count(graph)
    matches, sums = _independent(graph, length, phases) if length > 1 else ({}, {})
    terms = _terms(graph, matches, sums)
    stacks = {i.name for i in graph.inputs if i.role in _STATE and i.type.rank and i.type.shape[0] == length}
    needed = {o.operand for o in graph.outputs if o.updates in stacks}
    for op in reversed(graph.operators):
        if op.id in matches and needed.intersection(v.name for v in op.results):
            needed.update(op.reads)
        else:
            matches.pop(op.id, None)
    returned = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    outside, whole = set[str](), list[str]()
    for op in reversed(graph.operators):  # what is needed outside is computed there, and all that this needs
        names = {v.name for v in op.results}
        if op.id in terms and (op.id in sums or not names & (outside if op.id in matches else outside | returned)):
            continue
        if op.id in matches and not names & outside:
            continue
        matches.pop(op.id, None)
        whole.append(op.id)
        outside.update(op.reads)
    inside = (v.name for op in graph.operators if op.id in matches for v in op.results)
    results = tuple(name for name in inside if name in returned)
    totals = tuple(v.name for op in graph.operators if op.id in terms and op.id in sums for v in op.results)
    return LayerRows(length, matches, results, terms, totals, tuple(reversed(whole)))


def taken_in_slices(inside: Sequence[Operator], matches: Mapping[str, Match]) -> tuple[str, ...]:
    """Stacks that a loop over layers takes in slices.

    Args:
        inside: operators that it runs.
        matches: by id the layouts over layers in which they run.
    """
    inner = {v.name for op in inside for v in op.results}
    return tuple(
        dict.fromkeys(
            o
            for op in inside
            for o, k in zip(op.operands, matches[op.id].operands, strict=True)
            if isinstance(o, str) and o not in inner and k is not None and k.axes
        )
    )


def _terms(graph: Graph, matches: Mapping[str, Match], sums: Mapping[str, Match]) -> dict[str, Match]:
    """Operators that a first loop over layers runs: ``sums`` that depend on none of them, and what they are made of."""
    late, first = set[str](), list[str]()
    for op in graph.operators:
        follows = bool(late.intersection(op.reads))
        if follows or op.id in sums:
            late.update(v.name for v in op.results)
        if op.id in sums and not follows:
            first.append(op.id)
    needed, terms = set[str](), dict[str, Match]()
    for op in reversed(graph.operators):
        if op.id in first or (op.id in matches and needed.intersection(v.name for v in op.results)):
            terms[op.id] = sums[op.id] if op.id in sums else matches[op.id]
            needed.update(op.reads)
    return dict(reversed(terms.items()))


def _independent(graph: Graph, length: int, phases: Sequence[str]) -> tuple[dict[str, Match], dict[str, Match]]:
    """Operators of ``phases``, with what they run on, that treat the layers of stacks independently; sums over them."""
    mesh, matches, sums = pseudo_mesh(length), dict[str, Match](), dict[str, Match]()
    split_values = {
        i.name: split(i.type.rank, 0)
        for i in graph.inputs
        if i.role in _STATE and i.type.rank and i.type.shape[0] == length
    }
    for op in graph.operators:
        if op.primitive == "scan":
            scan = Scan.of(op)
            stacks = scan.split_results(op.results)[1] if scan.length == length else []
            split_values.update((v.name, split(v.type.rank, 0)) for v in stacks)
        elif phase_of(op) in phases and not op.regions and not op.effects and not is_generator(op):
            types = graph.operand_types(op)
            states = [None if isinstance(o, Literal) else split_values.get(o) for o in op.operands]
            if not any(states):
                continue
            known = [
                None if isinstance(o, Literal) else k or Layout.replicated(t.rank)
                for o, k, t in zip(op.operands, states, types, strict=True)
            ]
            matched = match(op, types, known, zeros_of(graph, op), mesh)
            if matched is not None and all(k.partial and k.reduce == "sum" for k in matched.results):
                sums[op.id] = matched
            elif matched is not None and all(k == split(len(k.dims), 0) for k in matched.results):
                matches[op.id] = matched
                split_values.update((v.name, k) for v, k in zip(op.results, matched.results, strict=True))
    _add_what_is_made_of_scalars(graph, matches, length)
    order = {op.id: n for n, op in enumerate(graph.operators)}
    return dict(sorted(matches.items(), key=lambda item: order[item[0]])), sums


def _add_what_is_made_of_scalars(graph: Graph, matches: dict[str, Match], length: int) -> None:
    """Adds broadcasts of scalars to stacks that only operators among ``matches`` read: each trip makes its slice."""
    mesh, returned = pseudo_mesh(length), {o.operand for o in graph.outputs}
    readers: dict[str, list[tuple[Operator, int]]] = {}
    for op in graph.operators:
        for n, o in enumerate(op.operands):
            if isinstance(o, str):
                readers.setdefault(o, []).append((op, n))
    for op in graph.operators:
        types = graph.operand_types(op)
        if op.id in matches or len(op.results) != 1 or any(t.rank for t in types) or op.regions:
            continue
        (result,) = op.results
        layout = split(result.type.rank, 0) if result.type.rank and result.type.shape[0] == length else None
        taken = readers.get(result.name, [])
        if layout is None or result.name in returned or not taken:
            continue
        if all(r.id in matches and matches[r.id].operands[n] == layout for r, n in taken):
            matched = local_match(op, types, layout, mesh)
            if matched is not None:
                matches[op.id] = matched
