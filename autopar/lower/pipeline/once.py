"""Moments of operators of a stage that run once a step: where examples meet, or in a part of the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir import Graph, Operand, Operator, Output
from autopar.lower.pipeline.loop import needed_of


@dataclass(frozen=True, order=True)
class Moment:
    """A program that runs once a step, once the passes before it are done; later ones are larger.

    Args:
        kind: "meeting" between all forward and all backward passes, "update" behind all of them.
        part: counts up where values cross stages.
    """

    kind: Literal["meeting", "update"]
    part: int


def moments_of(
    graph: Graph, late: Sequence[Operator], received: Mapping[str, Moment], met: Sequence[Operand]
) -> dict[str, Moment]:
    """Moments at which operators run, by id.

    Args:
        graph: of the stage.
        late: its operators that run once, behind some passes.
        received: by input from when on it is there.
        met: outputs that are made where examples meet.
    """
    meeting = {op.id for op in needed_of(graph, met, {op.id for op in late})}
    moments: dict[str, Moment] = {}
    there = dict(received)
    for op in late:
        kind: Literal["meeting", "update"] = "meeting" if op.id in meeting else "update"
        parts = [there[o].part for o in op.reads if o in there and there[o].kind == kind]
        moments[op.id] = Moment(kind, max(parts, default=0))
        there.update((v.name, moments[op.id]) for v in op.results)
    return moments


def moments_of_outputs(
    graph: Graph,
    moments: Mapping[str, Moment],
    received: Mapping[str, Moment],
    outputs: Sequence[Output],
    met: int,
) -> list[Moment]:
    """Moments of the outputs of a stage, of which the last ``met`` are made where examples meet."""
    ends = []
    for n, o in enumerate(outputs):
        op = graph.producers.get(o.operand) if isinstance(o.operand, str) else None
        start = Moment("meeting" if n >= len(outputs) - met else "update", 0)
        ends.append(received.get(str(o.operand), start) if op is None else moments.get(op.id, start))
    return ends
