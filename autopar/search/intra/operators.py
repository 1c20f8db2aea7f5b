"""Strategies of one operator as the planner uses them, with work and traffic, cached by signature."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import LogicalMesh
from autopar.cost import operator_bytes, operator_flops
from autopar.ir import Operator, TensorType
from autopar.sharding import Strategy, rule_for, strategies

# Where partial operands would only repeat the dearest work on every device.
_NEVER_PARTIAL = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "gather"})

@dataclass(frozen=True)
class Options:
    """What one operator may do.

    Args:
        strategies: never empty; the first is replicated.
        known: whether a rule for the primitive exists.
        flops: FLOPs of the whole operator.
        bytes: bytes that it reads and writes, whole.
    """

    strategies: tuple[Strategy, ...]
    known: bool
    flops: float
    bytes: float


@dataclass
class OperatorTable:
    """`Options` of operators on one mesh; operators of one signature share them."""

    mesh: LogicalMesh
    cache: dict[tuple[object, ...], Options] = field(default_factory=dict)

    def options(
        self, op: Operator, operand_types: tuple[TensorType, ...], zeros: tuple[bool, ...], made: tuple[bool, ...]
    ) -> Options:
        """What ``op`` may do.

        Args:
            op: the operator.
            operand_types: types of its operands.
            zeros: for each operand whether it is known to be zero (a zero may stand for a partial sum).
            made: for each operand whether it is a literal or made on demand.
        """
        types = tuple(v.type for v in op.results)
        key = (op.primitive, op.attrs, operand_types, types, zeros, made, bool(op.effects))
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = self._build(op, operand_types, types, zeros, made)
        return found

    def _build(
        self,
        op: Operator,
        operand_types: tuple[TensorType, ...],
        types: tuple[TensorType, ...],
        zeros: tuple[bool, ...],
        made: tuple[bool, ...],
    ) -> Options:
        rule, known = rule_for(op, operand_types)
        every = strategies(rule, operand_types, types, self.mesh)
        if op.effects:
            every = every[:1]

        def sensible(s: Strategy) -> bool:
            if op.primitive in _NEVER_PARTIAL and any(a.group is not None for a in s.assignments):
                return False
            partial = [bool(layout.partial) for layout in s.operand_layouts]
            if any(p and m and not z for p, m, z in zip(partial, made, zeros, strict=True)):
                return False  # a number cannot stand for a term of a sum
            # A strategy that is partial only in what is made on demand gains nothing.
            return all(any(p and not m for p, m in zip(partial, made, strict=True)) or a.group is None
                       for a in s.assignments)

        kept = tuple(s for s in every if sensible(s)) or every[:1]
        return Options(kept, known, operator_flops(op, operand_types), operator_bytes(op, operand_types))
