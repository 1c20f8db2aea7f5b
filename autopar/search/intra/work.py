"""The work of one operator in its place: what its neighbours spare it, and what its operands' order adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost import Work, kind_of, reorders, run_bytes
from autopar.ir import Graph, Literal, Operator, TensorType
from autopar.ir.primitives import TRANSCENDENTAL, is_fusible
from autopar.search.intra.draft import ValueDraft
from autopar.search.intra.operators import Options


class Chains:
    """What a fusion reads that computes a value of one graph: XLA's for CPUs pulls in all cheap operators before it.

    Args:
        graph: operators and who reads what.
    """

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.producers
        self.types = graph.types
        self.shared: set[str] = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
        taken: set[str] = set()
        for op in graph.operators:
            names = set(op.reads)
            self.shared |= names & taken
            taken |= names

    def read_bytes(self, name: str) -> float:
        """Bytes of what lies in memory that a value is computed from, no more of each than the value has itself."""
        most = self.types[name].nbytes
        seen, left, total = {name}, [name], 0.0
        while left:
            at = left.pop()
            op = self.makers.get(at)
            stored = op is None or not is_fusible(op) or (op.primitive in TRANSCENDENTAL and at in self.shared)
            if op is None or stored:
                total += min(most, self.types[at].nbytes)
                continue
            fresh = set(op.reads) - seen
            seen |= fresh
            left.extend(fresh)
        return total


def moved_bytes(
    op: Operator,
    operand_types: Sequence[TensorType],
    sources: Sequence[ValueDraft | None],
    options: Options,
    fusable: bool,
) -> float:
    """Bytes that an operator reads and writes; an elementwise one is one kernel with those that fuse with it.

    Args:
        op: the operator.
        operand_types: types of its operands.
        sources: its operands; None for literals.
        options: of the operator.
        fusable: whether its results are never stored.
    """
    if not is_fusible(op):
        return options.bytes
    read = (
        t.nbytes
        for t, s in zip(operand_types, sources, strict=True)
        if s is not None and s.node is not None and not s.fused
    )
    return float(sum(read) + (0 if fusable else sum(v.type.nbytes for v in op.results)))


def work_of(
    op: Operator,
    operand_types: Sequence[TensorType],
    options: Options,
    moved: float,
    chains: Chains | None,
    functions: frozenset[str],
) -> Work:
    """The work of one run of an operator.

    Args:
        op: the operator.
        operand_types: types of its operands.
        options: of the operator.
        moved: from `moved_bytes`.
        chains: of the operator's graph; None where the order of operands takes no time.
        functions: primitives whose elements some device counts.
    """
    types = [*operand_types, *(v.type for v in op.results)]
    dtype, run = types[0].dtype if types else "f32", run_bytes(op, operand_types)
    work = Work(options.flops, moved, dtype, kind_of(op, operand_types), run_bytes=run)
    if op.primitive in functions:
        return replace(work, function=op.primitive, elements=sum(v.type.size for v in op.results))
    again = reorders(op, operand_types) if chains is not None else ()
    if chains is None or not again:
        return work
    read = [_read_bytes(op.operands[r.operand], chains) for r in again]
    return replace(work, reordered=tuple((b, r.stride_bytes) for b, r in zip(read, again, strict=True)))


def _read_bytes(operand: str | Literal, chains: Chains) -> float:
    return 0.0 if isinstance(operand, Literal) else chains.read_bytes(operand)
