"""`Strategy`: one way to run an operator on a mesh; `strategies` lists all that a rule allows.

Every mesh axis of size above 1 is assigned to nothing (its devices repeat the work), to a factor of the
rule (its devices share the work), or to a linear group (its devices hold terms of a sum). This is the
enumeration of Alpa (OSDI'22, section 4.1, table 3), for any operator and any number of axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from autopar.cluster.mesh import LogicalMesh
from autopar.ir import Layout, TensorType
from autopar.sharding.factors import Dims, Factor, Rule
from autopar.sharding.halo import HaloExchange
from autopar.sharding.paths import bare
from autopar.sharding.ring import RingExchange


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """Use of one mesh axis in a strategy; at most one of ``factor`` and ``group`` is set.

    Args:
        axis: name of the mesh axis.
        factor: index of the rule's factor that it splits.
        group: index of the rule's linear group over whose partial operands the work runs.
    """

    axis: str
    factor: int | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """Layouts in which an operator can run, with no communication inside but `exchanges`.

    Args:
        assignments: what each mesh axis of size above 1 does, in mesh order.
        operand_layouts: the layout that each operand must have.
        result_layouts: the layout that each result then has.
        split: product of the sizes of the axes that split a factor: the work of a device is the whole work divided by
            it. Axes on linear groups do not count: there each device does the work of its own term.
        exchanges: edges of operands that neighbours send each other, in this order.
        rings: shards of operands that go around.
    """

    assignments: tuple[Assignment, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    split: int
    exchanges: tuple[HaloExchange, ...] = ()
    rings: tuple[RingExchange, ...] = ()


Axes: TypeAlias = tuple[tuple[str, int], ...]
Types: TypeAlias = tuple[TensorType, ...]
#: (mesh axis, kind of reduction) of each axis over which a tensor is partial.
Partial: TypeAlias = tuple[tuple[str, str], ...]
#: By factor the sets of mesh axes, in mesh order, that together divide it.
Divided: TypeAlias = tuple[frozenset[tuple[str, ...]], ...]
_Unsized: TypeAlias = tuple[tuple[Assignment, ...], tuple[Layout, ...], tuple[Layout, ...], tuple[str, ...]]


def strategies(
    rule: Rule, operand_types: Types, result_types: Types, mesh: LogicalMesh, *, halos: bool = False
) -> tuple[Strategy, ...]:
    """Every strategy that ``rule`` allows on ``mesh``, the replicated one first, always in the same order.

    Args:
        rule: what may be split.
        operand_types: types of the operands (global shapes).
        result_types: types of the results (global shapes).
        mesh: only names and sizes of its axes are used.
        halos: whether dims may be split whose shards need edges of their neighbours, or go around.

    A strategy is left out where the shards of some dim would be uneven, or where a tensor would be partial in two kinds
    of reduction at once. Answers are cached: operators of one signature share them.
    """
    axes = tuple((name, n) for name, n in mesh.axes if n > 1)
    return _strategies(rule, operand_types, result_types, axes, halos)


def strategy_of(
    rule: Rule,
    operand_types: Types,
    result_types: Types,
    mesh: LogicalMesh,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    free: frozenset[int] = frozenset(),
) -> tuple[Assignment, ...] | None:
    """Use of each mesh axis in the strategy with these layouts; None where ``rule`` allows none.

    Args:
        rule: what may be split, halos included.
        operand_types: types of the operands (global shapes).
        result_types: types of the results (global shapes).
        mesh: only names and sizes of its axes are used.
        operands: layout of each operand.
        results: layout of each result.
        free: numbers of operands whose layout does not matter.
    """
    layouts = [bare(k, mesh) for k in (*operands, *results)]
    compared = [n for n in range(len(layouts)) if n not in free]
    sizes = {name: n for name, n in mesh.axes if n > 1}
    limits, build = _limits(rule, operand_types, result_types), _StrategyBuilder(rule)
    options = [Assignment("")]
    options += [Assignment("", factor=n) for n in range(len(rule.factors))]
    options += [Assignment("", group=n) for n in range(len(rule.linear))]
    assigned: list[Assignment] = []
    for axis in sizes:
        assignment = None
        for option in options:
            alone = build.strategy((replace(option, axis=axis),))
            if alone is not None and all(_same_part(axis, (*alone[1], *alone[2])[n], layouts[n]) for n in compared):
                assignment = alone[0][0]
                break
        if assignment is None:
            return None
        assigned.append(assignment)
    for n, factor in enumerate(rule.factors):
        shards = math.prod(sizes[a.axis] for a in assigned if a.factor == n)
        if shards > 1 and not (limits[n] > 0 and limits[n] % shards == 0 and _reaches(factor, shards, halos=True)):
            return None
    whole = build.strategy(tuple(assigned))
    if whole is None or any((*whole[1], *whole[2])[n] != layouts[n] for n in compared):
        return None
    return whole[0]


def _same_part(axis: str, one: Layout, other: Layout) -> bool:
    """Whether an axis splits the same dims in two layouts, or both are partial over it."""
    split = [[axis in dim for dim in layout.dims] for layout in (one, other)]
    partial = [layout.reduce if axis in layout.partial else "" for layout in (one, other)]
    return split[0] == split[1] and partial[0] == partial[1]


@lru_cache(maxsize=4096)
def _strategies(rule: Rule, operand_types: Types, result_types: Types, axes: Axes, halos: bool) -> tuple[Strategy, ...]:
    sizes = dict(axes)
    limits = _limits(rule, operand_types, result_types)
    names = tuple(sizes)
    sets = [some for k in range(1, len(names) + 1) for some in itertools.combinations(names, k)]
    products = [math.prod(sizes[axis] for axis in some) for some in sets]
    # Which strategies there are depends on sizes only by which sets of axes divide what: meshes share them.
    divided = tuple(
        frozenset(
            some
            for some, n in zip(sets, products, strict=True)
            if limit > 0 and limit % n == 0 and _reaches(factor, n, halos)
        )
        for factor, limit in zip(rule.factors, limits, strict=True)
    )
    bare = replace(rule, factors=tuple(replace(f, size=1, halo=None, travels=()) for f in rule.factors))
    return tuple(
        Strategy(
            assigned,
            operands,
            results,
            math.prod(sizes[axis] for axis in split),
            _exchanges(rule, assigned, sizes),
            _rings(rule, assigned, sizes),
        )
        for assigned, operands, results, split in _unsized(bare, divided, names)
    )


@lru_cache(maxsize=4096)
def _unsized(rule: Rule, divided: Divided, names: tuple[str, ...]) -> tuple[_Unsized, ...]:
    """Strategies of meshes whose axes have such names and divide factors so; sizes of ``rule`` do not matter."""
    build = _StrategyBuilder(rule)
    built = (
        build.strategy(assigned) for assigned in _assignments(divided, len(rule.linear), names, ((),) * len(divided))
    )
    return tuple(s for s in built if s is not None)


def _reaches(factor: Factor, shards: int, halos: bool) -> bool:
    """Whether ``shards`` of a factor find what they need with their neighbours, if it is a loop over windows."""
    if factor.travels:
        return halos
    return factor.halo is None or (halos and factor.halo.reach(shards) is not None)


def _exchanges(rule: Rule, assigned: tuple[Assignment, ...], sizes: Mapping[str, int]) -> tuple[HaloExchange, ...]:
    """The edges that shards need in an assignment, by operand and dim."""
    exchanges = []
    for number, factor in enumerate(rule.factors):
        if factor.halo is None:
            continue
        axes = tuple(a.axis for a in assigned if a.factor == number)
        if not axes:
            continue
        reach = factor.halo.reach(math.prod(sizes[axis] for axis in axes))
        if reach is not None and reach.sends:
            dim = rule.operands[factor.halo_operand].index(number)
            halo, sides = factor.halo, (reach.left, reach.right)
            exchanges.append(HaloExchange(factor.halo_operand, dim, axes, *sides, halo.returns, halo.wraps))
    return tuple(sorted(exchanges))


def _rings(rule: Rule, assigned: tuple[Assignment, ...], sizes: Mapping[str, int]) -> tuple[RingExchange, ...]:
    """The shards that go around in an assignment."""
    rings = []
    for number, factor in enumerate(rule.factors):
        if factor.travels:
            axes = tuple(a.axis for a in assigned if a.factor == number)
            rings += [RingExchange.of(t, axes, sizes) for t in factor.travels if axes]
    return tuple(rings)


def _limits(rule: Rule, operand_types: Types, result_types: Types) -> tuple[int, ...]:
    """Greatest common divisor of each factor's size and of all dims that it labels: the number of shards must divide
    it.
    """
    limits = [f.size for f in rule.factors]
    tensors = (*zip(rule.operands, operand_types, strict=True), *zip(rule.results, result_types, strict=True))
    for dims, type in tensors:
        for factor, n in zip(dims, type.shape, strict=True):
            if factor is not None:
                limits[factor] = math.gcd(limits[factor], n)
    return tuple(limits)


def _assignments(
    divided: Divided, groups: int, names: tuple[str, ...], taken: tuple[tuple[str, ...], ...]
) -> Iterator[tuple[Assignment, ...]]:
    """All assignments of the axes called ``names`` whose shards are even; ``taken`` are those of each factor so far."""
    if not names:
        yield ()
        return
    axis, rest = names[0], names[1:]
    for tail in _assignments(divided, groups, rest, taken):
        yield (Assignment(axis), *tail)
    for factor, sets in enumerate(divided):
        more = (*taken[factor], axis)
        if more in sets:
            for tail in _assignments(divided, groups, rest, (*taken[:factor], more, *taken[factor + 1 :])):
                yield (Assignment(axis, factor=factor), *tail)
    for group in range(groups):
        for tail in _assignments(divided, groups, rest, taken):
            yield (Assignment(axis, group=group), *tail)


class _StrategyBuilder:
    """Makes the strategies of one rule; they share equal layouts, since an operator may have many of both."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.layouts: dict[tuple[tuple[tuple[str, ...], ...], Partial], Layout | None] = {}

    def strategy(self, assigned: tuple[Assignment, ...]) -> _Unsized | None:
        """The strategy of an assignment, or None where kinds of reduction conflict."""
        by_factor: dict[int, tuple[str, ...]] = {}
        operands: list[Partial] = [()] * len(self.rule.operands)
        result: Partial = ()
        for a in assigned:
            if a.factor is not None:
                by_factor[a.factor] = (*by_factor.get(a.factor, ()), a.axis)
                factor = self.rule.factors[a.factor]
                kind, partial = factor.reduce, factor.partial_operands
            elif a.group is not None:
                kind, partial = "sum", self.rule.linear[a.group]
            else:
                continue
            for i in partial:
                operands[i] = (*operands[i], (a.axis, kind or "sum"))
            if kind is not None:
                result = (*result, (a.axis, kind))
        before = [self.layout(d, by_factor, p) for d, p in zip(self.rule.operands, operands, strict=True)]
        after = [self.layout(d, by_factor, result) for d in self.rule.results]
        if any(layout is None for layout in (*before, *after)):
            return None
        operands_in = tuple(layout for layout in before if layout is not None)
        results_in = tuple(layout for layout in after if layout is not None)
        return assigned, operands_in, results_in, tuple(axis for axes in by_factor.values() for axis in axes)

    def layout(self, dims: Dims, by_factor: dict[int, tuple[str, ...]], partial: Partial) -> Layout | None:
        """The layout of a tensor with labels ``dims``; None where it is partial in two kinds of reduction."""
        axes = tuple(() if d is None else by_factor.get(d, ()) for d in dims)
        key = (axes, partial)
        if key not in self.layouts:
            kinds = sorted({kind for _, kind in partial})
            names = tuple(axis for axis, _ in partial)
            self.layouts[key] = None if len(kinds) > 1 else Layout(axes, names, kinds[0] if kinds else "sum")
        return self.layouts[key]
