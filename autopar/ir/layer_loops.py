"""Loops over stacked layers: pairs that may run in segments, stacks taken in rows, and stacks replaced in place.

A forward loop over l layers leaves a stack of what its backward loop reads. In segments of k layers it leaves what
enters each segment, and the backward pass runs a segment again for what its layers leave (Chen et al., 2016):

    bytes = l / k * what enters a layer + k * what a layer leaves

which is least for k near the root of l times the ratio of the two. A loop over segments has a loop over the layers of
one in its body. Stacks of all layers go through both whole, as constants or carries, and the inner body reads the row
of its layer: slices of slices would be copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.analysis import names_made
from autopar.ir.graph import Graph, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import SEGMENTS, phase_of

#: Numbers of layers a segment that are worth a try, at most.
_MOST = 2


@dataclass(frozen=True)
class LoopPair:
    """A forward loop and the backward loop that reads what it leaves.

    Args:
        forward: id of the first.
        backward: id of the second.
        stacks: results of the first that the second alone reads, in slices.
        length: number of layers.
        entering_bytes: bytes of a layer's input.
        left_bytes: bytes of a layer's slices of ``stacks``, the activations.
    """

    forward: str
    backward: str
    stacks: tuple[str, ...]
    length: int
    entering_bytes: int
    left_bytes: int

    def kept_bytes(self, layers: int) -> int:
        """Bytes that segments of so many layers keep at once; all layers where their number is 0."""
        if not layers:
            return self.length * self.left_bytes
        return self.length // layers * self.entering_bytes + layers * self.left_bytes


def loop_pairs(graph: Graph) -> tuple[LoopPair, ...]:
    """Pairs of a forward and a backward loop over layers: the backward one alone reads the stacks of activations.

    Each loop is in one pair.

    Args:
        graph: a step, or a part of one.
    """
    loops = [op for op in graph.operators if op.primitive == "scan" and not op.effects]
    readers: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for name in dict.fromkeys(op.reads):
            readers.setdefault(name, []).append(op)
    returned = {o.operand for o in graph.outputs}
    pairs = []
    for op in loops:
        by_reader: dict[str, list[str]] = {}
        for name in names_made([op])[Scan.of(op).num_carry :]:
            (reader, *more) = readers.get(name, ()) or (None,)
            if reader is not None and not more and name not in returned and _takes_stack(op, reader, name):
                by_reader.setdefault(reader.id, []).append(name)
        ranked = [_pair(graph, op, reader, names) for reader, names in by_reader.items()]
        pairs += sorted(ranked, key=lambda p: -p.left_bytes)[:1]
    taken = set[str]()
    disjoint = []
    for p in pairs:
        if taken.isdisjoint((p.forward, p.backward)):
            taken.update((p.forward, p.backward))
            disjoint.append(p)
    return tuple(disjoint)


def pairs_in_segments(graph: Graph, layers: int) -> tuple[LoopPair, ...]:
    """Pairs of loops of a step whose number of layers segments divide."""
    return tuple(p for p in loop_pairs(graph) if 0 < layers < p.length and p.length % layers == 0)


def segment_lengths(graph: Graph) -> tuple[int, ...]:
    """Numbers of layers a segment that are worth a try, that which keeps the fewest bytes first.

    None where there are no such loops, nor where none of these numbers divides the layers and keeps less.

    Args:
        graph: a step.
    """
    pairs = loop_pairs(graph)
    now = sum(p.kept_bytes(0) for p in pairs)
    bytes: dict[int, int] = {}
    for k in sorted({k for p in pairs for k in range(1, p.length) if p.length % k == 0}):
        bytes[k] = sum(p.kept_bytes(0 if p.length % k or k >= p.length else k) for p in pairs)
    ranked = sorted((k for k, kept in bytes.items() if kept < now), key=lambda k: (bytes[k], k))
    return tuple(ranked[:_MOST])


def _takes_stack(op: Operator, reader: Operator, name: str) -> bool:
    """Whether a backward loop takes a stack of ``op`` in slices alone, and in the other direction."""
    if reader.primitive != "scan" or reader.effects or phase_of(reader) != "backward":
        return False
    loop = Scan.of(reader)
    turned = bool(op.attr("reverse")) != bool(reader.attr("reverse"))
    return turned and loop.length == Scan.of(op).length and name not in reader.operands[: loop.num_whole]


def _pair(graph: Graph, op: Operator, reader: str, names: Sequence[str]) -> LoopPair:
    loop = Scan.of(op)
    entering = sum(i.type.nbytes for i in loop.split(loop.body.inputs)[1])
    left = sum(graph.types[n].nbytes for n in names) // loop.length
    return LoopPair(op.id, reader, tuple(names), loop.length, entering, left)


def of_segments(op: Operator) -> bool:
    """Whether an operator is what runs layers in segments: a loop, or what reads and writes rows of stacks in one."""
    return SEGMENTS in op.marks


def is_segmented(op: Operator) -> bool:
    """Whether an operator is a loop over segments of layers, or over the layers of one."""
    return op.primitive == "scan" and of_segments(op)


def sliced_inside(op: Operator) -> frozenset[int]:
    """Numbers of the constants and carries of a loop of segments that its body takes in rows alone.

    Args:
        op: an operator; of others than loops of segments there are none.
    """
    if not is_segmented(op):
        return frozenset()
    loop = Scan.of(op)
    entries = {entry.name: n for n, entry in enumerate(loop.body.inputs[: loop.num_whole]) if entry.type.rank}
    whole = {o.operand for o in loop.body.outputs if isinstance(o.operand, str)}
    rows, written = set[int](), _rows_written(loop)
    for name, n in entries.items():
        readers = [reader for reader in loop.body.operators if name in reader.reads]
        carried = n >= loop.num_consts
        if carried and n - loop.num_consts not in written:
            continue
        if readers and (carried or name not in whole) and all(_takes_rows(reader, name) for reader in readers):
            rows.add(n)
    return frozenset(rows)


def _takes_rows(reader: Operator, name: str) -> bool:
    """Whether an operator reads, or writes, rows of a stack alone."""
    numbers = {n for n, operand in enumerate(reader.operands) if operand == name}
    if reader.primitive == "gather":
        return numbers == {0} and reader.ints("collapsed_slice_dims") == (0,) and _is_row(reader)
    if reader.primitive == "dynamic_update_slice":
        return numbers == {0}
    return numbers <= sliced_inside(reader)


def _is_row(reader: Operator) -> bool:
    """Whether a read at computed positions takes one row of the first dim, whole."""
    sizes, (result,) = reader.ints("slice_sizes"), reader.results
    return sizes[0] == 1 and sizes[1:] == result.type.shape


def _rows_written(loop: Scan) -> frozenset[int]:
    """Numbers of the carries of which the body replaces rows alone, the last that it does with them."""
    return frozenset(j for j in range(loop.num_carry) if _is_written(loop.body, loop, j))


def _is_written(body: Graph, loop: Scan, carry: int) -> bool:
    entry, end = body.inputs[loop.num_consts + carry].name, body.outputs[carry].operand
    order = {op.id: n for n, op in enumerate(body.operators)}
    while end != entry:
        maker = body.producers.get(end) if isinstance(end, str) else None
        if maker is None:
            return False
        if maker.primitive == "dynamic_update_slice":
            before = maker.operands[0]
        elif is_segmented(maker):
            inner, result = Scan.of(maker), [v.name for v in maker.results].index(str(end))
            if result not in _rows_written(inner):
                return False
            before = maker.operands[inner.num_consts + result]
        else:
            return False
        last = max((order[op.id] for op in body.operators if before in op.reads), default=-1)
        if last > order[maker.id] or any(o.operand == before for o in body.outputs):
            return False
        end = before
    return True


def replaced_in_place(graph: Graph, op: Operator) -> Mapping[int, int]:
    """Stacks of state that a backward loop replaces and reads last: by number of the operand that of the result.

    Each is an input of the step that the loop takes once, in slices, or carries and takes in rows, and that nothing
    reads after it. The loop makes the stack that replaces it, which nothing else in the step reads.

    Args:
        graph: the step.
        op: an operator of it.
    """
    if op.primitive != "scan" or phase_of(op) != "backward":
        return {}
    loop = Scan.of(op)
    carried = {n - loop.num_consts for n in sliced_inside(op) if n >= loop.num_consts}
    stacks = {v.name: n for n, v in enumerate(op.results) if n >= loop.num_carry or n in carried}
    replaced = {o.updates: stacks[o.operand] for o in graph.outputs if o.operand in stacks and o.updates is not None}
    if not replaced:
        return {}
    returned = [o.operand for o in graph.outputs]
    later = {o for other in graph.operators[graph.operators.index(op) + 1 :] for o in other.reads}
    return {
        n: replaced[operand]
        for n, operand in enumerate(op.operands)
        if isinstance(operand, str)
        and operand in replaced
        and (n >= loop.num_whole if replaced[operand] >= loop.num_carry else n == loop.num_consts + replaced[operand])
        and op.operands.count(operand) == 1
        and operand not in later
        and operand not in returned
        and op.results[replaced[operand]].name not in later
        and returned.count(op.results[replaced[operand]].name) == 1
        and op.results[replaced[operand]].type == graph.types[operand]
    }
