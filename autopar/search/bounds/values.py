"""Facts about the values of one graph, whatever is fused, recomputed and cut into stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import is_fusible, is_generator
from autopar.search.intra.fusion import CONSTANT_BYTES

#: How far back a kernel's operands are followed through elementwise operators.
_MOST_DEPTH = 64


class Values:
    """Facts about the values of one graph, whatever is fused.

    A kernel reads what it is computed from as far back as that lies in memory. Which values do is not known: they are a
    cut between the kernel and what lies in memory in any case, so their bytes are at least what flows between the two
    where each value lets through its bytes (the weak direction of max-flow min-cut). What is for one elementwise
    operator alone lets through any number: where it is in memory another kernel has read for it.

    Args:
        inputs: types of the inputs that lie in memory.
        single: values that one elementwise operator alone reads.
    """

    def __init__(self, inputs: Mapping[str, TensorType], single: Collection[str] = ()) -> None:
        self.single = single
        self.solid = {n for n, type in inputs.items() if type.nbytes > CONSTANT_BYTES}
        self.in_memory = set(inputs)
        self.types = dict(inputs)
        self.makers: dict[str, Operator] = {}
        self.written: dict[str, str] = {}

    def depends(self, op: Operator) -> bool:
        """Whether more than constants decides the results of an operator."""
        return not self.solid.isdisjoint(op.reads)

    def note(self, op: Operator, *, spared: bool, written_in: str = "") -> None:
        """Notes the results of an operator.

        Args:
            op: the operator.
            spared: whether its results may never be stored, nor made.
            written_in: of an elementwise one the phase whose operators read them from memory in any plan, or "".
        """
        if spared or is_generator(op):
            return
        if self.depends(op) or not is_fusible(op):
            self.solid |= {v.name for v in op.results if v.type.nbytes > CONSTANT_BYTES}
        for v in op.results:
            self.types[v.name] = v.type
            if not is_fusible(op):
                self.in_memory.add(v.name)
                continue
            self.makers[v.name] = op
            if written_in:
                self.written[v.name] = written_in

    def in_memory_for(self, name: str, phase: str) -> bool:
        """Whether a value, or what is for it alone, lies in memory for operators of a phase."""
        return name in self.in_memory or self.written.get(name) == phase

    def read_bytes(self, op: Operator, types: Sequence[TensorType], phase: str) -> float:
        """Bytes that a kernel reads at least that ends in an operator.

        Args:
            op: the operator.
            types: of its operands. Of what is sliced no more is read than is taken.
            phase: of the operator.
        """
        most = max((t.size for t in (*types, *(v.type for v in op.results))), default=0)
        enough = sum(self._passes(o, most) for o in dict.fromkeys(op.reads))
        flow = 0.0
        for backwards in (False, True):  # one order finds a way that the other has closed
            if flow < enough:
                flow = max(flow, self._flow(op, most, phase, -1 if backwards else 1))
        return flow

    def _passes(self, name: str, most: int) -> float:
        """Bytes that a value lets through."""
        type = self.types.get(name)
        if type is None or name in self.single:
            return 0.0 if type is None else math.inf
        return min(type.size, most) * type.nbytes / max(1, type.size)

    def _flow(self, op: Operator, most: int, phase: str, order: int) -> float:
        """Bytes that flow to an operator, its operands and theirs taken in one order, or (-1) the other."""
        left: dict[str, float] = {}

        def flow(name: str, wanted: float, depth: int) -> float:
            if name not in left:
                left[name] = self._passes(name, most)
            wanted = min(wanted, left[name])
            there = self.in_memory_for(name, phase)
            sent, maker = wanted if there else 0.0, self.makers.get(name)
            if maker is not None and not there and depth < _MOST_DEPTH:
                for o in tuple(dict.fromkeys(maker.reads))[::order]:
                    if sent < wanted:
                        sent += flow(o, wanted - sent, depth + 1)
            left[name] = left[name] - sent if sent else 0.0
            return sent

        return sum(flow(o, math.inf, 0) for o in tuple(dict.fromkeys(op.reads))[::order])


class StateReads:
    """Inputs of a step that elementwise operators make others of the same size of; each is read once at least.

    Args:
        inputs: types by name; none of bodies.
    """

    def __init__(self, inputs: dict[str, TensorType]) -> None:
        self.inputs = inputs
        self.reached: dict[str, frozenset[str]] = {
            name: frozenset({name}) for name, type in inputs.items() if type.nbytes > CONSTANT_BYTES
        }
        self.counted: set[str] = set()

    def note(self, op: Operator, types: Sequence[TensorType]) -> None:
        """Notes which inputs the results of an operator are computed from, element by element."""
        if not is_fusible(op):
            return
        size = max((v.type.size for v in op.results), default=0)
        from_: set[str] = set()
        for o, t in zip(op.operands, types, strict=True):
            if isinstance(o, str) and t.size == size:
                from_ |= self.reached.get(o, frozenset())
        for v in op.results:
            if v.type.size == size and from_:
                self.reached[v.name] = frozenset(from_)

    def bytes_for(self, op: Operator) -> float:
        """Bytes of the inputs that a returned operator needs and no other has counted."""
        needed = {n for v in op.results for n in self.reached.get(v.name, frozenset())} - self.counted
        self.counted |= needed
        return float(sum(self.inputs[n].nbytes for n in needed))
