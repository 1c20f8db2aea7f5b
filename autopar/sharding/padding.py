"""Dims that the devices do not divide, and the sizes to which they may be padded.

Dims that operators must split together (the loops of their rules) form a class: a vocabulary in its table, in logits
and in moments; heads, and the width that they are a part of. Where windows slide over a dim, the dim and that of the
windows are of one class too, whatever their sizes: the rows of images before and after a convolution. Shards of both
then have elements in the ratio of the windows' step, so that a shard needs no more than edges of its neighbours.
Features of a convolution and of its kernel are of one class likewise. A class is padded as a whole, or parts of it are
padded alone: between parts that are padded and others operators work on what is cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TypeAlias

from autopar.ir import Graph, Literal, Operand, Operator, TensorType
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.ir.primitives import REGIONS
from autopar.sharding.factors import Rule
from autopar.sharding.halo import Halo
from autopar.sharding.registry import rule_for
from autopar.sharding.rules.elementwise import is_number

#: A dim of a value: (name, number of the dim). A value of the loop of a stage has the loop's prefix, see `inside`.
Place: TypeAlias = tuple[str, int]
#: A dim that is padded, and its size then: (name of the value, number of the dim, size).
PaddedDim: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class PaddedDims:
    """Dims of values that operators split together, so that they are padded together.

    Args:
        parts: its dims by size, each with its size with padding; dims of other parts are joined by windows alone.
    """

    parts: tuple[tuple[tuple[Place, int], ...], ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Its dims."""
        return tuple(place for part in self.parts for place, _ in part)

    def dims(self, graph: Graph) -> tuple[PaddedDim, ...]:
        """One dim of each part, of ``graph``, with its size: the first outside of the loop of a stage, if any is."""
        first = (next((s for s in part if s[0][0] in graph.types), part[0]) for part in self.parts)
        return tuple((name, d, size) for (name, d), size in first)


def inside(op: Operator) -> str:
    """Prefix of the names of values in the loop of a stage."""
    return f"{op.id}/body/"


def types_of(graph: Graph) -> Mapping[str, TensorType]:
    """Types of the values of a graph by name; values in the body of a stage's loop have the loop's prefix."""
    loops = [op for op in graph.operators if is_stage_loop(op)]
    inner = {inside(op) + n: t for op in loops for n, t in op.region("body").types.items()}
    return {**graph.types, **inner} if inner else graph.types


def operators_of(graph: Graph) -> Iterator[tuple[str, Graph, Operator]]:
    """(prefix of its values, its graph, operator) of a graph; for the loop of a stage those of its body."""
    for op in graph.operators:
        if is_stage_loop(op):
            body = op.region("body")
            yield from ((inside(op), body, o) for o in body.operators)
        else:
            yield "", graph, op


def enters_whole(graph: Graph, operand: Operand) -> bool:
    """Whether the loop of a stage takes a value with its padding: state, and what is made of it before the loop.

    Other inputs come with every microbatch, and get their padding inside.
    """
    given = next((i for i in graph.inputs if i.name == operand), None)
    return isinstance(operand, str) and (given is None or given.role in ("parameter", "optimizer"))


