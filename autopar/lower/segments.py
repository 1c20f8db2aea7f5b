"""Segments of layers that the backward pass runs again: what enters each is kept, not what every layer leaves.

A pair of loops over l layers (`autopar.ir.segment_loops`) becomes a pair of loops over l/k segments of k layers
(Chen et al., "Training deep nets with sublinear memory cost", 2016). Stacks of all layers go through the loops whole,
and each layer reads its row of them: what the backward loop replaces, as parameters, it writes where it lies.
Values are those of the step: the same operators on the same operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.frontend import BoundGraph, Traced
from autopar.ir.in_place import replaced_in_place
from autopar.ir.phases import SEGMENTS
from autopar.ir.segment_loops import LoopPair, pairs_in_segments
from autopar.lower.layer_loop import LayerLoop
from autopar.lower.microbatch.parts import Recorder, run_some
from autopar.lower.microbatch.retrace import retraced


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
            loop = LayerLoop.of(bound, op, env, recorder, SEGMENTS)
            entered[op.id], results = _forward(loop, forward[op.id], layers)
            env.update(results)
        elif op.id in backward:
            pair = backward[op.id]
            again = LayerLoop.of(bound, bound.graph.by_id[pair.forward], env, recorder, SEGMENTS)
            replaced = {str(op.operands[i]): j for i, j in replaced_in_place(bound.graph, op).items()}
            given = {**env, **dict.fromkeys(pair.stacks)}
            loop = LayerLoop.of(bound, op, given, recorder, SEGMENTS)
            env.update(_backward(loop, again, pair, layers, entered[pair.forward], replaced))
        else:
            env.update(run_some(bound, [op], env, recorder))
    return env


def _rows(loop: LayerLoop, whole: Mapping[str, Any], number: Any) -> dict[str, Any]:
    """Rows of stacks, by name: what the layer ``number`` of a loop takes of them."""
    with loop.recorder.around(loop.op):
        return {n: _row(whole[n], number) for n in loop.names if n in whole}


def _numbers(count: int, step: int = 1) -> Any:
    return jnp.arange(0, count * step, step, dtype=jnp.int32)


def _joined(stack: Any) -> Any:
    """A stack of segments of layers as one of layers."""
    return lax.reshape(stack, (stack.shape[0] * stack.shape[1], *stack.shape[2:]))


def _forward(loop: LayerLoop, pair: LoopPair, layers: int) -> tuple[Sequence[Any], dict[str, Any]]:
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
            rows = _rows(loop, whole, first + number)
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
    loop: LayerLoop, again: LayerLoop, pair: LoopPair, layers: int, entered: Sequence[Any], replaced: Mapping[str, int]
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
            rows = _rows(again, {**whole, **written}, first + number)
            outputs = again.trip(carry, [rows[n] for n in again.names], [*carried, *left], again=True)
            return outputs[: len(carried)], outputs[len(carried) :]

        def back(state: Any, row: tuple[Any, Sequence[Any]]) -> tuple[Any, list[Any]]:
            (carry, written), (number, residuals) = state, row
            here = first + number
            slices = {**_rows(loop, {**whole, **written}, here), **dict(zip(pair.stacks, residuals, strict=True))}
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


def _left(again: LayerLoop, pair: LoopPair) -> list[int]:
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
