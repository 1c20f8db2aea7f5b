"""Techniques of loops over layers: segments, updates in the backward loop, updates a layer at a time.

Each is a `LayerLoop` or some; `autopar.lower.layer_loop` runs them. Models that scan over layers keep the parameters of
all layers in one array, and so do the moments of an optimizer. Forward and backward pass take slices of such stacks,
the update takes them whole. Updated a layer at a time no pass needs a stack whole on a device, and it may lie in host
memory (L2L, Pudipeddi et al., 2020).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.frontend import Traced
from autopar.ir import Graph
from autopar.ir.layer_loops import pairs_in_segments, replaced_in_place
from autopar.lower.layer_loop import LayerLoop, with_layer_loops
from autopar.lower.layer_rows import backward_updates, loops_of_update
from autopar.lower.microbatch.retrace import retraced


def loops_in_segments(graph: Graph, layers: int) -> tuple[LayerLoop, ...]:
    """Loops over layers in segments that the backward pass runs again; none where no pair of loops may.

    Args:
        graph: a step in one microbatch, or what a stage does for one.
        layers: a segment; loops whose number of layers it does not divide stay as they are.
    """
    loops = []
    for pair in pairs_in_segments(graph, layers):
        op = graph.by_id[pair.backward]
        replaced = replaced_in_place(graph, op) if layers > 1 else {}
        written = {str(op.operands[i]): op.results[j].name for i, j in replaced.items()}
        loops.append(LayerLoop(pair.length, pair.forward, pair, layers))
        loops.append(LayerLoop(pair.length, pair.backward, pair, layers, written=written))
    return tuple(loops)


def in_segments(traced: Traced, layers: int) -> Traced:
    """The step whose loops over layers run in segments; ``traced`` itself where none may."""
    return _with(traced, loops_in_segments(traced.graph, layers))


def updated_in_backward(traced: Traced) -> Traced:
    """The step whose backward loops over layers update them; ``traced`` itself where none may."""
    return _with(traced, backward_updates(traced.graph).loops)


def update_in_backward(graph: Graph) -> tuple[bool, str]:
    """Whether a step has an update that `updated_in_backward` changes, and a note on gradients that wait for it."""
    updates = backward_updates(graph)
    return bool(updates.loops), updates.note(graph)


def updated_by_layer(traced: Traced) -> Traced:
    """The step whose update of stacked layers is a loop over layers; ``traced`` itself where there is none.

    The loop is behind all else, where no gradient waits: nothing reads what it makes.
    """
    loops = loops_of_update(traced.graph)
    if not loops:
        return traced
    updated = _with(traced, loops)
    graph, before = updated.graph, traced.graph
    last = {
        graph.producers[new.operand].id
        for new, old in zip(graph.outputs, before.outputs, strict=True)
        if old.operand in loops[-1].results and isinstance(new.operand, str)
    }
    ordered = replace(graph, operators=tuple(sorted(graph.operators, key=lambda op: op.id in last)))
    return replace(updated, program=replace(updated.program, graph=ordered))


def updates_by_layer(graph: Graph) -> bool:
    """Whether a step has an update that `updated_by_layer` changes."""
    return bool(loops_of_update(graph))


def _with(traced: Traced, loops: tuple[LayerLoop, ...]) -> Traced:
    if not loops:
        return traced
    return retraced(traced, lambda env, recorder: with_layer_loops(traced.program, loops, env, recorder))
