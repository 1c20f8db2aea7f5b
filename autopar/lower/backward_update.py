"""The update of stacked layers inside of the backward loop: no stack of gradients is ever made.

As soon as a trip of the loop over layers has the gradient of its layer, it updates that layer's parameters and moments,
which it takes in slices and gives back in slices: the forward pass is over, and nothing after the trip reads the old
ones. Values are those of the update behind the loop (`autopar.lower.backward_rows` says where that is so).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import closure, names_made, names_read
from autopar.ir.parts import separate_parts
from autopar.ir.primitives import is_fusible
from autopar.lower.backward_rows import BackwardRows, LoopUpdate, backward_rows, kept_note
from autopar.lower.layer_loop import LayerLoop, read
from autopar.lower.layer_rows import taken_in_slices
from autopar.lower.layer_update import Trip
from autopar.lower.microbatch.parts import Recorder, run_some
from autopar.lower.microbatch.retrace import retraced


def updated_in_backward(traced: Traced) -> Traced:
    """The step whose backward loops over layers update them; ``traced`` itself where none may.

    Args:
        traced: a step in one microbatch.
    """
    rows = backward_rows(traced.graph)
    if not rows.updates:
        return traced
    return retraced(traced, lambda env, recorder: run_updated(traced.program, rows, env, recorder))


def update_in_backward(graph: Graph) -> tuple[bool, str]:
    """Whether a step has an update that `updated_in_backward` changes, and a note on gradients that wait for it."""
    rows = backward_rows(graph)
    return bool(rows.updates), kept_note(graph, rows)


def run_updated(bound: BoundGraph, rows: BackwardRows, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Every value of a graph that its outputs name, computed with its backward loops that update layers.

    Args:
        bound: a step in one microbatch, or what a stage of a pipeline does for the only one.
        rows: of it.
        env: values of its inputs.
        recorder: see there.
    """
    graph = bound.graph
    updates = {u.loop: u for u in rows.updates}
    behind = [op for op in graph.operators if op.id not in updates]
    taken_over = {name for u in rows.updates for name in u.results}
    wanted = [o.operand for o in graph.outputs if isinstance(o.operand, str) and o.operand not in taken_over]
    loops = [graph.by_id[u.loop] for u in rows.updates]
    inside = {u.loop: [op for op in graph.operators if op.id in u.matches] for u in rows.updates}
    before = {id: names_read(ops) - set(names_made(ops)) for id, ops in inside.items()}
    given = set(names_made(loops)) | taken_over
    needed = {*(n for op in loops for n in op.reads), *(n for names in before.values() for n in names)}
    kept = closure(behind, [*wanted, *sorted(needed)], given=given)
    effects = {op.id for op in graph.operators if op.effects}
    kept_ids = {op.id for op in kept} | effects
    run = set[str]()

    def run_once(operators: Sequence[Operator]) -> None:
        some = [op for op in operators if op.id not in run]
        run.update(op.id for op in some)
        env.update(run_some(bound, some, env, recorder))

    read_whole = {*wanted, *names_read(op for op in graph.operators if op.id in kept_ids or op.id in updates)}
    for op in graph.operators:
        if op.id in updates:
            run_once(closure(kept, before[op.id], given=env))
            env.update(_loop(bound, op, updates[op.id], rows.length, env, recorder, read_whole))
        elif op.id in kept_ids:
            run_once([op])
    return env


