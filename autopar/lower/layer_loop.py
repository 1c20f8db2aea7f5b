"""`LayerLoop`: a loop over stacked layers as it is to run, and the one builder of such loops.

A rewriting says of each loop which layers make a trip, what the backward pass runs again in it, which operators of the
update it takes in, and which stacks it writes where they lie. `with_layer_loops` runs a graph with these loops in place
of its own: trips take and make slices of stacks, so that none is whole on a device that need not be, and those in host
memory are fetched slice by slice. Values are those of the step: the same operators on the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._compat.dtypes import jax_dtype
from autopar.frontend import BoundGraph
from autopar.ir import Graph, Literal, Operand, Operator
from autopar.ir.analysis import closure, dependents, names_made, names_read
from autopar.ir.independent import separate_parts
from autopar.ir.layer_loops import LoopPair
from autopar.ir.phases import SEGMENTS
from autopar.ir.primitives import is_fusible
from autopar.lower.localize.base import scalar
from autopar.lower.retrace import Recorder, RetracedLoop, read, run_some
from autopar.lower.split_layers import run_on_shards
from autopar.microbatch.match import Match

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class LayerLoop:
    """A rewritten loop over stacked layers, with what each trip recomputes and updates.

    Args:
        length: number of layers.
        op: id of the loop of the graph whose body trips run; "" of a loop of updates alone.
        pair: where the backward pass recomputes layers, the forward and the backward loop, one of which is `op`. The
            forward loop keeps the inputs of its trips, from which the backward loop recomputes the stacks of
            activations. None of other loops.
        layers: number of layers that a trip runs. Trips of several layers take stacks whole, and read rows of them.
        updates: by id of an operator of the update that trips run, in running order, its layouts over layers.
        results: names of stacks that these operators make.
        totals: names of sums of their results over layers.
        written: stacks that trips of several layers replace where they lie, each with the stack that replaces it.
    """

    length: int
    op: str = ""
    pair: LoopPair | None = None
    layers: int = 1
    updates: Mapping[str, Match] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)

    @property
    def recomputes(self) -> bool:
        """Whether trips run layers of the forward pass again."""
        return self.pair is not None and self.op == self.pair.backward

    def moved(self, graph: Graph) -> list[Operator]:
        """Operators of the update that trips run, in running order."""
        return [op for op in graph.operators if op.id in self.updates]

    def made(self, graph: Graph) -> tuple[str, ...]:
        """Names of the values that the loop returns."""
        of_op = [v.name for v in graph.by_id[self.op].results] if self.op else []
        return (*of_op, *self.totals, *self.results)

    def read(self, graph: Graph) -> set[str]:
        """Names of the values that the loop reads."""
        moved = self.moved(graph)
        names = names_read(moved) - set(names_made(moved)) - set(self.made(graph))
        if self.recomputes and self.pair is not None:
            names.update(graph.by_id[self.pair.forward].reads)
        return (names | set(graph.by_id[self.op].reads if self.op else ())) - set(self._recomputed_stacks)

    @property
    def _recomputed_stacks(self) -> tuple[str, ...]:
        return self.pair.stacks if self.recomputes and self.pair is not None else ()


def with_layer_loops(
    bound: BoundGraph, loops: Sequence[LayerLoop], env: dict[str, Any], recorder: Recorder
) -> dict[str, Any]:
    """Every value of a graph that its outputs name, computed with other loops over layers.

    Args:
        bound: a step in one microbatch, or what a stage of a pipeline does for one.
        loops: in place of those that they name, and of operators of the update.
        env: values of its inputs.
        recorder: gives operators that are traced again the scopes of the old ones.
    """
    graph, of_op = bound.graph, {loop.op: loop for loop in loops if loop.op}
    given = {name for loop in loops for name in loop.made(graph)}
    taken = {name for loop in loops for name in loop.read(graph)}
    returned = [o.operand for o in graph.outputs if isinstance(o.operand, str)]
    others = [op for op in graph.operators if op.id not in of_op]
    needed = {op.id for op in closure(others, [*returned, *sorted(taken)], given=given)}
    kept = [op for op in graph.operators if op.id in of_op or op.id in needed or op.effects]
    whole = {*returned, *taken, *names_read(op for op in kept if op.id not in of_op)}
    late = {op.id for op in dependents(kept, [name for loop in loops for name in loop.totals])}
    items: list[Operator | LayerLoop] = [of_op.get(op.id, op) for op in kept if op.id not in late]
    items += [loop for loop in loops if loop.totals]
    items += [of_op.get(op.id, op) for op in kept if op.id in late]
    items += [loop for loop in loops if not loop.op and not loop.totals]
    entered: dict[str, Any] = {}
    some: list[Operator] = []
    for item in _in_turn(graph, items):
        if isinstance(item, Operator):
            some.append(item)
            continue
        env = run_some(bound, some, env, recorder)
        some = []
        env.update(_Trips(bound, item, env, recorder, whole, entered).results())
    return run_some(bound, some, env, recorder)


def _in_turn(graph: Graph, items: Sequence[Operator | LayerLoop]) -> list[Operator | LayerLoop]:
    """Operators and loops in their order, each after all that it takes."""
    reads = [item.read(graph) if isinstance(item, LayerLoop) else item.reads for item in items]
    makers = {
        name: n
        for n, item in enumerate(items)
        for name in (item.made(graph) if isinstance(item, LayerLoop) else names_made([item]))
    }
    placed: dict[int, Operator | LayerLoop] = {}
    for first in range(len(items)):
        stack = [first]
        while stack:
            missing = {makers[name] for name in reads[stack[-1]] if name in makers}.difference(placed)
            if missing:
                stack += sorted(missing, reverse=True)
            else:
                n = stack.pop()
                placed.setdefault(n, items[n])
    return list(placed.values())


class _Trips:
    """Trips of a loop as they are traced; arguments as of `with_layer_loops`.

    Args:
        loop: the loop.
        whole: names of values that something takes whole: stacks that are not among them are not made.
        entered: by forward loop what enters its trips, as stacks.
    """

    def __init__(
        self,
        bound: BoundGraph,
        loop: LayerLoop,
        env: Mapping[str, Any],
        recorder: Recorder,
        whole: Collection[str],
        entered: dict[str, Any],
    ) -> None:
        graph, mark = bound.graph, SEGMENTS if loop.pair else ""
        self.bound, self.loop, self.env, self.recorder, self.entered = bound, loop, env, recorder, entered
        recomputed = loop.pair if loop.recomputes else None
        given = {**env, **dict.fromkeys(recomputed.stacks)} if recomputed else env
        self.body = RetracedLoop.of(bound, graph.by_id[loop.op], given, recorder, mark) if loop.op else None
        self.recomputed = (
            RetracedLoop.of(bound, graph.by_id[recomputed.forward], env, recorder, mark) if recomputed else None
        )
        carries, of_op = self.body.results if self.body else ((), ())
        self.carries = [*carries, *loop.totals]
        left = loop.pair.stacks if loop.pair and not recomputed else ()
        self.makes = [*(n for n in of_op if n in whole and n not in left), *loop.results]
        self.update = _Update(bound, loop, env, recorder)
        traced = [t for t in (self.recomputed, self.body) if t]
        stacks = {n: a for t in traced for n, a in zip(t.names, t.stacks, strict=True)}
        stacks |= {n: env[n] for n in self.update.taken if n not in of_op}
        self.stacks = {n: a for n, a in stacks.items() if not recomputed or n not in recomputed.stacks}

    def results(self) -> dict[str, Any]:
        """The results of the loop, by name."""
        types = [self.bound.graph.types[name] for name in self.loop.totals]
        initial = [*(self.body.initial if self.body else ()), *(jnp.zeros(t.shape, jax_dtype(t.dtype)) for t in types)]
        carry, stacks = (self._by_layer if self.loop.layers == 1 else self._by_segment)(initial)
        return {**dict(zip(self.carries, carry, strict=True)), **stacks}

    def _by_layer(self, initial: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Carries and stacks of trips of one layer, to which the loop gives slices."""
        pair, keeps, names = self.loop.pair, self.loop.pair is not None and self.recomputed is None, list(self.stacks)

        def trip(carry: Sequence[Any], row: Any) -> tuple[list[Any], Any]:
            number, taken, start = row
            rows = dict(zip(names, taken, strict=True))
            if self.recomputed and pair:
                rows |= zip(pair.stacks, self._left(start, rows)[1], strict=True)
            after, slices = self._layer(carry, number, rows)
            return after, ([slices[n] for n in self.makes], list(carry) if keeps else [])

        numbers = None
        if self.loop.updates:
            with self._around():
                numbers = _numbers(self.loop.length)
        start = self.entered[pair.forward] if self.recomputed and pair else None
        carry, (slices, entering) = self._over(trip, initial, (numbers, list(self.stacks.values()), start))
        if keeps:
            self.entered[self.loop.op] = entering
        return carry, dict(zip(self.makes, slices, strict=True))

    def _by_segment(self, initial: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Carries and stacks of trips of several layers, which read and write rows of stacks."""
        pair, layers, ends = self.loop.pair, self.loop.layers, self.loop.written
        assert pair is not None and self.body is not None
        keeps, given = self.recomputed is None, [n for n in self.makes if n not in ends.values()]
        fixed = {n: a for n, a in self.stacks.items() if n not in ends}

        def segment(state: tuple[Sequence[Any], Mapping[str, Any]], row: tuple[Any, Any]) -> tuple[Any, Any]:
            (carry, written), (first, start) = state, row

            def ahead(carry: Sequence[Any], number: Any) -> tuple[list[Any], list[Any]]:
                return self._left(carry, self._rows(self.recomputed, {**fixed, **written}, first + number))

            def one(state: Any, row: tuple[Any, Sequence[Any]]) -> tuple[Any, list[Any]]:
                (carry, written), (number, left) = state, row
                here = first + number
                rows = self._rows(self.body, {**fixed, **written}, here)
                rows |= zip(pair.stacks, left, strict=True) if self.recomputed else ()
                after, slices = self._layer(carry, here, rows)
                if ends:
                    with self._around():  # what a layer reads of a stack it has read before it writes
                        new = [slices[n] for n in ends.values()]
                        at, after, new = lax.optimization_barrier((here, after, new))
                        written = {n: _put(written[n], row, at) for n, row in zip(ends, new, strict=True)}
                return (after, written), [slices[n] for n in given]

            left = self.recomputed.over(ahead, start, _numbers(layers))[1] if self.recomputed else []
            end, slices = self._over(one, (carry, written), (_numbers(layers), left))
            return end, (list(carry) if keeps else [], slices)

        start = None if keeps else self.entered[pair.forward]
        numbers = _numbers(self.loop.length // layers, layers)
        state = (initial, {n: self.stacks[n] for n in ends})
        (carry, written), (entering, slices) = self._over(segment, state, (numbers, start))
        if keeps:
            self.entered[self.loop.op] = entering
        stacks = {n: lax.reshape(a, (self.loop.length, *a.shape[2:])) for n, a in zip(given, slices, strict=True)}
        return carry, {**stacks, **{ends[n]: a for n, a in written.items()}}

    def _over(self, trip: Callable[[Any, Any], Any], initial: Any, xs: Any) -> tuple[Any, Any]:
        if self.body is None:
            carry, ys = lax.scan(trip, initial, xs)
            return carry, ys
        unroll = self.body.bound.params.get("unroll", 1) if self.loop.updates else 1
        return self.body.over(trip, initial, xs, None if self.loop.layers > 1 else self.loop.length, unroll)

    def _around(self) -> Any:
        return self.recorder.around(self.body.op) if self.body else nullcontext()

    def _rows(self, traced: RetracedLoop | None, whole: Mapping[str, Any], number: Any) -> dict[str, Any]:
        """Rows of stacks, by name: what the layer ``number`` takes of them."""
        assert traced is not None
        with self.recorder.around(traced.op):
            return {n: _row(whole[n], number) for n in traced.names if n in whole}

    def _left(self, carry: Sequence[Any], rows: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Carries of a layer that runs again, and its slices of the stacks that the backward pass reads."""
        recomputed, pair = self.recomputed, self.loop.pair
        assert recomputed is not None and pair is not None
        names = [v.name for v in recomputed.op.results]
        carried = range(recomputed.scan.num_carry if self.loop.layers > 1 else 0)
        numbers = [*carried, *(names.index(name) for name in pair.stacks)]
        outputs = recomputed.trip(carry, [rows[n] for n in recomputed.names], numbers, again=True)
        return outputs[: len(carried)], outputs[len(carried) :]

    def _layer(self, carry: Sequence[Any], number: Any, rows: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Carries of a layer, and its slices of the stacks that the loop makes, by name."""
        body, update = self.body, self.update
        if not self.loop.updates and body:
            names = [v.name for v in body.op.results]
            carried = range(body.scan.num_carry)
            outputs = body.trip(carry, [rows[n] for n in body.names], [*carried, *(names.index(n) for n in self.makes)])
            return outputs[: len(carried)], dict(zip(self.makes, outputs[len(carried) :], strict=True))
        return update.layer(body, carry, number, rows)


class _Update:
    """The update in trips of a loop as it is traced; arguments as of `_Trips`."""

    def __init__(self, bound: BoundGraph, loop: LayerLoop, env: Mapping[str, Any], recorder: Recorder) -> None:
        graph, inside = bound.graph, loop.moved(bound.graph)
        self.bound, self.loop, self.env, self.recorder = bound, loop, env, recorder
        self.taken = taken_in_slices(inside, loop.updates)
        parts = separate_parts(inside, self.taken)
        if not loop.op:  # the largest slices last: they are fetched while others are not, or not any more
            parts = tuple(sorted(parts, key=lambda part: _bytes_taken(graph, part, self.taken)))
        members = {op.id for part in parts for op in part}
        #: What no parameter decides, then parameter by parameter.
        self.parts = [tuple(op for op in inside if op.id not in members), *parts]

    def layer(
        self, body: RetracedLoop | None, carry: Sequence[Any], number: Any, rows: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Carries of a layer and of its update, and their slices of stacks, by name.

        Args:
            body: the loop whose body the layer is; None of updates alone.
            carry: what enters.
            number: of the layer.
            rows: slices of stacks, by name.
        """
        carried = len(carry) - len(self.loop.totals)
        sums = dict(zip(self.loop.totals, carry[carried:], strict=True))
        trip = _UpdateTrip(self, number, {n: a for n, a in rows.items() if n in self.taken}, sums)
        left = trip.ready(self.parts)
        if body is None:
            return list(trip.sums.values()), trip.results
        values = body.values(carry[:carried], [rows[n] for n in body.names])
        outputs = [o.operand for o in body.region.graph.outputs]
        ends = dict(zip(body.results[1], outputs[body.scan.num_carry :], strict=True))
        operators = _gradients_first(body.region.graph.operators, {o for o in ends.values() if isinstance(o, str)})
        for op in (None, *operators):  # a trip may give out what it takes, before any operator
            values = values if op is None else run_some(body.region, [op], values, self.recorder)
            if op is None or any(v.name in ends.values() for v in op.results):
                there = {n: o for n, o in ends.items() if n in self.taken and (isinstance(o, Literal) or o in values)}
                trip.slices.update((n, read(o, values)) for n, o in there.items())
                left = trip.ready(left)
        after, stacks = body.scan.split_results([read(o, values) for o in outputs])
        return [*after, *trip.sums.values()], {**dict(zip(body.results[1], stacks, strict=True)), **trip.results}


class _UpdateTrip:
    """The update in one trip: slices become arrays of one layer when they are first read."""

    def __init__(self, update: _Update, number: Any, slices: dict[str, Any], sums: dict[str, Any]) -> None:
        self.update, self.number, self.slices, self.sums = update, number, slices, sums
        self.values = {name: a for name, a in update.env.items() if name not in update.taken}
        self.results: dict[str, Any] = {}

    def ready(self, parts: Sequence[tuple[Operator, ...]]) -> list[tuple[Operator, ...]]:
        """Runs those of some parts whose slices are there; the others."""
        left = []
        for part in parts:
            if names_read(part).intersection(self.update.taken) <= self.slices.keys():
                for op in part:
                    self._run(op)
            else:
                left.append(part)
        return left

    def _run(self, op: Operator) -> None:
        update, loop = self.update, self.update.loop
        fetched = [o for o in op.reads if o in self.slices and o not in self.values]
        self.values.update((o, lax.expand_dims(self.slices[o], (0,))) for o in fetched)
        operands = [scalar(o) if isinstance(o, Literal) else self.values[o] for o in op.operands]
        with update.recorder.around(op):
            results = run_on_shards(
                update.bound, op, loop.updates[op.id], operands, loop.length, lambda axes: self.number
            )
        self.values.update(zip((v.name for v in op.results), results, strict=True))
        for name in (v.name for v in op.results):
            if name in loop.results:  # one array for what the loop makes and for its readers in the trip
                self.results[name] = lax.squeeze(self.values[name], (0,))
                self.values[name] = lax.expand_dims(self.results[name], (0,))
            if name in self.sums:
                with update.recorder.around(op):
                    self.sums[name] = self.sums[name] + self.values[name]


def taken_in_slices(inside: Sequence[Operator], matches: Mapping[str, Match]) -> tuple[str, ...]:
    """Stacks that a loop over layers takes in slices.

    Args:
        inside: operators that it runs.
        matches: by id the layouts over layers in which they run.
    """
    inner = set(names_made(inside))
    return tuple(
        dict.fromkeys(
            o
            for op in inside
            for o, k in zip(op.operands, matches[op.id].operands, strict=True)
            if isinstance(o, str) and o not in inner and k is not None and k.axes
        )
    )


def _bytes_taken(graph: Graph, part: Sequence[Operator], stacks: Collection[str]) -> int:
    return sum(graph.types[name].nbytes for name in names_read(part) if name in stacks)


def _gradients_first(operators: Sequence[Operator], gradients: Collection[Operand]) -> tuple[Operator, ...]:
    """Operators of a body, those that only cast gradients or lay them out directly after what they read.

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
        takers = readers.get(result.name, ())
        if (takers or result.name in gradients) and all(r.id in tails for r in takers):
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


def _numbers(count: int, step: int = 1) -> Any:
    numbers = jnp.arange(count, dtype=jnp.int32)
    return numbers if step == 1 else numbers * step


def _row(stack: Any, number: Any) -> Any:
    """A row of a stack, as one operator."""
    offsets = tuple(range(stack.ndim - 1))
    dims = lax.GatherDimensionNumbers(offset_dims=offsets, collapsed_slice_dims=(0,), start_index_map=(0,))
    indices = lax.broadcast_in_dim(number, (1,), ())
    return lax.gather(stack, indices, dims, (1, *stack.shape[1:]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _put(stack: Any, row: Any, number: Any) -> Any:
    """A stack with another row."""
    starts = (number, *(jnp.zeros((), number.dtype) for _ in row.shape))
    return lax.dynamic_update_slice(stack, lax.expand_dims(row, (0,)), starts, allow_negative_indices=False)
