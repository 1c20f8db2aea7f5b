"""Segments of layers that the backward pass runs again: what enters each is kept, not what every layer leaves.

A pair of loops over l layers (`autopar.ir.segment_loops`) becomes a pair of loops over l/k segments of k layers
(Chen et al., "Training deep nets with sublinear memory cost", 2016). Stacks of all layers go through the loops whole,
and each layer reads its row of them: what the backward loop replaces, as parameters, it writes where it lies.
Values are those of the step: the same operators on the same operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import Bound, BoundGraph, Traced
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import closure
from autopar.ir.in_place import replaced_in_place
from autopar.ir.loops import Scan
from autopar.ir.phases import SEGMENTS, marks_of
from autopar.ir.segment_loops import LoopPair, pairs_in_segments
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch.parts import Recorder, run_whole
from autopar.lower.microbatch.retrace import retraced
from autopar.recompute.rewrite import AGAIN, SCOPE


def in_segments(traced: Traced, layers: int) -> Traced:
    """The step whose loops over layers run in segments; ``traced`` itself where none may.

    Args:
        traced: a step in one microbatch.
        layers: a segment; loops whose number of layers it does not divide stay as they are.
    """
    if not pairs_in_segments(traced.graph, layers):
        return traced
    return retraced(traced, lambda env, recorder: run_in_segments(traced.program, layers, env, recorder))


def run_in_segments(bound: BoundGraph, layers: int, env: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Every value of a graph that its outputs name, computed with its loops over layers in segments.

    Args:
        bound: a step in one microbatch, or what a stage of a pipeline does for one.
        layers: as of `in_segments`.
        env: values of its inputs.
        recorder: see there.
    """
    pairs = pairs_in_segments(bound.graph, layers)
    forward, backward = {p.forward: p for p in pairs}, {p.backward: p for p in pairs}
    entered: dict[str, Sequence[Any]] = {}
    for op in bound.graph.operators:
        if op.id in forward:
            loop = _Loop.of(bound, op, env, recorder)
            entered[op.id], results = _forward(loop, forward[op.id], layers)
            env.update(results)
        elif op.id in backward:
            pair = backward[op.id]
            again = _Loop.of(bound, bound.graph.by_id[pair.forward], env, recorder)
            replaced = {str(op.operands[i]): j for i, j in replaced_in_place(bound.graph, op).items()}
            given = {**env, **dict.fromkeys(pair.stacks)}
            loop = _Loop.of(bound, op, given, recorder)
            env.update(_backward(loop, again, pair, layers, entered[pair.forward], replaced))
        else:
            part = replace(bound, graph=replace(bound.graph, operators=(op,)))
            env.update(run_whole(part, env, recorder))
    return env


