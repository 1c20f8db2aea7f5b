"""The update of stacked layers in the backward loop of a stage that has one microbatch a step.

What microbatches add up is whole behind all of them. With one, nothing is added up: the stage's loop over microbatches
takes the update of its stacks in, as operators behind its backward pass, and from there the rewriting of a whole step
(`autopar.lower.layer_techniques`) takes it into the backward loop over layers. New state leaves the loop in place of
gradients, and lies where the old state did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from autopar.frontend import BoundGraph
from autopar.ir import Graph, Input, Layout, Output
from autopar.ir.analysis import closure, names_made, names_read
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.lower.layer_loop import with_layer_loops
from autopar.lower.layer_techniques import backward_updates
from autopar.lower.pipeline.stage_graph import StageGraph, with_body
from autopar.lower.retrace import Recorder
from autopar.microbatch import Joined, Microbatching
from autopar.stages import StageParts


@dataclass(frozen=True)
class UpdatedParts:
    """Parts of a stage whose loop updates stacks of layers.

    Args:
        parts: of the stage.
        microbatching: of the step; the loop takes what the update reads.
    """

    parts: StageParts
    microbatching: Microbatching


def updated_parts(graph: Graph, microbatching: Microbatching, parts: StageParts) -> UpdatedParts | None:
    """A stage whose loop over one microbatch has the update of its stacks; None where none may be in it.

    Args:
        graph: the whole step.
        microbatching: of the step.
        parts: of the stage.
    """
    if microbatching.count > 1 or not parts.late:
        return None
    loops = backward_updates(_alone(graph, parts)).loops
    inside = {id for loop in loops for id in loop.updates}
    late = [op for op in graph.operators if op.id in set(parts.late)]
    moved = [op for op in late if op.id in inside]
    # What the update takes besides, as the number of the step, is computed in the loop too.
    taken = closure([op for op in late if op.id not in inside], names_read(moved))
    read = names_read([*moved, *taken])
    if not moved or read.intersection(r.name for r in (*parts.received_late, *parts.received_met)):
        return None
    returned = [graph.outputs[i].operand for i in parts.outputs]
    new_state = {name for loop in loops for name in loop.results}
    results = tuple(str(o) for o in returned if o in new_state)
    left = closure(late, [*returned, *parts.sent_late, *parts.sent_met], given=results)
    needed = {*names_read(left), *returned, *parts.sent_late, *parts.sent_met}
    joined = [j for j in parts.joined if j.name in needed]
    joined += [Joined(name, Layout.replicated(graph.types[name].rank)) for name in results]
    body = {*parts.body, *(op.id for op in (*moved, *taken))}
    ids = {op.id for op in left}
    of_loop = replace(
        parts,
        body=tuple(op.id for op in graph.operators if op.id in body),
        backward=parts.backward | {op.id for op in moved},
        joined=tuple(joined),
        late=tuple(id for id in parts.late if id in ids),
        part_of={id: n for id, n in parts.part_of.items() if id in ids},
    )
    outside = read - set(names_made([*moved, *taken])) - set(microbatching.body_inputs)
    inside_loop = names_made(op for op in graph.operators if op.id in body)
    inputs = (*microbatching.body_inputs, *sorted(outside.difference(inside_loop)))
    return UpdatedParts(of_loop, replace(microbatching, body_inputs=inputs))


def with_update(stage: StageGraph) -> StageGraph:
    """A stage of `updated_parts` whose backward loops over layers update them."""

    def run(body: BoundGraph, env: dict[str, Any], recorder: Recorder) -> Mapping[str, Any]:
        return with_layer_loops(body, backward_updates(body.graph).loops, env, recorder)

    return with_state(with_body(with_state(stage), run))


def with_state(stage: StageGraph) -> StageGraph:
    """A stage whose loop says which of its inputs are state, and which of its outputs replace some."""
    op = next(filter(is_stage_loop, stage.graph.operators), None)
    if op is None:
        return stage
    bound = stage.program.bounds[op.id]
    body, scan = bound.regions["body"], Scan.of(op)
    roles = {i.name: i.role for i in stage.graph.inputs}
    within = {str(o): i.name for o, i in zip(op.operands, body.graph.inputs[: scan.num_consts], strict=False)}
    replaced = {o.operand: o.updates for o in stage.graph.outputs if o.updates is not None}
    inputs = tuple(
        replace(i, role=roles.get(str(o), i.role)) for i, o in zip(body.graph.inputs, op.operands, strict=True)
    )
    outputs = tuple(
        replace(o, updates=within.get(str(replaced.get(v.name))))
        for o, v in zip(body.graph.outputs, op.results, strict=True)
    )
    region = replace(body.graph, inputs=inputs, outputs=outputs)
    regions = tuple((name, region if name == "body" else r) for name, r in op.regions)
    operators = tuple(replace(o, regions=regions) if o.id == op.id else o for o in stage.graph.operators)
    new = replace(bound, regions=MappingProxyType({**bound.regions, "body": replace(body, graph=region)}))
    program = replace(
        stage.program,
        graph=replace(stage.graph, operators=operators),
        bounds={**stage.program.bounds, op.id: new},
    )
    return replace(stage, program=program)


def _alone(graph: Graph, parts: StageParts) -> Graph:
    """Graph of a stage in one microbatch, without a loop."""
    ids = {*parts.before, *parts.body, *parts.late}
    inputs = {i.name: i for i in graph.inputs}
    names = [v.name for v in parts.graph_inputs]
    outputs = [graph.outputs[i] for i in parts.outputs]
    sent = (*parts.sent_late, *parts.sent_met, *parts.sent)
    return Graph(
        graph.name,
        tuple(inputs.get(n) or Input(n, graph.types[n]) for n in dict.fromkeys(names)),
        tuple(op for op in graph.operators if op.id in ids),
        (
            *(o if o.updates in names else replace(o, updates=None) for o in outputs),
            *(Output(n, f"sent {n}", graph.types[n]) for n in sent),
        ),
    )
