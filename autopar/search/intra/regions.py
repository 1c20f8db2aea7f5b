"""Loops and branches: how layouts enter, are carried by and leave the regions of an operator.

scan: a carry has one layout, in which it enters each trip and leaves the loop; the body's result is
resharded to it each trip. Slices of stacked inputs and outputs have the layout of the stack without
its first dim, which is never split. Costs inside count once a trip (`length`).
while: as scan with carries alone; trips are not known and counted as `autopar.ir.loops.ASSUMED_ITERATIONS`.
cond: each branch counts with equal probability; results have one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from autopar.ir import Graph, Layout, Operand, Operator, TensorType
from autopar.ir.loops import Scan, While, runs_inside
from autopar.ir.phases import phase_of
from autopar.search.intra.draft import Draft, RegionSite


class _Ports:
    """Collects, for the record of a region operator, the layouts of its operands and results."""

    def __init__(self) -> None:
        self.operands: list[tuple[int, tuple[Layout, ...]]] = []
        self.results: list[tuple[int, tuple[Layout, ...]]] = []


def _enter(
    b: Draft,
    prefix: str,
    operand: Operand,
    inner: str,
    type: TensorType,
    weight: float,
    inner_weight: float,
    consumer: str,
    stacked: bool = False,
    layouts: tuple[int, tuple[Layout, ...]] | None = None,
) -> tuple[int, tuple[Layout, ...]]:
    """A region's input ``inner`` that takes ``operand``; (its node, its layouts)."""
    node, kinds = layouts or b.free_layouts(inner, type)
    outer = tuple(k.stack() for k in kinds) if stacked else kinds
    source = b.values[prefix + operand] if isinstance(operand, str) else None
    if inner not in b.values:
        made = b.value(inner, type, node, kinds, inner_weight, alias=not stacked)
        if source is not None and source.constant and not stacked:
            made.transient = made.constant = True
    if source is not None and source.node is not None:
        b.use(source.key, node, outer, weight, consumer, b.phase, stacked=stacked)
    return node, outer


def _leave(
    b: Draft,
    region: Graph,
    at: int,
    prefix: str,
    node: int,
    layouts: tuple[Layout, ...],
    weight: float,
    consumer: str,
) -> None:
    """The region's output number ``at`` ends in the layouts of ``node``."""
    operand = region.outputs[at].operand
    if isinstance(operand, str):
        source = b.values[prefix + operand]
        if source.node is not None:
            b.use(source.key, node, layouts, weight, consumer, b.phase)


def _keep(b: Draft, op: Operator, prefix: str, kept: Collection[int], ports: _Ports) -> None:
    """What a loop takes of its operands number ``kept`` it needs in every trip: they are there until it ends."""
    for i in kept:
        operand = op.operands[i]
        source = b.values.get(prefix + operand) if isinstance(operand, str) else None
        if source is None or source.node is None:
            continue
        node = ports.operands[i][0]
        source.uses = [
            replace(u, until=b.time, heavy=True) if u.node == node and u.consumer == prefix + op.id else u
            for u in source.uses
        ]


def _site(b: Draft, op: Operator, prefix: str, weight: float, ports: _Ports) -> None:
    """Records the operator itself: its ports have nodes of their own, so the record names them one by one."""
    b.region_sites.append(RegionSite(prefix + op.id, op, tuple(ports.operands), tuple(ports.results), weight, b.time))


def scan(b: Draft, graph: Graph, op: Operator, prefix: str, weight: float) -> None:
    """Adds a scan."""
    loop = Scan.of(op)
    body, consts, carries = loop.body, loop.num_consts, loop.num_carry
    begin = b.time
    inner, inner_weight, id = f"{prefix}{op.id}/body/", runs_inside(op, weight), prefix + op.id
    ports = _Ports()
    for i, (operand, entry) in enumerate(zip(op.operands, body.inputs, strict=True)):
        carried = consts <= i < loop.num_whole and b.summable(entry.type)
        layouts = b.free_layouts(inner + entry.name, entry.type, partial=carried)
        stacked = i >= loop.num_whole
        ports.operands.append(
            _enter(b, prefix, operand, inner + entry.name, entry.type, weight, inner_weight, id, stacked, layouts)
        )
    b.graph(body, inner, inner_weight)
    b.time += 1
    _keep(b, op, prefix, {*range(consts), *range(loop.num_whole, len(op.operands))}, ports)
    passes = {phase_of(o.scope, b.phase) for o in body.operators}
    for j, result in enumerate(op.results):
        if j < carries:
            port = ports.operands[consts + j]
            node, kinds = port
            outer = kinds
        else:
            type = body.outputs[j].type
            node, kinds = b.free_layouts(prefix + result.name, type, partial=b.summable(type))
            outer = tuple(k.stack() for k in kinds)
        _leave(b, body, j, inner, node, kinds, inner_weight, id)
        made = b.value(prefix + result.name, result.type, node, outer, weight)
        made.time = begin
        if "backward" in passes and j < carries:
            made.phase = "backward"  # sums of gradients
        ports.results.append((node, outer))
    _site(b, op, prefix, weight, ports)


