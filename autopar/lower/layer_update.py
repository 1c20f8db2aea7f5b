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
        env.update(_over_layers(bound, rows, rows.terms, rows.totals, (), env, recorder))
        env = run_whole(part_of(bound, [id for id in rows.whole if id in after], graph.inputs, ()), env, recorder)
    env.update(_over_layers(bound, rows, rows.matches, (), rows.results, env, recorder))
    return env


def _over_layers(
    bound: BoundGraph,
    rows: LayerRows,
    matches: Mapping[str, Match],
    totals: Sequence[str],
    results: Sequence[str],
    env: Mapping[str, Any],
    recorder: Recorder,
) -> dict[str, Any]:
    """Results of a loop over layers, by name: sums over layers, and stacks.

    Args:
        bound: the step.
        rows: of it.
        matches: operators that the loop runs.
        totals: names of sums of what these make.
        results: names of stacks of it.
        env: values so far.
        recorder: see there.
    """
    inside = [op for op in bound.graph.operators if op.id in matches]
    taken = taken_in_slices(inside, matches)
    ordered = one_parameter_after_the_other(bound.graph, inside, taken)

    def body(sums: list[Any], row: tuple[Any, Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        trip = Trip(bound, matches, rows.length, env, row, recorder)
        added, rows_of_trip = dict(zip(totals, sums, strict=True)), dict[str, Any]()
        for op in ordered:
            trip.run(op)
            for v in op.results:
                if v.name in results:  # one array for what the loop makes and for its readers in the trip
                    rows_of_trip[v.name] = lax.squeeze(trip.values[v.name], (0,))
                    trip.values[v.name] = lax.expand_dims(rows_of_trip[v.name], (0,))
                if v.name in added:
                    with recorder.around(op):
                        added[v.name] = added[v.name] + trip.values[v.name]
        return [added[name] for name in totals], [rows_of_trip[name] for name in results]

    types = [bound.graph.types[name] for name in totals]
    zeros = [jnp.zeros(t.shape, jax_dtype(t.dtype)) for t in types]
    numbers = jnp.arange(rows.length, dtype=jnp.int32)
    sums, stacks = lax.scan(body, zeros, (numbers, {name: env[name] for name in taken}))
    return dict(zip([*totals, *results], [*sums, *stacks], strict=True))


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