@dataclass(frozen=True)
class _Loop:
    """A loop over layers as it is traced again.

    Args:
        op: the loop.
        scan: its parts.
        bound: its primitive and parameters.
        recorder: see there.
        consts: what each layer takes whole.
        initial: what enters the first layer.
        names: of the stacks that it takes in slices.
        stacks: these.
    """

    op: Operator
    scan: Scan
    bound: Bound
    recorder: Recorder
    consts: Sequence[Any]
    initial: Sequence[Any]
    names: Sequence[str]
    stacks: Sequence[Any]

    @staticmethod
    def of(bound: BoundGraph, op: Operator, env: Mapping[str, Any], recorder: Recorder) -> _Loop:
        """The loop ``op`` of a graph, of whose values ``env`` has those that it takes."""
        scan = Scan.of(op)
        arrays = [scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands]
        consts, initial, stacks = scan.split(arrays)
        names = [str(o) for o in op.operands[scan.num_whole :]]
        scope = f"{op.scope}/{SEGMENTS}" if op.scope else SEGMENTS
        segmented = replace(op, scope=scope, marks=marks_of(op.marks, (SEGMENTS,)))
        return _Loop(segmented, scan, bound.bounds[op.id], recorder, consts, initial, names, stacks)

    @property
    def results(self) -> tuple[list[str], list[str]]:
        """Names of its carries and stacks."""
        return self.scan.split_results([v.name for v in self.op.results])

    def over(self, body: Any, initial: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
        """``lax.scan`` in the direction of this loop, with its marks; of so many trips where it may have no stacks."""
        with self.recorder.around(self.op):
            return lax.scan(body, initial, xs, length=length, reverse=bool(self.bound.params["reverse"]))

    def trip(
        self, carry: Sequence[Any], slices: Sequence[Any], wanted: Sequence[int], *, again: bool = False
    ) -> list[Any]:
        """Outputs of its body, those whose numbers are ``wanted``.

        Args:
            carry: what enters a layer.
            slices: of its stacks.
            wanted: numbers among carries and slices of results.
            again: whether this is the second run, in the backward pass.
        """
        region = self.bound.regions["body"]
        graph = region.graph
        outputs = [graph.outputs[n].operand for n in wanted]
        operators = closure(graph.operators, outputs)
        if again:
            operators = [_again(o) for o in operators]
        values = dict(zip((i.name for i in graph.inputs), [*self.consts, *carry, *slices], strict=True))
        part = replace(region, graph=Graph(graph.name, graph.inputs, tuple(operators), graph.outputs))
        values = run_whole(part, values, self.recorder)
        return [jnp.asarray(scalar(o)) if isinstance(o, Literal) else values[o] for o in outputs]

    def rows(self, whole: Mapping[str, Any], number: Any) -> dict[str, Any]:
        """Rows of stacks, by name: what the layer ``number`` takes of them."""
        with self.recorder.around(self.op):
            return {n: _row(whole[n], number) for n in self.names if n in whole}


def _again(op: Operator) -> Operator:
    """An operator that runs again in the backward pass."""
    return replace(op, scope=f"{op.scope}/{SCOPE}" if op.scope else SCOPE, marks=marks_of(op.marks, AGAIN))


def _numbers(count: int, step: int = 1) -> Any:
    return jnp.arange(0, count * step, step, dtype=jnp.int32)


def _joined(stack: Any) -> Any:
    """A stack of segments of layers as one of layers."""
    return lax.reshape(stack, (stack.shape[0] * stack.shape[1], *stack.shape[2:]))


def _forward(loop: _Loop, pair: LoopPair, layers: int) -> tuple[Sequence[Any], dict[str, Any]]:
    """Inputs of each segment, as stacks, and the kept results of the forward loop, by name."""
    carries, stacks = loop.results
    carried = list(range(len(carries)))
    kept = [n for n, name in enumerate(stacks, len(carries)) if name not in pair.stacks]
    whole = dict(zip(loop.names, loop.stacks, strict=True))

    def layer(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = loop.trip(carry, slices, [*carried, *kept])
        return outputs[: len(carried)], outputs[len(carried) :]

    def alone(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], Any]:
        after, rows = layer(carry, slices)
        return after, (carry, rows)

    def segment(carry: Sequence[Any], first: Any) -> tuple[list[Any], Any]:
        def one(carry: Sequence[Any], number: Any) -> tuple[list[Any], list[Any]]:
            rows = loop.rows(whole, first + number)
            return layer(carry, [rows[n] for n in loop.names])

        after, rows = loop.over(one, carry, _numbers(layers))
        return after, (carry, rows)

    if layers == 1:
        carry, (entered, rows) = loop.over(alone, loop.initial, loop.stacks, loop.scan.length)
    else:
        carry, (entered, rows) = loop.over(segment, loop.initial, _numbers(pair.length // layers, layers))
        rows = [_joined(r) for r in rows]
    return entered, dict(zip([*carries, *(stacks[n - len(carries)] for n in kept)], [*carry, *rows], strict=True))


def _backward(
    loop: _Loop, again: _Loop, pair: LoopPair, layers: int, entered: Sequence[Any], replaced: Mapping[str, int]
) -> dict[str, Any]:
    """The results of the backward loop, by name.

    Args:
        loop: the backward loop; of the stacks that are not kept it has none.
        again: the forward loop.
        pair: of the two.
        layers: a segment.
        entered: what enters each segment, as stacks.
        replaced: by name of a stack that the loop replaces where it lies the number of the result that replaces it.
    """
    carries, stacks = loop.results
    carried, left = list(range(again.scan.num_carry)), _left(again, pair)
    whole = dict(zip([*again.names, *loop.names], [*again.stacks, *loop.stacks], strict=True))
    whole = {n: a for n, a in whole.items() if n not in pair.stacks}

    def layer(carry: Sequence[Any], slices: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        outputs = loop.trip(carry, [slices[n] for n in loop.names], range(len(loop.op.results)))
        return loop.scan.split_results(outputs)

    def alone(carry: Sequence[Any], row: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        start, slices = row
        residuals = again.trip(start, [slices[n] for n in again.names], left, again=True)
        return layer(carry, {**slices, **dict(zip(pair.stacks, residuals, strict=True))})

    if layers == 1:
        carry, rows = loop.over(alone, loop.initial, (entered, whole))
        return dict(zip([*carries, *stacks], [*carry, *rows], strict=True))

    ends = {n: j - len(carries) for n, j in replaced.items()}
    given = [n for n in range(len(stacks)) if n not in ends.values()]

    def segment(state: tuple[Sequence[Any], Mapping[str, Any]], row: tuple[Any, Sequence[Any]]) -> tuple[Any, Any]:
        (carry, written), (first, start) = state, row

        def ahead(carry: Sequence[Any], number: Any) -> tuple[list[Any], list[Any]]:
            rows = again.rows({**whole, **written}, first + number)
            outputs = again.trip(carry, [rows[n] for n in again.names], [*carried, *left], again=True)
            return outputs[: len(carried)], outputs[len(carried) :]

        def back(state: Any, row: tuple[Any, Sequence[Any]]) -> tuple[Any, list[Any]]:
            (carry, written), (number, residuals) = state, row
            here = first + number
            slices = {**loop.rows({**whole, **written}, here), **dict(zip(pair.stacks, residuals, strict=True))}
            after, rows = layer(carry, slices)
            if ends:
                with loop.recorder.around(loop.op):  # what a layer reads of a stack it has read before it writes
                    at, after, new = lax.optimization_barrier((here, after, [rows[n] for n in ends.values()]))
                    written = {n: _put(written[n], row, at) for n, row in zip(ends, new, strict=True)}
            return (after, written), [rows[n] for n in given]

        _, residuals = again.over(ahead, start, _numbers(layers))
        return loop.over(back, (carry, written), (_numbers(layers), residuals))

    first = (loop.initial, {n: whole.pop(n) for n in ends})
    (carry, written), rows = loop.over(segment, first, (_numbers(pair.length // layers, layers), entered))
    joined = {stacks[n]: _joined(r) for n, r in zip(given, rows, strict=True)}
    return {**dict(zip(carries, carry, strict=True)), **{stacks[j]: written[n] for n, j in ends.items()}, **joined}


def _left(again: _Loop, pair: LoopPair) -> list[int]:
    """Numbers of the outputs of the forward loop's body that make the stacks of a pair, in their order."""
    names = [v.name for v in again.op.results]
    return [names.index(name) for name in pair.stacks]


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
