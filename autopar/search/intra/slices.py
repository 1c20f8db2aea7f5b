"""Slices of stacks in host memory that are on the way, while a loop computes with others.

Compilers of programs for several devices run such a loop one trip ahead of its moves: the slice of the next trip
arrives while this one's is in use, and what a trip made leaves while the next trip computes (XLA's compiler for TPU
peels a trip off at either end for that). So a stack that goes to the device takes a second slice there as long as the
loop runs, and one that comes from there takes one until the trip makes its own. In programs for one device XLA fetches
the slices of a trip in that trip, those of a parameter when its update begins, and what a trip made leaves at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autopar.cluster import LogicalMesh
from autopar.ir import Graph, Operator
from autopar.ir.independent import separate_parts
from autopar.ir.loops import Scan
from autopar.search.intra.builder import Builder
from autopar.search.intra.sharding_problem import UsageDraft, ValueDraft


def trips_ahead(mesh: LogicalMesh) -> int:
    """Number of trips before its own at which a slice is fetched, in a program for the devices of a mesh."""
    return int(math.prod(mesh.shape) > 1)


def slices_ahead(values: Iterable[ValueDraft], mesh: LogicalMesh) -> int | None:
    """`trips_ahead` where some of the ``values``, which are in host memory, are taken in slices; else None."""
    return trips_ahead(mesh) if any(v.trips > 1 for v in values) else None


def add_slices_on_the_way(b: Builder, graph: Graph, op: Operator, prefix: str, begin: int) -> None:
    """Adds what a loop holds of stacks in host memory, besides the values inside of it that it computes with.

    Args:
        b: where it is added; its time is the end of the loop.
        graph: that the loop is in.
        op: the loop.
        prefix: names of the regions around it.
        begin: when the loop begins.
    """
    if not trips_ahead(b.mesh):
        _fetch_by_part(b, op, prefix)
        return
    loop, inner = Scan.of(op), f"{prefix}{op.id}/body/"
    for operand in op.operands[loop.num_whole :]:
        stack = b.values.get(prefix + operand) if isinstance(operand, str) else None
        if stack is not None and stack.trips > 1:
            _hold(b, stack, begin, b.time)
    replaced = {} if prefix else {o.operand: o.updates for o in graph.outputs if o.updates}
    for result, output in zip(op.results[loop.num_carry :], loop.body.outputs[loop.num_carry :], strict=True):
        stack = b.values[replaced.get(result.name, prefix + result.name)]
        if stack.trips > 1 and isinstance(output.operand, str):
            _hold(b, stack, begin, b.values[inner + output.operand].time)


def _fetch_by_part(b: Builder, op: Operator, prefix: str) -> None:
    """Moves the times at which slices of stacks in host memory come to where the trip begins with their part.

    One kernel updates a parameter: it reads the slices of all its state at once, so they stay until it has ended.
    """
    loop, inner = Scan.of(op), f"{prefix}{op.id}/body/"
    stacks = [b.values.get(prefix + o) if isinstance(o, str) else None for o in op.operands[loop.num_whole :]]
    entries = loop.body.inputs[loop.num_whole :]
    slices = {i.name: s for i, s in zip(entries, stacks, strict=True) if s is not None and s.trips > 1}
    for part in separate_parts(loop.body.operators, slices):
        names = [o for o in dict.fromkeys(o for op in part for o in op.reads) if o in slices]
        values = [b.values[inner + o] for o in names]
        first = min((u.time for v in values for u in v.uses), default=0)
        last = max((b.values[inner + v.name].time for op in part for v in op.results), default=0)
        for name, v in zip(names, values, strict=True):
            v.time = max(v.time, first)
            if slices[name].source:
                _hold(b, slices[name], 1 + max((u.time for u in v.uses), default=last), 1 + last)


def _hold(b: Builder, stack: ValueDraft, start: int, stop: int) -> None:
    """A slice of ``stack`` on the device from ``start`` on, where the stack is in host memory."""
    if start < stop and stack.node is not None:
        bytes = b.layouts.local_bytes(stack.type, stack.layouts) / stack.trips
        slices = np.where(np.array(stack.hosted), bytes, 0.0)
        b.workspaces.append(UsageDraft(stack.node, start, stop, slices, "temporaries", stack.key))
