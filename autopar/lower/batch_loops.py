"""`parts_side_by_side`: a step whose loop over parts of the batch is one function of all parts.

Users who accumulate gradients write a loop over parts of the batch: `jax.lax.scan` over ``x.reshape(4, -1, ...)``. A
pipeline cannot cut such a loop, which is one operator. The function maps the loop's body over the dim of parts,
with `jax.vmap`; a sum that the loop carries becomes the sum over that dim. Microbatches then split the dim of parts as
they split examples. Each part is computed by itself again where there are as many microbatches as parts.

A loop is taken apart where it does most of the arithmetic of the step: there is nothing else to cut into stages. A step
of one stage keeps its loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.cost import total_flops
from autopar.frontend import BoundGraph, Traced
from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents
from autopar.ir.loops import Scan
from autopar.lower.localize.base import scalar
from autopar.lower.retrace import Recorder, retraced, run_whole
from autopar.microbatch import BatchLoop, Copies, copies_by_part, loops_over_batch


def parts_side_by_side(traced: Traced) -> Traced:
    """The step with its loops over parts of the batch taken apart, where they do most of the arithmetic; else itself.

    Args:
        traced: a step.
    """
    graph = traced.graph
    loops = loops_over_batch(graph)
    if loops and _is_most(graph, loops):
        return retraced(traced, lambda env, recorder: _run(traced.program, loops, recorder, env))
    copies = copies_by_part(graph)
    if copies is not None and _is_most(graph, copies.replaced):
        return retraced(traced, lambda env, recorder: _joined(traced.program, copies, recorder, env))
    return traced


def _is_most(graph: Graph, ids: Iterable[str]) -> bool:
    """Whether some operators do more than half of the arithmetic of a step."""
    flops = {op.id: total_flops(graph, op) for op in graph.operators}
    return 2 * sum(flops[id] for id in ids) > sum(flops.values())


def _joined(bound: BoundGraph, copies: Copies, recorder: Recorder, env: dict[str, Any]) -> dict[str, Any]:
    """All values of a step that are not inside of copies, which are one function of all parts."""
    graph = bound.graph
    rest = [op for op in graph.operators if op.id not in copies.replaced]
    results = {n for names in copies.values.values() for n in names} | {s.name for s in copies.sums.values()}
    after = {op.id for op in dependents(rest, results)}
    env = run_whole(_of(bound, [op for op in rest if op.id not in after]), env, recorder)
    body = _of(bound, [graph.by_id[id] for id in copies.first])
    names, mapped = [*copies.sums, *copies.values], replace(recorder, splices=False)

    def of_part(parts: Sequence[Any]) -> list[Any]:
        inside = run_whole(body, {**env, **dict(zip(copies.parts, parts, strict=True))}, mapped)
        return [inside[n] for n in names]

    stacks = [
        jnp.reshape(env[source], (copies.count, *graph.types[part].shape)) for part, source in copies.parts.items()
    ]
    for name, stack in zip(names, jax.vmap(of_part)(stacks), strict=True):
        if name in copies.sums:
            total, first = jnp.sum(stack, axis=0, dtype=stack.dtype), copies.sums[name].first
            given = env[first] if isinstance(first, str) else None if first is None else scalar(first)
            env[copies.sums[name].name] = total if given is None else given + total
        else:
            env.update((n, stack[k]) for k, n in enumerate(copies.values[name]))
    return run_whole(_of(bound, [op for op in rest if op.id in after]), env, recorder)


def _of(bound: BoundGraph, operators: Sequence[Operator]) -> BoundGraph:
    """Some operators of a graph."""
    return replace(bound, graph=Graph(bound.graph.name, (), tuple(operators), ()))


def _run(bound: BoundGraph, loops: Mapping[str, BatchLoop], recorder: Recorder, env: dict[str, Any]) -> dict[str, Any]:
    """All values of a step."""
    for op in bound.graph.operators:
        if op.id not in loops:
            env = run_whole(_of(bound, [op]), env, recorder)
            continue
        operands = [env[o] if isinstance(o, str) else scalar(o) for o in op.operands]
        results = _side_by_side(op, bound.bounds[op.id].regions["body"], loops[op.id], operands, recorder)
        env.update(zip((v.name for v in op.results), results, strict=True))
    return env


def _side_by_side(
    op: Operator, body: BoundGraph, loop: BatchLoop, operands: Sequence[Any], recorder: Recorder
) -> list[Any]:
    """Results of a loop whose iterations need nothing of each other.

    Args:
        op: the loop.
        body: its body.
        loop: what it carries and reads.
        operands: of the loop.
        recorder: takes notes of operators.
    """
    scan = Scan.of(op)
    consts, initial, stacks = scan.split(operands)
    parts = {o.results[0].name: loop.reads[o.id] for o in body.graph.operators if o.id in loop.reads}
    others = tuple(o for o in body.graph.operators if o.id not in loop.reads)
    rest = replace(body, graph=replace(body.graph, operators=others))
    names = [i.name for i in body.graph.inputs]
    numbers, mapped = jnp.arange(scan.length), replace(recorder, splices=False)

    def of_part(number: Any, slices: Sequence[Any], read: Sequence[Any]) -> list[Any]:
        carry = [
            number.astype(jnp.result_type(a)) if n in loop.counters else jnp.zeros_like(a) if n in loop.sums else a
            for n, a in enumerate(initial)
        ]
        env = dict(zip(names, [*consts, *carry, *slices], strict=True))
        env.update(zip(parts, (part[None] for part in read), strict=True))
        env = run_whole(rest, env, mapped)
        return [
            env[o.operand] if isinstance(o.operand, str) else jnp.asarray(scalar(o.operand)) for o in rest.graph.outputs
        ]

    outputs = jax.vmap(of_part)(numbers, stacks, [consts[n] for n in parts.values()])
    carried = []
    with recorder.around(op):
        for n, a in enumerate(map(jnp.asarray, initial)):
            if n in loop.sums:
                a = a + jnp.sum(outputs[n], axis=0, dtype=a.dtype)
            carried.append(a + scan.length if n in loop.counters else a)
    return [*carried, *outputs[scan.num_carry :]]
