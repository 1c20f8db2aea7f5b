"""Strategies of one operator as the planner uses them, with work and traffic, cached by signature."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster import LogicalMesh
from autopar.cost import operator_bytes, operator_flops
from autopar.ir import Layout, Operator, TensorType
from autopar.ir.primitives import CONTRACTIONS
from autopar.sharding import Strategy, rule_for, strategies

# Where partial operands would only repeat the most expensive work on every device.
_NEVER_PARTIAL = CONTRACTIONS | {"gather"}


@dataclass(frozen=True, eq=False)
class Signature:
    """All of an operator that its strategies depend on. Its hash is computed once: statements on all meshes ask by it.

    Args:
        parts: primitive, attributes, types of operands and results, `zeros`, `on_demand`, whether it has effects.
        hash: of the parts.
    """

    parts: tuple[str, object, tuple[TensorType, ...], tuple[TensorType, ...], tuple[bool, ...], tuple[bool, ...], bool]
    hash: int = field(repr=False)

    @staticmethod
    def of(
        op: Operator, operand_types: tuple[TensorType, ...], zeros: tuple[bool, ...], on_demand: tuple[bool, ...]
    ) -> Signature:
        """The signature of ``op``.

        Args:
            op: the operator.
            operand_types: types of its operands.
            zeros: for each operand whether it is known to be zero (a zero may stand for a partial sum).
            on_demand: for each operand whether it is a literal or made on demand.
        """
        types = tuple([v.type for v in op.results])
        parts = (op.primitive, op.attrs, operand_types, types, zeros, on_demand, bool(op.effects))
        return Signature(parts, hash(parts))

    @property
    def operand_types(self) -> tuple[TensorType, ...]:
        """Types of the operands."""
        return self.parts[2]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self.parts == other.parts)

    def __hash__(self) -> int:
        return self.hash


@dataclass(frozen=True, eq=False)
class OperatorOptions:
    """Strategies of one operator. One object serves all operators of a signature, so identity tells them apart.

    Args:
        strategies: never empty; the first is replicated.
        operands: by operand, its layout in each strategy.
        results: by result, its layout in each strategy.
        known: whether a rule for the primitive exists.
        flops: FLOPs of the whole operator.
        bytes: bytes that it reads and writes, whole.
    """

    strategies: tuple[Strategy, ...]
    operands: tuple[tuple[Layout, ...], ...]
    results: tuple[tuple[Layout, ...], ...]
    known: bool
    flops: float
    bytes: float

    @cached_property
    def sends(self) -> bool:
        """Whether some strategy has neighbours send each other something."""
        return any(s.exchanges or s.rings for s in self.strategies)

    def only(self, strategies: tuple[Strategy, ...]) -> OperatorOptions:
        """These options, restricted (or repeated) to ``strategies``."""
        return OperatorOptions(
            strategies,
            tuple(tuple(s.operand_layouts[i] for s in strategies) for i in range(len(self.operands))),
            tuple(tuple(s.result_layouts[j] for s in strategies) for j in range(len(self.results))),
            self.known,
            self.flops,
            self.bytes,
        )


@dataclass
class OperatorTable:
    """`OperatorOptions` of operators on one mesh; operators of one signature share them.

    Args:
        mesh: the mesh.
        cache, summed, matched, partials: what was asked before.
    """

    mesh: LogicalMesh
    cache: dict[Signature, OperatorOptions] = field(default_factory=dict)
    summed: dict[int, tuple[OperatorOptions, OperatorOptions]] = field(default_factory=dict)
    matched: dict[tuple[object, ...], tuple[object, OperatorOptions | None]] = field(default_factory=dict)
    partials: dict[int, tuple[object, bool]] = field(default_factory=dict)

    def options(self, op: Operator, signature: Signature) -> OperatorOptions:
        """Strategies of ``op``, whose signature is ``signature``."""
        options = self.cache.get(signature)
        if options is None:
            options = self.cache[signature] = self._build(op, signature)
        return options

    def _build(self, op: Operator, signature: Signature) -> OperatorOptions:
        _, _, operand_types, types, zeros, on_demand, _ = signature.parts
        rule, known = rule_for(op, operand_types)
        every = strategies(rule, operand_types, types, self.mesh, halos=True)
        if op.effects:
            every = every[:1]

        def sensible(s: Strategy) -> bool:
            groups = any(a.group is not None for a in s.assignments)
            if groups and op.primitive in _NEVER_PARTIAL:
                return False
            partial = [bool(layout.partial) for layout in s.operand_layouts]
            if any(p and m and not z for p, m, z in zip(partial, on_demand, zeros, strict=True)):
                return False  # a number cannot stand for a term of a sum
            # A strategy that is partial only in what is made on demand gains nothing.
            return not groups or any(p and not m for p, m in zip(partial, on_demand, strict=True))

        kept = tuple(s for s in every if sensible(s)) or every[:1]
        empty: tuple[tuple[Layout, ...], ...] = ((),)
        flops, moved = operator_flops(op, operand_types), operator_bytes(op, operand_types)
        return OperatorOptions(kept, empty * len(operand_types), empty * len(types), known, flops, moved).only(kept)

    def scalar_sums(self, options: OperatorOptions) -> OperatorOptions:
        """``options`` of a sum of scalars, restricted to the one that is partial over all axes, if there is one.

        Sums of scalars (a loss and its penalties, a global norm) stay partial until they are read. Every term may
        stand for a partial sum at no cost, so one all-reduce at the end serves all of them; and without a
        choice there, terms from all over the program do not depend on each other.
        """
        cached = self.summed.get(id(options))
        if cached is None:
            kept = tuple(s for s in options.strategies if all(a.group is not None for a in s.assignments))
            cached = self.summed[id(options)] = (options, options.only(kept) if kept else options)
        return cached[1]

    def partial(self, layouts: tuple[Layout, ...]) -> bool:
        """Whether one of some layouts is a partial sum; each tuple is looked at once, and kept alive here."""
        if id(layouts) not in self.partials:
            self.partials[id(layouts)] = (layouts, any(k.partial for k in layouts))
        return self.partials[id(layouts)][1]

    def followed(
        self, options: OperatorOptions, operand: int, same_value: tuple[int, ...], layouts: tuple[Layout, ...]
    ) -> OperatorOptions | None:
        """The only strategy that takes each of ``layouts`` of an operand as it is; None if one has not exactly one.

        Args:
            options: of the operator.
            operand: the operand that is followed.
            same_value: operands that are the same value.
            layouts: of that value, by strategy of its node.
        """
        key = (id(options), operand, same_value, id(layouts))
        cached = self.matched.get(key)
        if cached is None:
            by_layout: dict[Layout, list[Strategy]] = {}
            for s in options.strategies:
                if all(s.operand_layouts[j] == s.operand_layouts[operand] for j in same_value):
                    by_layout.setdefault(s.operand_layouts[operand], []).append(s)
            matched = [by_layout.get(k, []) for k in layouts]
            one = all(len(m) == 1 for m in matched)
            # The key holds identities; what they are of is kept alive here.
            cached = self.matched[key] = (
                (options, layouts),
                options.only(tuple(m[0] for m in matched)) if one else None,
            )
        return cached[1]
