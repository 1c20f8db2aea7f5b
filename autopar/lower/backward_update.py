"""The update of stacked layers inside of the backward loop: no stack of gradients is ever made.

As soon as a trip of the loop over layers has the gradient of its layer, it updates that layer's parameters and moments,
which it takes in slices and gives back in slices: the forward pass is over, and nothing after the trip reads the old
ones. Values are those of the update behind the loop (`autopar.lower.backward_rows` says where that is so).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.analysis import closure, names_made, names_read
from autopar.ir.loops import Scan
from autopar.ir.parts import separate_parts
from autopar.ir.primitives import is_fusible
from autopar.lower.backward_rows import BackwardRows, LoopUpdate, backward_rows, kept_note
from autopar.lower.layer_rows import taken_in_slices
from autopar.lower.layer_update import Trip
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder, run_whole
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

    def run_some(operators: Sequence[Operator]) -> None:
        some = [op for op in operators if op.id not in run]
        run.update(op.id for op in some)
        env.update(run_whole(replace(bound, graph=replace(graph, operators=tuple(some))), env, recorder))

    read_whole = {*wanted, *names_read(op for op in graph.operators if op.id in kept_ids or op.id in updates)}
    for op in graph.operators:
        if op.id in updates:
            run_some(closure(kept, before[op.id], given=env))
            env.update(_loop(bound, op, updates[op.id], rows.length, env, recorder, read_whole))
        elif op.id in kept_ids:
            run_some([op])
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
    loop, params = Scan.of(op), bound.bounds[op.id].params
    carries, stacks = loop.split_results([v.name for v in op.results])
    kept = [n for n, name in enumerate(stacks) if name in read_whole]
    arrays = [scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands]
    consts, initial, stacked = loop.split(arrays)
    trips = _Trips(bound, op, update, length, env, recorder, consts)
    more = {name: env[name] for name in trips.taken if name not in stacks and name not in op.operands[loop.num_whole :]}

    def body(carry: Sequence[Any], row: tuple[Any, Sequence[Any], Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        new_carry, rows, replacing = trips.run(carry, *row)
        return new_carry, [*(rows[n] for n in kept), *replacing]

    with recorder.around(op):
        xs = (jnp.arange(length, dtype=jnp.int32), stacked, more)
        carry, ys = lax.scan(body, initial, xs, reverse=bool(params["reverse"]), unroll=params.get("unroll", 1))
    return dict(zip([*carries, *(stacks[n] for n in kept), *update.results], [*carry, *ys], strict=True))


@dataclass
class _Trips:
    """Trips of a backward loop as they are traced; fields as the arguments of `_loop`, and constants of the loop."""

    bound: BoundGraph
    op: Operator
    update: LoopUpdate
    length: int
    env: Mapping[str, Any]
    recorder: Recorder
    consts: Sequence[Any]

    def __post_init__(self) -> None:
        graph, loop = self.bound.graph, Scan.of(self.op)
        inside = [o for o in graph.operators if o.id in self.update.matches]
        self.taken = taken_in_slices(inside, self.update.matches)
        parts = separate_parts(inside, self.taken)
        members = {o.id for part in parts for o in part}
        #: What no parameter decides, then parameter by parameter.
        self.parts = [tuple(o for o in inside if o.id not in members), *parts]
        self.region = self.bound.bounds[self.op.id].regions["body"]
        stacks = loop.split_results([v.name for v in self.op.results])[1]
        outputs = loop.split_results([o.operand for o in self.region.graph.outputs])[1]
        #: By stack that the loop makes the value of the body that is its slice.
        self.slices = dict(zip(stacks, outputs, strict=True))

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
        loop, graph = Scan.of(self.op), self.region.graph
        names = self.op.operands[loop.num_whole :]
        known = {**others, **{n: a for n, a in zip(names, slices, strict=True) if isinstance(n, str)}}
        given: dict[str, Any] = {name: a for name, a in known.items() if name in self.taken}
        trip = Trip(
            self.bound, self.update.matches, self.length, self.env, (number, dict.fromkeys(self.taken)), self.recorder
        )
        trip.slices = given
        values = dict(zip((i.name for i in graph.inputs), [*self.consts, *carry, *slices], strict=True))
        left = self._updated(list(self.parts), trip, given, values)
        ends = {o for o in self.slices.values() if isinstance(o, str)}
        for o in _gradients_first(graph.operators, ends):
            values = run_whole(replace(self.region, graph=replace(graph, operators=(o,))), values, self.recorder)
            if ends.intersection(v.name for v in o.results):
                left = self._updated(left, trip, given, values)
        new_carry, rows = loop.split_results([_read(o.operand, values) for o in graph.outputs])
        return new_carry, rows, [lax.squeeze(trip.values[name], (0,)) for name in self.update.results]

    def _updated(
        self, parts: list[tuple[Operator, ...]], trip: Trip, given: dict[str, Any], values: Mapping[str, Any]
    ) -> list[tuple[Operator, ...]]:
        """Runs those ``parts`` whose slices are there, which are added to ``given``; the others."""
        there = {n: o for n, o in self.slices.items() if n in self.taken and (isinstance(o, Literal) or o in values)}
        given.update((n, _read(o, values)) for n, o in there.items())
        ready = [part for part in parts if names_read(part).intersection(self.taken) <= given.keys()]
        for part in ready:
            for o in part:
                trip.run(o)
        return [part for part in parts if part not in ready]


def _read(operand: Operand, values: Mapping[str, Any]) -> Any:
    return jnp.asarray(scalar(operand)) if isinstance(operand, Literal) else values[operand]


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
