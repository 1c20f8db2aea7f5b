"""Dims that the devices do not divide, and the sizes to which they may be padded.

Dims that operators must split together (the loops of their rules) form a class: a vocabulary in its table, in logits
and in moments; heads, and the width that they are a part of. A class is padded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from autopar.ir import Graph, Literal, Operand, Operator, TensorType
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.ir.primitives import REGIONS
from autopar.sharding.factors import Rule
from autopar.sharding.registry import rule_for
from autopar.sharding.rules.elementwise import is_number

#: A dim of a value: (name, number of the dim). A value of the loop of a stage has the loop's prefix, see `inside`.
Place: TypeAlias = tuple[str, int]
#: A dim that is padded, and its size then: (name of the value, number of the dim, size).
PaddedDim: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class PaddedDims:
    """A class of dims that is padded.

    Args:
        size: of its unit: each of its dims is a multiple of it.
        padded: size of the unit with padding.
        places: its dims.
    """

    size: int
    padded: int
    places: tuple[Place, ...]

    def representative(self, graph: Graph) -> PaddedDim:
        """One dim of the class, of ``graph``, with its size: the first outside of the loop of a stage, if any is."""
        name, d = next((place for place in self.places if place[0] in graph.types), self.places[0])
        return name, d, self.size_of(types_of(graph)[name].shape[d])

    def size_of(self, size: int) -> int:
        """Size with padding of a dim of ``size``."""
        return size // self.size * self.padded


@dataclass(frozen=True)
class Padding:
    """Padded dims of a graph.

    Args:
        classes: see `PaddedDims`.
    """

    classes: tuple[PaddedDims, ...]

    def shapes(self, graph: Graph) -> Mapping[str, tuple[int, ...]]:
        """Shape with its padding of each value that has any."""
        shapes: dict[str, tuple[int, ...]] = {}
        types = types_of(graph)
        for c in self.classes:
            for name, d in c.places:
                shape = shapes.get(name, types[name].shape)
                shapes[name] = (*shape[:d], c.size_of(shape[d]), *shape[d + 1 :])
        return MappingProxyType(shapes)


def inside(op: Operator) -> str:
    """Prefix of the names of values in the loop of a stage."""
    return f"{op.id}/body/"


def types_of(graph: Graph) -> Mapping[str, TensorType]:
    """Types of the values of a graph, and of those in the loop of a stage."""
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


def labelled(op: Operator, rule: Rule) -> Iterator[tuple[int, Place]]:
    """(loop, place) of all dims of an operator's values that are loops; windows and rings are left out."""
    values = (*op.operands, *(v.name for v in op.results))
    for name, dims in zip(values, (*rule.operands, *rule.results), strict=True):
        for d, factor in enumerate(dims):
            if not isinstance(name, str) or factor is None:
                continue
            if rule.factors[factor].halo is None and not rule.factors[factor].travels:
                yield factor, (name, d)


def classes(graph: Graph) -> tuple[tuple[Place, ...], ...]:
    """Dims of values of a graph that operators split together, by class, in the order of their first ones.

    Bodies of operators are not looked into, but for the loop of a stage: what others take and return is in no class by
    them. Values that stages send each other keep their sizes.
    """
    joined = _Classes(graph)
    return tuple(tuple(places) for places in joined.all())


def candidates(graph: Graph, shards: int, most_waste: float) -> tuple[PaddedDims, ...]:
    """Classes of a graph that more of ``shards`` devices divide with padding.

    Args:
        graph: a step.
        shards: devices.
        most_waste: padding as a share of the size, at most.
    """
    padded_classes, by_name = [], types_of(graph)
    if all(padded_size(n, shards, most_waste) == n for n in _common_divisors(by_name.values())):
        return ()  # whatever the classes are
    for places in classes(graph):
        types = [by_name[name] for name, _ in places]
        size = math.gcd(*(t.shape[d] for t, (_, d) in zip(types, places, strict=True)))
        padded = padded_size(size, shards, most_waste)
        if padded != size and all(is_number(t.dtype) or t.dtype == "bool" for t in types):
            padded_classes.append(PaddedDims(size, padded, places))
    return tuple(padded_classes)


def _common_divisors(types: Iterable[TensorType]) -> set[int]:
    """The greatest common divisors of all sets of sizes of dims: that of a class is among them."""
    divisors: set[int] = set()
    for size in {n for t in types for n in t.shape if n > 1}:
        divisors |= {size, *(math.gcd(size, n) for n in divisors)}
    return divisors


def named(graph: Graph, dims: Collection[PaddedDim]) -> Padding:
    """The padding of a graph that a plan tells.

    Args:
        graph: the step.
        dims: of each class one dim, with its size when padded.
    """
    padded_classes, types = [], types_of(graph)
    of_place = {place: places for places in classes(graph) for place in places}
    for name, d, padded in dims:
        places = of_place[name, d]
        size = math.gcd(*(types[n].shape[i] for n, i in places))
        padded_classes.append(PaddedDims(size, padded * size // types[name].shape[d], places))
    return Padding(tuple(padded_classes))


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


class _Classes:
    """Dims of a graph that are split together: a union of the loops of all operators."""

    def __init__(self, graph: Graph) -> None:
        self.parents: dict[Place, Place] = {}
        for prefix, inner, op in operators_of(graph):
            rule = None if op.primitive == "stage_boundary" else splits_by_loops(op, inner.operand_types(op))
            first: dict[int, Place] = {}
            for factor, (name, d) in () if rule is None else labelled(op, rule):
                place = prefix + name, d
                self._join(first.setdefault(factor, place), place)
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
