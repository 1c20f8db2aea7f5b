"""The loop of a stage's graph, read back: what goes in, what is made where, what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from autopar.frontend import BoundGraph
from autopar.ir import Graph, Layout, Operand, Operator
from autopar.ir.analysis import closure, dependents
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop, phase_of
from autopar.ir.primitives import ALIASES, is_generator
from autopar.lower.interpreter import Sharded
from autopar.lower.pipeline.stage_graph import StageGraph
from autopar.stages.parts import StageValue


@dataclass(frozen=True)
class Leaving:
    """A value of the body that leaves it: contribution to a joined value, row of a stack, or what is sent.

    Args:
        name: the joined or sent value.
        operand: the body's value.
        layout: in which it leaves.
        reduce: how contributions are joined; "concatenate" for rows; None for what is sent.
    """

    name: str
    operand: Operand
    layout: Layout
    reduce: str | None


@dataclass(frozen=True, eq=False)
class Loop:
    """The loop over microbatches of one stage.

    Args:
        op: the scan.
        body: its body.
        prefix: of ids and names in the body.
        entering: body inputs with the operand of the scan that they are and their layout; carries are left out.
        number: the body's input that is the number of the microbatch.
        leaving: values of the body that leave it: terms of sums over microbatches, rows of stacks, and messages.
        backward: ids of the body's operators that belong to the backward pass.
    """

    op: Operator
    body: BoundGraph
    prefix: str
    entering: tuple[tuple[str, Operand, Layout], ...]
    number: str
    leaving: tuple[Leaving, ...]
    backward: frozenset[str]

    @property
    def graph(self) -> Graph:
        """The body's graph."""
        return self.body.graph


def find_loop(stage: StageGraph, decisions: Sharded) -> Loop | None:
    """The loop of a stage; None where the stage has none."""
    op = next(filter(is_stage_loop, stage.graph.operators), None)
    if op is None:
        return None
    body = stage.program.bounds[op.id].regions["body"]
    operands, results = decisions.operands[op.id], decisions.results[op.id]
    scan = Scan.of(op)
    consts, carries = scan.num_consts, scan.num_carry
    types = [i.type for i in body.graph.inputs]
    layouts = [k or Layout.replicated(t.rank) for k, t in zip(operands, types, strict=True)]
    inputs = body.graph.inputs
    prefix = f"{op.id}/body/"
    entering = tuple((inputs[i].name, op.operands[i], layouts[i]) for i in range(consts))
    leaving = []
    # By position: what is joined, as a loss that is an output too, may be sent as well.
    sums = stage.carried[: len(stage.carried) - len(stage.parts.sent)]
    reduces = {j.name: j.layout.reduce for j in stage.parts.joined}
    partial = {j.name for j in stage.parts.joined if j.layout.partial}
    for j, name in enumerate([*sums, *stage.parts.sent]):
        operand, layout = body.graph.outputs[j].operand, layouts[consts + j]
        if j < len(sums) and name in partial:
            operand, layout = _term(body.graph, operand, inputs[consts + j].name, layout, decisions, prefix)
        leaving.append(Leaving(name, operand, layout, reduces[name] if j < len(sums) else None))
    for r, name in enumerate(stage.stacked):
        at = carries + r
        leaving.append(Leaving(name, body.graph.outputs[at].operand, results[at].slice(), "concatenate"))
    backward = _backward(stage, body.graph, entering)
    return Loop(op, body, prefix, entering, inputs[consts + carries].name, tuple(leaving), backward)


def _term(
    graph: Graph, total: Operand, carried: str, layout: Layout, decisions: Sharded, prefix: str
) -> tuple[Operand, Layout]:
    """Term that the loop adds to a carried total, with its layout."""
    op = graph.producers.get(total) if isinstance(total, str) else None
    if op is None or carried not in op.operands:
        return total, layout
    (at,) = (i for i, o in enumerate(op.operands) if o != carried) if op.operands[0] != op.operands[1] else (1,)
    return op.operands[at], decisions.operands[prefix + op.id][at] or layout


def _backward(stage: StageGraph, graph: Graph, entering: Iterable[tuple[str, Operand, Layout]]) -> frozenset[str]:
    cotangents = {str(StageValue("from", r.name)) for r in stage.parts.received if r.backward}
    cotangents |= {str(StageValue("met", r.name)) for r in stage.parts.received_met}
    late = [name for name, operand, _ in entering if operand in cotangents]
    stored = [op for op in graph.operators if not is_generator(op)]
    return frozenset(op.id for op in dependents(stored, late, also=lambda op: phase_of(op) == "backward"))


def layouts_of(graph: Graph, inputs: dict[str, Layout], decisions: Sharded, prefix: str) -> dict[str, Layout]:
    """The layout in which each value of a graph is made; generators are left out, they hold no data."""
    layouts = dict(inputs)
    for op in graph.operators:
        if is_generator(op):
            continue
        if op.primitive in ALIASES:
            layouts_made = [layouts.get(str(o)) for o in op.operands]
            layouts.update((v.name, k) for v, k in zip(op.results, layouts_made, strict=True) if k is not None)
        else:
            layouts.update(zip((v.name for v in op.results), decisions.results[prefix + op.id], strict=True))
    return layouts


def needed_of(graph: Graph, wanted: Iterable[Operand], allowed: Set[str]) -> list[Operator]:
    """Operators among ``allowed`` (ids) that make ``wanted``, and generators, in running order."""
    return closure(graph.operators, wanted, within=lambda op: op.id in allowed or is_generator(op))
