"""Finds pairs of loops over layers that may run in segments, and lengths of segments worth a try.

A forward loop over l layers leaves a stack of what its backward loop reads. In segments of k layers it leaves what
enters each segment, and the backward pass runs a segment again for what its layers leave (Chen et al., 2016):

    bytes = l / k * what enters a layer + k * what a layer leaves

which is least for k near the root of l times the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Operator
from autopar.ir.analysis import names_made
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of

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
        entering_bytes: of what enters a layer.
        left_bytes: of a layer's slices of ``stacks``.
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
    """Pairs of loops of a step of which the first leaves stacks for the second alone; each loop is in one pair.

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
            if reader is not None and not more and name not in returned and _takes_slices(op, reader, name):
                by_reader.setdefault(reader.id, []).append(name)
        ranked = [_pair(graph, op, reader, names) for reader, names in by_reader.items()]
        pairs += sorted(ranked, key=lambda p: -p.left_bytes)[:1]
    taken = set[str]()
    apart = []
    for p in pairs:
        if taken.isdisjoint((p.forward, p.backward)):
            taken.update((p.forward, p.backward))
            apart.append(p)
    return tuple(apart)


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


def _takes_slices(op: Operator, reader: Operator, name: str) -> bool:
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
