"""A plan of a step whose stacks were taken apart, told in terms of the user's own leaves."""

from __future__ import annotations

import msgspec

from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.lower.split_layers import SplitStep
from autopar.plan import InputRecord, OutputRecord, Plan


def restacked(plan: Plan, graph: Graph, split_step: SplitStep, block_scores: int = 0) -> Plan:
    """``plan`` as a plan of ``graph``.

    Args:
        plan: made for ``split_step.step``.
        graph: of the user's step.
        split_step: what was taken apart.
        block_scores: scores of one head from which attention of its stages runs in blocks; 0 where it does not.

    A leaf in pieces has the stage and the layout of its first one.
    """
    content = plan.content
    layers = _layers_by_stage(plan, graph, split_step)
    donated = set(content.donated)
    inputs = tuple(
        InputRecord(i.name, str(i.type), i.role, first.layout, first.stage, first.memory)
        for i, at in zip(graph.inputs, split_step.inputs, strict=True)
        for first in [content.inputs[at[0]]]
    )
    outputs = tuple(
        OutputRecord(o.path, str(o.type), content.outputs[at[0]].layout, o.updates, content.outputs[at[0]].stage)
        for o, at in zip(graph.outputs, split_step.outputs, strict=True)
    )
    warned = msgspec.structs.replace(
        content,
        inputs=inputs,
        outputs=outputs,
        fingerprint=fingerprint(graph),
        stack_groups=split_step.groups,
        stages=tuple(msgspec.structs.replace(s, layers=layers.get(n)) for n, s in enumerate(content.stages)),
        donated=tuple(
            i.name
            for n, i in enumerate(graph.inputs)
            if donated.issuperset(split_step.names(n)) and split_step.names(n)
        ),
    )
    return Plan(warned.in_blocks(block_scores), plan.phases)


def _layers_by_stage(plan: Plan, graph: Graph, split_step: SplitStep) -> dict[int, tuple[int, int, int]]:
    """By stage the first of its stacked layers, the number behind its last one, and the number of all.

    They are those of the first parameter that is in pieces: all such parameters are read by the same loops.
    """
    stacked = (n for n, i in enumerate(graph.inputs) if i.role == "parameter" and len(split_step.inputs[n]) > 1)
    leaf = next(stacked, None)
    if leaf is None:
        return {}
    total = graph.inputs[leaf].type.shape[0]
    each = total // split_step.groups
    by_stage: dict[int, tuple[int, int, int]] = {}
    for g, at in enumerate(split_step.inputs[leaf]):
        stage = plan.content.inputs[at].stage
        by_stage[stage] = (by_stage.get(stage, (g * each,))[0], (g + 1) * each, total)
    return by_stage
