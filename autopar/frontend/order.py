"""The order of a step's operators: each parameter is updated as soon as its gradient is there.

Optimizers are written tree by tree: all first moments, then all second moments, then all parameters. Run in
that order every gradient lives until the last of them. Here operators of the update run parameter by
parameter, each as soon as what it needs of the backward pass exists, and those that need nothing of it
(decaying a moment) not before they are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.ir import Graph, Operator
from autopar.ir.analysis import place
from autopar.ir.phases import phase_of


def order(graph: Graph) -> Graph:
    """``graph`` with each operator of the update moved up to where its gradients exist; the others keep their order."""
    core = {op.id for op in graph.operators if op.effects or phase_of(op) != "update"}
    if not any("transpose(" in op.scope for op in graph.operators):
        return graph
    producers = graph.producers
    readers: dict[str, list[Operator]] = defaultdict(list)
    core_sources: dict[
        str, set[str]
    ] = {}  # of an update operator: operators that it waits for and that wait for the core
    for op in graph.operators:
        sources = {producers[o].id for o in op.reads if o in producers}
        core_sources[op.id] = {s for s in sources if s in core or core_sources[s]}
        for s in sorted(core_sources[op.id]):
            readers[s].append(op)
    placed: dict[str, Operator] = {}

    for op in graph.operators:
        if op.id not in core or op.id in placed:
            continue
        place(op, producers, placed)
        fresh = [op]
        while fresh:
            done = fresh.pop()
            for reader in reversed(readers[done.id]):
                if (
                    reader.id not in core
                    and reader.id not in placed
                    and all(w in placed for w in core_sources[reader.id])
                ):
                    place(reader, producers, placed)
                    fresh.append(reader)
    for op in graph.operators:
        place(op, producers, placed)
    return replace(graph, operators=tuple(placed.values()))
