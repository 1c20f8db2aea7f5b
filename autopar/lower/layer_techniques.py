"""Techniques of loops over layers: segments, updates in the backward loop, updates a layer at a time.

`in_segments`, `updated_in_backward` and `updated_by_layer` are called for a step. `backward_updates` and
`loops_of_update` find the updates of stacked layers that may run a layer at a time. Each technique is a `LayerLoop` or
some; `autopar.lower.layer_loop` runs them. Models that scan over layers keep the parameters of all layers in one
array, and so do the moments of an optimizer. Forward and backward pass take slices of such stacks, the update takes
them whole. Updated a layer at a time no pass needs a stack whole on a device, and it may lie in host memory (L2L,
Pudipeddi et al., 2020).

What treats the layers of stacks independently, which the rules of its operators say, runs in trips over layers; what
adds up over layers, as norms of all gradients, in a loop before it. A parameter of which the loop over layers makes a
stack of gradients may be updated in that loop, if its update needs of the backward pass nothing but the slice of the
trip. So no stack of gradients is kept (LOMO, Lv et al., 2023). A sum over all gradients is there only after the loop:
what depends on it stays after the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.frontend import Traced
from autopar.ir import Graph, Layout, Literal, Operator
from autopar.ir.analysis import dependents, names_made, names_read
from autopar.ir.independent import separate_parts
from autopar.ir.layer_loops import pairs_in_segments, replaced_in_place
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_generator
from autopar.lower.layer_loop import LayerLoop, taken_in_slices, with_layer_loops
from autopar.lower.retrace import retraced
from autopar.lower.split_layers import layer_count
from autopar.microbatch import pseudo_mesh
from autopar.microbatch.base import split
from autopar.microbatch.inside import zeros_of
from autopar.microbatch.match import Match, local_match, match
from autopar.plan.text import bytes_text

_STATE = ("parameter", "optimizer")


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

    The loop is after all else, where no gradient waits: nothing reads what it makes.
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


def loops_of_update(graph: Graph, phases: Sequence[str] = ("update",)) -> tuple[LayerLoop, ...]:
    """Loops that run the update of a step layer by layer: one that adds up, where something does, and one that updates.

    None where nothing can be updated so.

    Args:
        graph: a step.
        phases: of operators that may: those of the backward pass add up and cast stacks of gradients.
    """
    length = layer_count(graph)
    matches, sums = _independent(graph, length, phases) if length > 1 else ({}, {})
    terms = _terms(graph, matches, sums)
    stacks = {i.name for i in graph.inputs if i.role in _STATE and i.type.rank and i.type.shape[0] == length}
    needed = {o.operand for o in graph.outputs if o.updates in stacks}
    for op in reversed(graph.operators):
        if op.id in matches and needed.intersection(v.name for v in op.results):
            needed.update(op.reads)
        else:
            matches.pop(op.id, None)
    returned = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    outside = set[str]()
    for op in reversed(graph.operators):  # what is needed outside is computed there, and all that this needs
        names = {v.name for v in op.results}
        if op.id in terms and (op.id in sums or not names & (outside if op.id in matches else outside | returned)):
            continue
        if op.id in matches and not names & outside:
            continue
        matches.pop(op.id, None)
        outside.update(op.reads)
    inside = (v.name for op in graph.operators if op.id in matches for v in op.results)
    results = tuple(name for name in inside if name in returned)
    totals = tuple(v.name for op in graph.operators if op.id in terms and op.id in sums for v in op.results)
    first = (LayerLoop(length, updates=terms, totals=totals),) if totals else ()
    return (*first, LayerLoop(length, updates=matches, results=results)) if results else ()


@dataclass(frozen=True)
class BackwardUpdates:
    """Updates of a step that run inside of its backward loops.

    Args:
        loops: with updates, in running order; empty where nothing runs there.
        kept: stacks of gradients whose update has to wait for the end of the loop, and an operator that it waits
            for; "" and None where there are none.
    """

    loops: tuple[LayerLoop, ...] = ()
    kept: tuple[str, ...] = ()
    reader: Operator | None = None

    def note(self, graph: Graph) -> str:
        """Note on stacks of gradients that are kept for the update, with the reason; "" where none is."""
        if not self.kept:
            return ""
        bytes = sum(graph.types[name].nbytes for name in self.kept)
        place = "" if self.reader is None else self.reader.source or self.reader.id
        why = f"another operator needs them whole ({place})" if place else "the step returns them"
        return f"{bytes_text(bytes)} of gradients of stacks are kept until their backward loop has ended: {why}"


def backward_updates(graph: Graph) -> BackwardUpdates:
    """Finds the part of a step's update that may run inside of its backward loops over layers.

    Args:
        graph: a step in one microbatch.
    """
    alone = loops_of_update(graph, ("backward", "update"))
    gradients = _gradients(graph, alone[-1].length) if alone else {}
    if not gradients:
        return BackwardUpdates()
    inside = alone[-1].moved(graph)
    parts = separate_parts(inside, taken_in_slices(inside, alone[-1].updates))
    members = {op.id for part in parts for op in part}
    search = _Search(graph, alone[-1], gradients, tuple(op for op in inside if op.id not in members))
    by_loop: dict[str, list[tuple[Operator, ...]]] = {}
    kept = dict[str, Operator | None]()
    for part in parts:
        read = [name for name in names_read(part) if name in gradients]
        if not read:
            continue
        loop, obstacle = search.loop_of(part)
        if loop is None:
            kept.update((name, obstacle) for name in read)
        else:
            by_loop.setdefault(loop.id, []).append(part)
    order = [name for name in gradients if name in kept]
    loops = tuple(search.update(op.id, by_loop[op.id]) for op in graph.operators if op.id in by_loop)
    return BackwardUpdates(loops, tuple(order), next((kept[n] for n in order if kept[n]), None))


def _gradients(graph: Graph, length: int) -> dict[str, Operator]:
    """Stacks that backward loops over layers make, with the loop of each, in running order."""
    return {
        v.name: op
        for op in graph.operators
        if op.primitive == "scan" and phase_of(op) == "backward" and Scan.of(op).length == length
        for v in op.results[Scan.of(op).num_carry :]
    }


@dataclass(frozen=True)
class _Search:
    """Facts asked about each part of an update.

    Args:
        graph: the step.
        alone: the loop that would update layers after all else.
        gradients: see `_gradients`.
        common: operators of ``alone`` that no parameter decides: each loop makes their slices for itself.
    """

    graph: Graph
    alone: LayerLoop
    gradients: Mapping[str, Operator]
    common: tuple[Operator, ...]

    def loop_of(self, part: Sequence[Operator]) -> tuple[Operator | None, Operator | None]:
        """The loop in which a part may run; else None, and an operator that it would have to wait for or break."""
        graph, ids = self.graph, {op.id for op in part}
        order = {op.id: n for n, op in enumerate(graph.operators)}
        here = [*self._common_of(part), *part]
        external = names_read(here) - set(names_made(here))
        loop = max((self.gradients[n] for n in external if n in self.gradients), key=lambda op: order[op.id])
        slices = {v.name for v in loop.results[Scan.of(loop).num_carry :]}
        late = set(names_made([loop, *dependents(graph.operators, [v.name for v in loop.results])]))
        missing = (external & late) - slices
        if missing:
            return None, next(op for op in graph.operators if missing.intersection(v.name for v in op.results))
        replaced = {o.updates for o in graph.outputs if o.operand in names_made(part)}
        returned = {o.operand for o in graph.outputs}
        for op in graph.operators:
            read = set(op.reads)
            if op.id in ids or op.id == loop.id:
                continue
            if read & external & slices or (read & replaced and order[op.id] > order[loop.id]):
                return None, op
        return (None, None) if returned & ((external & slices) | replaced) else (loop, None)

    def _common_of(self, part: Sequence[Operator]) -> list[Operator]:
        """Operators of no part that a part reads, in running order."""
        needed = names_read(part)
        common = []
        for op in reversed(self.common):
            if needed.intersection(v.name for v in op.results):
                common.append(op)
                needed.update(op.reads)
        return common[::-1]

    def update(self, loop: str, parts: Sequence[Sequence[Operator]]) -> LayerLoop:
        """The loop of the step, which takes ``parts``."""
        ids = {op.id for part in parts for op in (*self._common_of(part), *part)}
        results = set(names_made(op for part in parts for op in part))
        updates = {id: m for id, m in self.alone.updates.items() if id in ids}
        stacks = tuple(name for name in self.alone.results if name in results)
        return LayerLoop(self.alone.length, loop, updates=updates, results=stacks)


def _terms(graph: Graph, matches: Mapping[str, Match], sums: Mapping[str, Match]) -> dict[str, Match]:
    """Operators that a first loop over layers runs: ``sums`` that depend on none of them, and what they are made of."""
    late, first = set[str](), list[str]()
    for op in graph.operators:
        follows = bool(late.intersection(op.reads))
        if follows or op.id in sums:
            late.update(v.name for v in op.results)
        if op.id in sums and not follows:
            first.append(op.id)
    needed, terms = set[str](), dict[str, Match]()
    for op in reversed(graph.operators):
        if op.id in first or (op.id in matches and needed.intersection(v.name for v in op.results)):
            terms[op.id] = sums[op.id] if op.id in sums else matches[op.id]
            needed.update(op.reads)
    return dict(reversed(terms.items()))


def _independent(graph: Graph, length: int, phases: Sequence[str]) -> tuple[dict[str, Match], dict[str, Match]]:
    """Operators of ``phases``, with what they run on, that treat the layers of stacks independently; sums over them."""
    mesh, matches, sums = pseudo_mesh(length), dict[str, Match](), dict[str, Match]()
    split_values = {
        i.name: split(i.type.rank, 0)
        for i in graph.inputs
        if i.role in _STATE and i.type.rank and i.type.shape[0] == length
    }
    for op in graph.operators:
        if op.primitive == "scan":
            scan = Scan.of(op)
            stacks = scan.split_results(op.results)[1] if scan.length == length else []
            split_values.update((v.name, split(v.type.rank, 0)) for v in stacks)
        elif phase_of(op) in phases and not op.regions and not op.effects and not is_generator(op):
            types = graph.operand_types(op)
            states = [None if isinstance(o, Literal) else split_values.get(o) for o in op.operands]
            if not any(states):
                continue
            known = [
                None if isinstance(o, Literal) else k or Layout.replicated(t.rank)
                for o, k, t in zip(op.operands, states, types, strict=True)
            ]
            matched = match(op, types, known, zeros_of(graph, op), mesh)
            if matched is not None and all(k.partial and k.reduce == "sum" for k in matched.results):
                sums[op.id] = matched
            elif matched is not None and all(k == split(len(k.dims), 0) for k in matched.results):
                matches[op.id] = matched
                split_values.update((v.name, k) for v, k in zip(op.results, matched.results, strict=True))
    _add_what_is_made_of_scalars(graph, matches, length)
    order = {op.id: n for n, op in enumerate(graph.operators)}
    return dict(sorted(matches.items(), key=lambda item: order[item[0]])), sums


def _add_what_is_made_of_scalars(graph: Graph, matches: dict[str, Match], length: int) -> None:
    """Adds broadcasts of scalars to stacks that only operators among ``matches`` read: each trip makes its slice."""
    mesh, returned = pseudo_mesh(length), {o.operand for o in graph.outputs}
    readers: dict[str, list[tuple[Operator, int]]] = {}
    for op in graph.operators:
        for n, o in enumerate(op.operands):
            if isinstance(o, str):
                readers.setdefault(o, []).append((op, n))
    for op in graph.operators:
        types = graph.operand_types(op)
        if op.id in matches or len(op.results) != 1 or any(t.rank for t in types) or op.regions:
            continue
        (result,) = op.results
        layout = split(result.type.rank, 0) if result.type.rank and result.type.shape[0] == length else None
        taken = readers.get(result.name, [])
        if layout is None or result.name in returned or not taken:
            continue
        if all(r.id in matches and matches[r.id].operands[n] == layout for r, n in taken):
            matched = local_match(op, types, layout, mesh)
            if matched is not None:
                matches[op.id] = matched
