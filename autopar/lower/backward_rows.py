"""Finds parameters of stacks that may be updated inside of the backward loop that makes their gradients.

A parameter of which the loop over layers makes a stack of gradients may be updated layer by layer in that loop, if its
update needs of the backward pass nothing but the slice of the trip. So no stack of gradients is kept (LOMO, Lv et al.,
2023; L2L, Pudipeddi et al., 2020). A sum over all gradients, as a global norm for clipping, is there only after the
loop: what depends on it stays behind the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents, names_made, names_read
from autopar.ir.loops import Scan
from autopar.ir.parts import separate_parts
from autopar.ir.phases import phase_of
from autopar.lower.layer_rows import LayerRows, rows_of, taken_in_slices
from autopar.microbatch.match import Match
from autopar.plan.text import bytes_text


@dataclass(frozen=True)
class LoopUpdate:
    """Updates inside of one backward loop over layers.

    Args:
        loop: id of the loop.
        matches: by id of an operator of the update that runs in its trips, in running order, the layouts over layers.
        results: names of their results that leave the loop, stacks that replace state.
    """

    loop: str
    matches: Mapping[str, Match]
    results: tuple[str, ...]


@dataclass(frozen=True)
class BackwardRows:
    """Updates of a step that run inside of its backward loops.

    Args:
        length: number of layers.
        updates: one a loop, in running order; empty where nothing runs there.
        kept: stacks of gradients whose update has to wait for the end of the loop, and an operator that it waits
            for; "" and None where there are none.
    """

    length: int
    updates: tuple[LoopUpdate, ...] = ()
    kept: tuple[str, ...] = ()
    reader: Operator | None = None


def backward_rows(graph: Graph) -> BackwardRows:
    """Finds the part of a step's update that may run inside of its backward loops over layers.

    Args:
        graph: a step in one microbatch.
    """
    rows = rows_of(graph, ("backward", "update"))
    gradients = _gradients(graph, rows.length)
    if not rows.results or not gradients:
        return BackwardRows(rows.length)
    inside = [op for op in graph.operators if op.id in rows.matches]
    stacks = taken_in_slices(inside, rows.matches)
    parts = separate_parts(inside, stacks)
    members = {op.id for part in parts for op in part}
    common = [op for op in inside if op.id not in members]
    search = _Search(graph, rows, gradients, tuple(common))
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
    updates = tuple(search.update(op.id, by_loop[op.id]) for op in graph.operators if op.id in by_loop)
    return BackwardRows(rows.length, updates, tuple(order), next((kept[n] for n in order if kept[n]), None))


def kept_note(graph: Graph, rows: BackwardRows) -> str:
    """Note on stacks of gradients that are kept for the update, with the reason; "" where none is.

    Args:
        graph: the step.
        rows: of it.
    """
    if not rows.kept:
        return ""
    bytes = sum(graph.types[name].nbytes for name in rows.kept)
    place = "" if rows.reader is None else rows.reader.source or rows.reader.id
    why = f"another operator needs them whole ({place})" if place else "the step returns them"
    return f"{bytes_text(bytes)} of gradients of stacks are kept until their backward loop has ended: {why}"


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
        rows: operators that treat layers independently.
        gradients: see `_gradients`.
        common: those of ``rows`` that no parameter decides: each loop makes their slices for itself.
    """

    graph: Graph
    rows: LayerRows
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

    def update(self, loop: str, parts: Sequence[Sequence[Operator]]) -> LoopUpdate:
        """Updates of a loop that takes ``parts``."""
        ids = {op.id for part in parts for op in (*self._common_of(part), *part)}
        results = set(names_made(op for part in parts for op in part))
        matches = {id: m for id, m in self.rows.matches.items() if id in ids}
        return LoopUpdate(loop, matches, tuple(name for name in self.rows.results if name in results))
