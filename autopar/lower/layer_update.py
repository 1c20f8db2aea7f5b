"""The update of stacked layers, a layer at a time: what an optimizer does to whole stacks becomes a loop over layers.

Models that scan over layers keep the parameters of all layers in one array, and so do the moments of an optimizer.
Forward and backward pass take slices of such stacks, the update takes them whole. Where the update treats layers
independently, which the rules of its operators say, it runs here in one loop, whose trips take and make slices: then
no pass needs a stack whole on a device, and it may lie in host memory (L2L, Pudipeddi et al., 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Layout, Literal, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_generator
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder, part_of, run_whole
from autopar.lower.microbatch.retrace import retraced
from autopar.lower.split_layers import layer_count, run_on_shards
from autopar.microbatch import pseudo_mesh
from autopar.microbatch.base import split
from autopar.microbatch.inside import zeros_of
from autopar.microbatch.match import Match, local_match, match

_STATE = ("parameter", "optimizer")


@dataclass(frozen=True)
class _Rows:
    """Operators of the update that run layer by layer.

    Args:
        length: number of layers.
        matches: by id of an operator, in running order, the layouts over layers in which it runs.
        results: names of their results that leave the loop.
    """

    length: int
    matches: Mapping[str, Match]
    results: tuple[str, ...]


def updated_by_layer(traced: Traced) -> Traced:
    """The step whose update of stacked layers is a loop over layers; ``traced`` itself where there is none.

    Args:
        traced: a step.
    """
    rows = _rows(traced.graph)
    if not rows.results:
        return traced
    return retraced(traced, lambda env, recorder: _run(traced.program, rows, env, recorder))


def updates_by_layer(graph: Graph) -> bool:
    """Whether a step has an update that `updated_by_layer` changes."""
    return bool(_rows(graph).results)


def _rows(graph: Graph) -> _Rows:
    length = layer_count(graph)
    matches = _independent(graph, length) if length > 1 else {}
    stacks = {i.name for i in graph.inputs if i.role in _STATE and i.type.rank and i.type.shape[0] == length}
    needed = {o.operand for o in graph.outputs if o.updates in stacks}
    for op in reversed(graph.operators):
        if op.id in matches and needed.intersection(v.name for v in op.results):
            needed.update(op.reads)
        else:
            matches.pop(op.id, None)
    outside = {o for op in graph.operators if op.id not in matches for o in op.reads}
    for op in reversed(graph.operators):  # what is needed outside is computed there, and all that this needs
        if op.id in matches and outside.intersection(v.name for v in op.results):
            del matches[op.id]
            outside.update(op.reads)
    returned = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    inside = (v.name for op in graph.operators if op.id in matches for v in op.results)
    return _Rows(length, matches, tuple(name for name in inside if name in returned))


def _independent(graph: Graph, length: int) -> dict[str, Match]:
    """Operators of the update, with what they run on, that treat the layers of stacks independently."""
    mesh, matches = pseudo_mesh(length), dict[str, Match]()
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
        elif phase_of(op.scope) == "update" and not op.regions and not op.effects and not is_generator(op):
            types = graph.operand_types(op)
            states = [None if isinstance(o, Literal) else split_values.get(o) for o in op.operands]
            if not any(states):
                continue
            known = [
                None if isinstance(o, Literal) else k or Layout.replicated(t.rank)
                for o, k, t in zip(op.operands, states, types, strict=True)
            ]
            matched = match(op, types, known, zeros_of(graph, op), mesh)
            if matched is not None and all(k == split(len(k.dims), 0) for k in matched.results):
                matches[op.id] = matched
                split_values.update((v.name, k) for v, k in zip(op.results, matched.results, strict=True))
    _add_what_is_made_of_scalars(graph, matches, length)
    order = {op.id: n for n, op in enumerate(graph.operators)}
    return dict(sorted(matches.items(), key=lambda item: order[item[0]]))


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


def _run(bound: BoundGraph, rows: _Rows, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Every value of the step that its outputs name."""
    graph = bound.graph
    whole = [op.id for op in graph.operators if op.id not in rows.matches]
    env = run_whole(part_of(bound, whole, graph.inputs, ()), env, recorder)
    inside = [op for op in graph.operators if op.id in rows.matches]
    inner = {v.name for op in inside for v in op.results}
    taken = dict.fromkeys(
        o
        for op in inside
        for o, k in zip(op.operands, rows.matches[op.id].operands, strict=True)
        if isinstance(o, str) and o not in inner and k is not None and k.axes
    )

    def body(carry: tuple[()], row: tuple[Any, Mapping[str, Any]]) -> tuple[tuple[()], list[Any]]:
        number, slices = row
        values = {**env, **{name: lax.expand_dims(a, (0,)) for name, a in slices.items()}}
        for op in inside:
            with recorder.around(op):
                results = _apply(bound, op, rows, values, number)
            values.update(zip((v.name for v in op.results), results, strict=True))
        return (), [lax.squeeze(values[name], (0,)) for name in rows.results]

    numbers = jnp.arange(rows.length, dtype=jnp.int32)
    _, stacks = lax.scan(body, (), (numbers, {name: env[name] for name in taken}))
    env.update(zip(rows.results, stacks, strict=True))
    return env


def _apply(bound: BoundGraph, op: Operator, rows: _Rows, values: Mapping[str, Any], number: Any) -> Sequence[Any]:
    """What an operator makes of the values of one layer."""
    operands = [scalar(o) if isinstance(o, Literal) else values[o] for o in op.operands]
    return run_on_shards(bound, op, rows.matches[op.id], operands, rows.length, number)
