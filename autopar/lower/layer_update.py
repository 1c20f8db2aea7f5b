"""The update of stacked layers, a layer at a time: what an optimizer does to whole stacks becomes a loop over layers.

Models that scan over layers keep the parameters of all layers in one array, and so do the moments of an optimizer.
Forward and backward pass take slices of such stacks, the update takes them whole. Where the update treats layers
independently, which the rules of its operators say, it runs here in one loop, whose trips take and make slices: then
no pass needs a stack whole on a device, and it may lie in host memory (L2L, Pudipeddi et al., 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import jax_dtype
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import dependents
from autopar.ir.parts import separate_parts
from autopar.lower.layer_rows import LayerRows, rows_of, taken_in_slices
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder, part_of, run_whole
from autopar.lower.microbatch.retrace import retraced
from autopar.lower.split_layers import run_on_shards
from autopar.microbatch.match import Match


def updated_by_layer(traced: Traced) -> Traced:
    """The step whose update of stacked layers is a loop over layers; ``traced`` itself where there is none.

    Args:
        traced: a step.
    """
    rows = rows_of(traced.graph)
    if not rows.results:
        return traced
    updated = retraced(traced, lambda env, recorder: _run(traced.program, rows, env, recorder))
    graph = _with_the_loop_last(updated.graph, traced.graph, rows)
    return replace(updated, program=replace(updated.program, graph=graph))


def updates_by_layer(graph: Graph) -> bool:
    """Whether a step has an update that `updated_by_layer` changes."""
    return bool(rows_of(graph).results)


def _with_the_loop_last(graph: Graph, before: Graph, rows: LayerRows) -> Graph:
    """The step with its loop over layers behind all else, where no gradient waits: nothing reads what it makes."""
    makers = graph.producers
    loops = {
        makers[new.operand].id
        for new, old in zip(graph.outputs, before.outputs, strict=True)
        if old.operand in rows.results and isinstance(new.operand, str)
    }
    return replace(graph, operators=tuple(sorted(graph.operators, key=lambda op: op.id in loops)))


def _run(bound: BoundGraph, rows: LayerRows, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Every value of the step that its outputs name."""
    graph = bound.graph
    after = {op.id for op in dependents([graph.by_id[id] for id in rows.whole], rows.totals)}
    env = run_whole(part_of(bound, [id for id in rows.whole if id not in after], graph.inputs, ()), env, recorder)
    if rows.totals:
        env = _add_up(bound, rows, env, recorder)
        env = run_whole(part_of(bound, [id for id in rows.whole if id in after], graph.inputs, ()), env, recorder)
    inside = [op for op in graph.operators if op.id in rows.matches]
    taken = taken_in_slices(inside, rows.matches)
    ordered = one_parameter_after_the_other(graph, inside, taken)

    def body(carry: tuple[()], row: tuple[Any, Mapping[str, Any]]) -> tuple[tuple[()], list[Any]]:
        trip = Trip(bound, rows.matches, rows.length, env, row, recorder)
        rows_of_trip = {}
        for op in ordered:
            trip.run(op)
            for v in op.results:
                if v.name in rows.results:  # one array for what the loop makes and for its readers in the trip
                    rows_of_trip[v.name] = lax.squeeze(trip.values[v.name], (0,))
                    trip.values[v.name] = lax.expand_dims(rows_of_trip[v.name], (0,))
        return (), [rows_of_trip[name] for name in rows.results]

    numbers = jnp.arange(rows.length, dtype=jnp.int32)
    _, stacks = lax.scan(body, (), (numbers, {name: env[name] for name in taken}))
    env.update(zip(rows.results, stacks, strict=True))
    return env


def _add_up(bound: BoundGraph, rows: LayerRows, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """The values so far and the sums over layers, in a loop of their own."""
    inside = [op for op in bound.graph.operators if op.id in rows.terms]
    taken = taken_in_slices(inside, rows.terms)
    ordered = one_parameter_after_the_other(bound.graph, inside, taken)

    def body(sums: list[Any], row: tuple[Any, Mapping[str, Any]]) -> tuple[list[Any], None]:
        trip = Trip(bound, rows.terms, rows.length, env, row, recorder)
        added = dict(zip(rows.totals, sums, strict=True))
        for op in ordered:
            trip.run(op)
            with recorder.around(op):
                added.update((v.name, added[v.name] + trip.values[v.name]) for v in op.results if v.name in added)
        return [added[name] for name in rows.totals], None

    types = [bound.graph.types[name] for name in rows.totals]
    zeros = [jnp.zeros(t.shape, jax_dtype(t.dtype)) for t in types]
    numbers = jnp.arange(rows.length, dtype=jnp.int32)
    totals, _ = lax.scan(body, zeros, (numbers, {name: env[name] for name in taken}))
    return {**env, **dict(zip(rows.totals, totals, strict=True))}


class Trip:
    """A trip of a loop over layers as it is traced: slices become arrays of one layer when they are first read."""

    def __init__(
        self,
        bound: BoundGraph,
        matches: Mapping[str, Match],
        length: int,
        whole: Mapping[str, Any],
        row: tuple[Any, Mapping[str, Any]],
        recorder: Recorder,
    ) -> None:
        self.bound, self.matches, self.length, self.recorder = bound, matches, length, recorder
        self.number, self.slices = row
        self.values = {name: a for name, a in whole.items() if name not in self.slices}

    def run(self, op: Operator) -> None:
        """Applies an operator to the values of one layer."""
        fetched = [o for o in op.reads if o in self.slices and o not in self.values]
        self.values.update((o, lax.expand_dims(self.slices[o], (0,))) for o in fetched)
        operands = [scalar(o) if isinstance(o, Literal) else self.values[o] for o in op.operands]
        with self.recorder.around(op):
            results = run_on_shards(self.bound, op, self.matches[op.id], operands, self.length, self.number)
        self.values.update(zip((v.name for v in op.results), results, strict=True))


def one_parameter_after_the_other(
    graph: Graph, operators: Sequence[Operator], stacks: Sequence[str]
) -> tuple[Operator, ...]:
    """Operators of a trip: what no parameter decides first, then parameter by parameter, the largest slices last.

    So slices of one parameter are fetched while others are not, or not any more.
    """
    parts = separate_parts(operators, stacks)
    inside = {op.id for part in parts for op in part}

    def size(part: tuple[Operator, ...]) -> int:
        read = dict.fromkeys(o for op in part for o in op.reads)
        return sum(graph.types[name].nbytes for name in read if name in stacks)

    first = [op for op in operators if op.id not in inside]
    return (*first, *(op for part in sorted(parts, key=size) for op in part))
