"""A plan of a step whose stacks were taken apart, told in terms of the user's own leaves."""

from __future__ import annotations

import msgspec

from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.lower.unstack import Unstacked
from autopar.plan import InputRecord, OutputRecord, Plan


def restacked(plan: Plan, graph: Graph, unstacked: Unstacked) -> Plan:
    """``plan`` as a plan of ``graph``.

    Args:
        plan: made for ``unstacked.step``.
        graph: of the user's step.
        unstacked: what was taken apart.

    A leaf in pieces has the stage and the layout of its first one.
    """
    content = plan.content
    donated = set(content.donated)
    inputs = tuple(
        InputRecord(i.name, str(i.type), i.role, first.layout, first.stage, first.memory)
        for i, at in zip(graph.inputs, unstacked.inputs, strict=True)
        for first in [content.inputs[at[0]]]
    )
    outputs = tuple(
        OutputRecord(o.path, str(o.type), content.outputs[at[0]].layout, o.updates, content.outputs[at[0]].stage)
        for o, at in zip(graph.outputs, unstacked.outputs, strict=True)
    )
    told = msgspec.structs.replace(
        content,
        inputs=inputs,
        outputs=outputs,
        fingerprint=fingerprint(graph),
        stack_groups=unstacked.groups,
        donated=tuple(
            i.name for n, i in enumerate(graph.inputs) if donated.issuperset(unstacked.names(n)) and unstacked.names(n)
        ),
    )
    return Plan(told, plan.phases)