def splits_by_loops(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """The rule of an operator; None where it has bodies or effects, or none is known."""
    if op.primitive in REGIONS or op.regions or op.effects:
        return None
    rule, known = rule_for(op, operand_types)
    return rule if known else None


def labelled(op: Operator, rule: Rule, *, windows: bool = False) -> Iterator[tuple[int, Place]]:
    """(loop, place) of all dims of an operator's values that are loops; what travels around a ring is left out.

    Args:
        op: the operator.
        rule: of it.
        windows: whether dims over which windows slide are among them.
    """
    values = (*op.operands, *(v.name for v in op.results))
    for name, dims in zip(values, (*rule.operands, *rule.results), strict=True):
        for d, factor in enumerate(dims):
            if not isinstance(name, str) or factor is None or rule.factors[factor].travels:
                continue
            halo = rule.factors[factor].halo
            if halo is None or (windows and _is_padded(op, halo)):
                yield factor, (name, d)


def _is_padded(op: Operator, halo: Halo) -> bool:
    """Whether a dim under windows may have padding: there is nothing beyond its ends, or it is rolled.

    Convolutions with borders have the other end there, or borders that are made of elements.
    """
    return not halo.least and (not halo.wraps or op.primitive == "roll")


def _links(op: Operator, rule: Rule) -> Iterator[tuple[Place, Place, Fraction]]:
    """(dim, other dim, elements of the first for each of the second) of an operator whose windows slide over dims.

    Dims over which windows slide, with the windows; features of a convolution, with those of its kernel.
    """
    values = (*op.operands, *(v.name for v in op.results))
    labels, last = (*rule.operands, *rule.results), len(values) - 1
    for number, factor in enumerate(rule.factors):
        halo = factor.halo
        places = {
            t: (name, labels[t].index(number))
            for t, name in enumerate(values)
            if isinstance(name, str) and number in labels[t]
        }
        if halo is None:
            first, *others = places.values()
            yield from ((first, other, Fraction(1)) for other in others if _is_of_kernel(op, rule, number))
            continue
        if not _is_padded(op, halo):
            continue
        elements = {factor.halo_operand, last} if halo.returns else {factor.halo_operand}
        for t, place in places.items():
            if factor.halo_operand in places and t not in elements:
                yield places[factor.halo_operand], place, Fraction(halo.step, halo.dilation)
            elif t == last and halo.returns and factor.halo_operand in places:
                yield places[factor.halo_operand], place, Fraction(1)


def _is_of_kernel(op: Operator, rule: Rule, number: int) -> bool:
    """Whether a loop is one over features of a convolution that has no groups."""
    if op.primitive != "conv_general_dilated" or number not in rule.operands[1]:
        return False
    return op.integer("feature_group_count") == op.integer("batch_group_count") == 1


@dataclass(frozen=True)
class _Class:
    """Dims that are padded together.

    Args:
        parts: its dims by size: those of which each is a multiple of a unit, the unit, and the number of elements of
            a shard for each of the part with the fewest.
    """

    parts: tuple[tuple[tuple[Place, ...], int, int], ...]

    @property
    def shared(self) -> int:
        """The largest number of shards that divides all its dims."""
        return math.gcd(*(unit for _, unit, _ in self.parts))

    @property
    def elements(self) -> int:
        """Elements of a unit of each part together."""
        return sum(unit for _, unit, _ in self.parts)

    def units(self, shards: int) -> tuple[int, ...]:
        """Units of the parts with padding, so that ``shards`` divide them in the ratio of the parts."""
        least = max(-(-unit // (shards * ratio)) for _, unit, ratio in self.parts)
        return tuple(least * shards * ratio for _, _, ratio in self.parts)

    def padded(self, units: Sequence[int], types: Mapping[str, TensorType]) -> PaddedDims:
        """The class with padding, with these units of its parts."""
        return PaddedDims(
            tuple(
                tuple(((name, d), types[name].shape[d] // unit * padded) for name, d in places)
                for (places, unit, _), padded in zip(self.parts, units, strict=True)
            )
        )


def classes(graph: Graph) -> tuple[tuple[Place, ...], ...]:
    """Dims of values of a graph that operators split together, by class, in the order of their first ones.

    Bodies of operators are not looked into, but for the loop of a stage: what others take and return is in no class by
    them. Values that stages send each other keep their sizes.
    """
    return tuple(tuple(p for places, _, _ in c.parts for p in places) for c in _classes(graph))


def _parts(graph: Graph) -> tuple[list[_Class], _Joined]:
    """Dims that are split together without windows over them, each part as a class of its own."""
    joined, types = _Joined(graph), types_of(graph)
    units = ((tuple(places), math.gcd(*(types[name].shape[d] for name, d in places))) for places in joined.all())
    return [_Class(((places, unit, 1),)) for places, unit in units], joined


def _classes(graph: Graph) -> list[_Class]:
    """`classes`, with the sizes of their parts."""
    alone, joined = _parts(graph)
    types, parts, units = types_of(graph), [c.parts[0][0] for c in alone], [c.parts[0][1] for c in alone]
    of_place = {place: n for n, places in enumerate(parts) for place in places}
    links: dict[int, list[tuple[int, Fraction]]] = {}
    for elements, windows, per_window in joined.links:
        one, other = of_place[elements], of_place[windows]
        # Of a dim that is several units of its part a shard has as many units.
        each = [types[n].shape[d] // (units[p] or 1) for (n, d), p in ((elements, one), (windows, other))]
        ratio = per_window * Fraction(each[1] or 1, each[0] or 1)
        links.setdefault(one, []).append((other, 1 / ratio))
        links.setdefault(other, []).append((one, ratio))
    all_classes, left = [], dict.fromkeys(range(len(parts)))
    while left:
        first = next(iter(left))
        ratios, todo, agree = {first: Fraction(1)}, [first], True
        while todo:
            part = todo.pop()
            for other, ratio in links.get(part, ()):
                if other not in ratios:
                    ratios[other] = ratios[part] * ratio
                    todo.append(other)
                agree &= ratios[other] == ratios[part] * ratio
        agree &= all(units[n] for n in ratios)
        # Windows that slide by different steps over the same dims: no shards have edges of neighbours alone.
        together = [sorted(ratios)] if agree else [[n] for n in sorted(ratios)]
        for numbers in together:
            scale = [ratios[n] for n in numbers]
            common = Fraction(math.gcd(*(r.numerator for r in scale)), math.lcm(*(r.denominator for r in scale)))
            all_classes.append(_Class(tuple((parts[n], units[n], int(ratios[n] / common)) for n in numbers)))
        for n in ratios:
            del left[n]
    return all_classes


def candidates(graph: Graph, shards: int, most_waste: float, *, joined: bool = True) -> tuple[PaddedDims, ...]:
    """Classes of a graph that more of ``shards`` devices divide with padding.

    Args:
        graph: a step.
        shards: devices.
        most_waste: padding as a share of the size, at most.
        joined: whether dims before and after windows are one class; else each part of a class is padded by itself.
    """
    padded_classes, types = [], types_of(graph)
    if all(padded_size(n, shards, most_waste) == n for n in _common_divisors(types.values())):
        return ()  # whatever the classes are
    for c in _classes(graph) if joined else _parts(graph)[0]:
        units = _padded_units(c, shards, most_waste)
        places = (place for places, _, _ in c.parts for place in places)
        if units is not None and all(is_number(types[n].dtype) or types[n].dtype == "bool" for n, _ in places):
            padded_classes.append(c.padded(units, types))
    return tuple(padded_classes)


def _common_divisors(types: Iterable[TensorType]) -> set[int]:
    """The greatest common divisors of all sets of sizes of dims: those of the parts of a class are among them."""
    divisors: set[int] = set()
    for size in {n for t in types for n in t.shape if n > 1}:
        divisors |= {size, *(math.gcd(size, n) for n in divisors)}
    return divisors


@dataclass(frozen=True)
class Padding:
    """Padded dims of a graph.

    Args:
        shapes: shape with its padding of each value that has any.
        places: all dims of the parts that are padded, also those whose size already is that with padding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: frozenset[Place]


def named(graph: Graph, dims: Collection[PaddedDim]) -> Padding:
    """The padding of a graph that a plan tells.

    Args:
        graph: the step.
        dims: of each part that is padded one dim, with its size when padded.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    types, of_place = types_of(graph), {}
    for places, _, _ in (c.parts[0] for c in _parts(graph)[0]):
        of_place.update(dict.fromkeys(places, places))
    for name, d, size in dims:
        for other, e in of_place[name, d]:
            shape = shapes.get(other, types[other].shape)
            padded = types[other].shape[e] * size // types[name].shape[d]
            shapes[other] = (*shape[:e], padded, *shape[e + 1 :])
    return Padding(MappingProxyType(shapes), frozenset(p for name, d, _ in dims for p in of_place[name, d]))


def renamed_dims(dims: Collection[PaddedDim], names: Mapping[str, str]) -> tuple[PaddedDim, ...]:
    """Dims of values some of which have other names."""
    return tuple((names.get(name, name), d, size) for name, d, size in dims)


def padded_size(size: int, shards: int, most_waste: float) -> int:
    """The least size from ``size`` on that more of ``shards`` divide, as many as waste allows; else ``size``.

    Args:
        size: of a dim.
        shards: devices.
        most_waste: padding as a share of the size, at most.
    """
    shared = math.gcd(size, shards)
    for n in range(shards, shared, -1):
        padded = -(-size // n) * n
        if shards % n == 0 and size > 1 and padded <= (1 + most_waste) * size:
            return padded
    return size


def _padded_units(c: _Class, shards: int, most_waste: float) -> tuple[int, ...] | None:
    """Least units of the parts of a class that more of ``shards`` divide; None where waste allows none.

    Some part has a padding by itself. Arguments are those of `candidates`.
    """
    if all(padded_size(unit, shards, most_waste) == unit for _, unit, _ in c.parts):
        return None
    for n in range(shards, math.gcd(c.shared, shards), -1):
        units = c.units(n)
        if shards % n == 0 and c.shared > 0 and sum(units) <= (1 + most_waste) * c.elements:
            return units
    return None


class _Joined:
    """Dims of a graph that are split together: a union of the loops of all operators, and windows over dims."""

    def __init__(self, graph: Graph) -> None:
        self.parents: dict[Place, Place] = {}
        self.links: list[tuple[Place, Place, Fraction]] = []
        for prefix, inner, op in operators_of(graph):
            rule = None if op.primitive == "stage_boundary" else splits_by_loops(op, inner.operand_types(op))
            first: dict[int, Place] = {}
            for factor, (name, d) in () if rule is None else labelled(op, rule):
                place = prefix + name, d
                linked = rule is not None and _is_of_kernel(op, rule, factor)
                self._join(place if linked else first.setdefault(factor, place), place)
            for (one, d), (other, e), ratio in () if rule is None else _links(op, rule):
                elements, windows = (prefix + one, d), (prefix + other, e)
                self._join(elements, elements)
                self._join(windows, windows)
                self.links.append((elements, windows, ratio))
        for op in graph.operators:
            if is_stage_loop(op):
                self._enter(graph, op)

    def _enter(self, graph: Graph, op: Operator) -> None:
        """Joins what the loop of a stage takes and carries with what that is inside."""
        scan, prefix = Scan.of(op), inside(op)
        consts, initial, _ = scan.split(op.operands)
        inputs = [i.name for i in scan.body.inputs]
        for operand, name in zip(consts, inputs, strict=False):
            if enters_whole(graph, operand):
                self._join_all(scan.body.types[name].rank, str(operand), prefix + name)
        makers = scan.body.producers
        for n, operand in enumerate(initial):
            end = scan.body.outputs[n].operand
            if isinstance(end, Literal) or isinstance(operand, Literal):
                continue
            if end not in makers or makers[end].primitive != "stage_boundary":
                names = (operand, prefix + inputs[scan.num_consts + n], prefix + end, op.results[n].name)
                self._join_all(op.results[n].type.rank, *names)

    def _join_all(self, rank: int, *names: str) -> None:
        for d in range(rank):
            for name in names:
                self._join((names[0], d), (name, d))

    def all(self) -> list[list[Place]]:
        """The classes in the order of their first dims."""
        by_root: dict[Place, list[Place]] = {}
        for place in self.parents:
            by_root.setdefault(self._root(place), []).append(place)
        return list(by_root.values())

    def _join(self, one: Place, other: Place) -> None:
        for place in (one, other):
            self.parents.setdefault(place, place)
        self.parents[self._root(other)] = self._root(one)

    def _root(self, place: Place) -> Place:
        while self.parents[place] != place:
            self.parents[place] = self.parents[self.parents[place]]
            place = self.parents[place]
        return place