def while_loop(b: Draft, graph: Graph, op: Operator, prefix: str, weight: float) -> None:
    """Adds a while loop."""
    loop = While.of(op)
    cond, body, cond_consts, body_consts = loop.cond, loop.body, loop.cond_consts, loop.body_consts
    trips, id = runs_inside(op, weight), prefix + op.id
    in_cond, in_body = f"{prefix}{op.id}/cond/", f"{prefix}{op.id}/body/"
    ports = _Ports()
    predicate = cond.outputs[0].type
    for i, operand in enumerate(op.operands):
        if i < cond_consts:
            entry = cond.inputs[i]
            ports.operands.append(_enter(b, prefix, operand, in_cond + entry.name, entry.type, weight, trips, id))
        elif i < cond_consts + body_consts:
            entry = body.inputs[i - cond_consts]
            ports.operands.append(_enter(b, prefix, operand, in_body + entry.name, entry.type, weight, trips, id))
        else:
            j = i - cond_consts - body_consts
            entry, seen = body.inputs[body_consts + j], cond.inputs[cond_consts + j]
            whole = None
            if predicate.rank:  # a batch of loops: each stops by itself, which the lowering does on whole values
                whole = (b.node(in_body + entry.name, np.zeros(1), str), (Layout.replicated(entry.type.rank),))
            port = _enter(b, prefix, operand, in_body + entry.name, entry.type, weight, trips, id, layouts=whole)
            b.value(in_cond + seen.name, seen.type, port[0], port[1], trips, alias=True)
            ports.operands.append(port)
    b.graph(cond, in_cond, trips)
    decided = b.node(f"{id} predicate", np.zeros(1), str)
    _leave(b, cond, 0, in_cond, decided, (Layout.replicated(predicate.rank),), trips, id)
    b.graph(body, in_body, trips)
    b.time += 1
    for j, result in enumerate(op.results):
        port = ports.operands[cond_consts + body_consts + j]
        _leave(b, body, j, in_body, port[0], port[1], trips, id)
        b.value(prefix + result.name, result.type, port[0], port[1], weight)
        ports.results.append(port)
    _site(b, op, prefix, weight, ports)


def cond(b: Draft, graph: Graph, op: Operator, prefix: str, weight: float) -> None:
    """Adds a cond (jax calls a switch so as well): the first operand is the branch's index."""
    id, share = prefix + op.id, runs_inside(op, weight)
    ports = _Ports()
    index = graph.type_of(op.operands[0])
    whole = (b.node(f"{id} index", np.zeros(1), lambda _: "[]"), (Layout.replicated(index.rank),))
    _enter(b, prefix, op.operands[0], f"{id}/index", index, weight, weight, id, layouts=whole)
    ports.operands.append(whole)
    for operand in op.operands[1:]:
        type = graph.type_of(operand)
        name = f"{id}/operand.{len(ports.operands)}"
        ports.operands.append(_enter(b, prefix, operand, name, type, weight, weight, id))
    for name, branch in op.regions:
        for port, entry in zip(ports.operands[1:], branch.inputs, strict=True):
            b.value(f"{id}/{name}/{entry.name}", entry.type, port[0], port[1], share, alias=True)
        b.graph(branch, f"{id}/{name}/", share)
    b.time += 1
    for j, result in enumerate(op.results):
        node, kinds = b.free_layouts(prefix + result.name, result.type)
        for name, branch in op.regions:
            _leave(b, branch, j, f"{id}/{name}/", node, kinds, share, id)
        b.value(prefix + result.name, result.type, node, kinds, weight)
        ports.results.append((node, kinds))
    _site(b, op, prefix, weight, ports)


Handler = Callable[[Draft, Graph, Operator, str, float], None]
REGIONS: Mapping[str, Handler] = MappingProxyType({"scan": scan, "while": while_loop, "cond": cond})
