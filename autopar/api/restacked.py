"""A plan of a step whose stacks were taken apart, told in terms of the user's own leaves."""

from __future__ import annotations

import msgspec

from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.lower.split_layers import SplitStep
from autopar.plan import InputRecord, OutputRecord, Plan


def restacked(plan: Plan, graph: Graph, split_step: SplitStep) -> Plan:
    """``plan`` as a plan of ``graph``.

    Args:
        plan: made for ``split_step.step``.
        graph: of the user's step.
        split_step: what was taken apart.

    A leaf in pieces has the stage and the layout of its first one.
    """
    content = plan.content
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
        donated=tuple(
            i.name
            for n, i in enumerate(graph.inputs)
            if donated.issuperset(split_step.names(n)) and split_step.names(n)
        ),
    )
    return Plan(warned, plan.phases)