def _loop(
    bound: BoundGraph,
    op: Operator,
    update: LoopUpdate,
    length: int,
    env: Mapping[str, Any],
    recorder: Recorder,
    read_whole: set[str],
) -> dict[str, Any]:
    """The results of a loop with its update.

    Args:
        bound: the step.
        op: the loop.
        update: what it updates.
        length: number of layers.
        env: values so far.
        recorder: see there.
        read_whole: names of values that something outside of updates reads: stacks of ``op`` that are not among them
            are not made.
    """
    loop = LayerLoop.of(bound, op, env, recorder)
    carries, stacks = loop.results
    kept = [n for n, name in enumerate(stacks) if name in read_whole]
    trips = _Trips(bound, loop, update, length, env)
    more = {name: env[name] for name in trips.taken if name not in stacks and name not in loop.names}

    def body(carry: Sequence[Any], row: tuple[Any, Sequence[Any], Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        new_carry, rows, replacing = trips.run(carry, *row)
        return new_carry, [*(rows[n] for n in kept), *replacing]

    with recorder.around(op):
        xs = (jnp.arange(length, dtype=jnp.int32), loop.stacks, more)
    carry, ys = loop.over(body, loop.initial, xs, unroll=loop.bound.params.get("unroll", 1))
    return dict(zip([*carries, *(stacks[n] for n in kept), *update.results], [*carry, *ys], strict=True))


@dataclass
class _Trips:
    """Trips of a backward loop as they are traced; fields as the arguments of `_loop`."""

    bound: BoundGraph
    loop: LayerLoop
    update: LoopUpdate
    length: int
    env: Mapping[str, Any]

    def __post_init__(self) -> None:
        graph = self.bound.graph
        inside = [o for o in graph.operators if o.id in self.update.matches]
        self.taken = taken_in_slices(inside, self.update.matches)
        parts = separate_parts(inside, self.taken)
        members = {o.id for part in parts for o in part}
        #: What no parameter decides, then parameter by parameter.
        self.parts = [tuple(o for o in inside if o.id not in members), *parts]
        outputs = self.loop.scan.split_results([o.operand for o in self.loop.region.graph.outputs])[1]
        #: By stack that the loop makes the value of the body that is its slice.
        self.slices = dict(zip(self.loop.results[1], outputs, strict=True))

    def run(
        self, carry: Sequence[Any], number: Any, slices: Sequence[Any], others: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """New carries, slices of the loop's stacks, and those of the stacks that replace state.

        Args:
            carry: carries.
            number: of the layer.
            slices: of stacks that the loop takes itself.
            others: slices of further stacks that the update takes, by name.
        """
        region, recorder = self.loop.region, self.loop.recorder
        known = {**others, **dict(zip(self.loop.names, slices, strict=True))}
        given: dict[str, Any] = {name: a for name, a in known.items() if name in self.taken}
        row = number, dict.fromkeys(self.taken)
        trip = Trip(self.bound, self.update.matches, self.length, self.env, row, recorder)
        trip.slices = given
        values = self.loop.values(carry, slices)
        left = self._updated(list(self.parts), trip, given, values)
        ends = {o for o in self.slices.values() if isinstance(o, str)}
        for o in _gradients_first(region.graph.operators, ends):
            values = run_some(region, [o], values, recorder)
            if ends.intersection(v.name for v in o.results):
                left = self._updated(left, trip, given, values)
        new_carry, rows = self.loop.scan.split_results([read(o.operand, values) for o in region.graph.outputs])
        return new_carry, rows, [lax.squeeze(trip.values[name], (0,)) for name in self.update.results]

    def _updated(
        self, parts: list[tuple[Operator, ...]], trip: Trip, given: dict[str, Any], values: Mapping[str, Any]
    ) -> list[tuple[Operator, ...]]:
        """Runs those ``parts`` whose slices are there, which are added to ``given``; the others."""
        there = {n: o for n, o in self.slices.items() if n in self.taken and (isinstance(o, Literal) or o in values)}
        given.update((n, read(o, values)) for n, o in there.items())
        ready = [part for part in parts if names_read(part).intersection(self.taken) <= given.keys()]
        for part in ready:
            for o in part:
                trip.run(o)
        return [part for part in parts if part not in ready]


def _gradients_first(operators: Sequence[Operator], gradients: Collection[str]) -> tuple[Operator, ...]:
    """Operators of a body, those that only cast gradients or lay them out directly behind what they read.

    jax casts the gradients of parameters that were cast at the beginning of a trip at its end, all of them. There they
    would wait in what the products made.
    """
    readers: dict[str, list[Operator]] = {}
    for op in operators:
        for name in op.reads:
            readers.setdefault(name, []).append(op)
    tails = set[str]()
    for op in reversed(operators):
        (result, *more) = op.results or (None,)
        if result is None or more or op.effects or op.regions or len(op.reads) != 1 or not is_fusible(op):
            continue
        behind = readers.get(result.name, ())
        if (behind or result.name in gradients) and all(r.id in tails for r in behind):
            tails.add(op.id)
    ordered: list[Operator] = []

    def place(op: Operator) -> None:
        ordered.append(op)
        for v in op.results:
            for reader in readers.get(v.name, ()):
                if reader.id in tails:
                    place(reader)

    inner = set(names_made(operators))
    for op in operators:
        if op.id not in tails or not inner.intersection(op.reads):
            place(op)
    return tuple(ordered)
