"""`copies_by_part`: work on each part of the batch that a step has written out, once for each part.

Users who accumulate gradients by a loop of Python write it: ``for x in batch.reshape(4, -1, ...)``. Each part is a
slice of one array, the work on all parts is the same, and results are added up, one after another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir import Graph, Layout, Literal, Operand, Operator
from autopar.ir.analysis import closure, dependents
from autopar.ir.fingerprint import exact_hash
from autopar.microbatch.analyze import examples, forward_states
from autopar.microbatch.base import pseudo_mesh
from autopar.microbatch.inside import MicrobatchAxis


@dataclass(frozen=True)
class CopiedSum:
    """The sum of a value of all copies, made by one addition after another.

    Args:
        name: of the last addition's result.
        first: what the first one adds to; None where it adds the values of the first two copies.
    """

    name: str
    first: Operand | None


@dataclass(frozen=True)
class Copies:
    """Work that is written out for each of some parts of the batch.

    Args:
        count: number of parts.
        parts: by name of the part that the first copy takes: the array of all parts.
        first: ids of the operators of the first copy, in running order, without those that take parts out.
        replaced: ids of all operators of all copies, and of additions of `sums`.
        sums: by name of a value of the first copy, its sum over the copies.
        values: by name of a value of the first copy that something else reads, its names in all copies.
    """

    count: int
    parts: Mapping[str, str]
    first: tuple[str, ...]
    replaced: frozenset[str]
    sums: Mapping[str, CopiedSum]
    values: Mapping[str, tuple[str, ...]]


def copies_by_part(graph: Graph) -> Copies | None:
    """The repetition of the same operators on equal parts of the batch, that of the most parts; None without one.

    Args:
        graph: a traced train step with roles.
    """
    parts = _parts(graph)
    for count in sorted({p.count for p in parts.values()}, reverse=True):
        batch = examples(graph, count, 0)
        if batch is None:
            continue
        states = forward_states(graph, batch, MicrobatchAxis(pseudo_mesh(count)), frozenset()).values
        of_count = {n: p for n, p in parts.items() if p.count == count and _is_split(states, p.source)}
        copies = _Matched(graph, count, of_count).copies()
        if copies is not None:
            return copies
    return None


@dataclass(frozen=True)
class _Part:
    """One of some equal parts of the first dim of an array.

    Args:
        source: the array.
        count: number of parts.
        number: of this one.
    """

    source: str
    count: int
    number: int


def _is_split(states: Mapping[str, Layout], name: str) -> bool:
    """Whether microbatches split the first dim of a value."""
    return name in states and bool(states[name].dims[0])


def _parts(graph: Graph) -> dict[str, _Part]:
    """Values that are one of several equal parts of the first dim of another, which depends on the batch, by name."""
    parts: dict[str, _Part] = {}
    for op in dependents(graph.operators, (i.name for i in graph.inputs if i.role == "batch")):
        source = op.operands[0]
        if isinstance(source, str) and op.primitive in ("slice", "split", "unstack", "dynamic_slice"):
            shape = graph.types[source].shape
            for v, (start, size) in zip(op.results, _rows(op, shape), strict=False):
                if 0 < size < shape[0] and not shape[0] % size and not start % size and start < shape[0]:
                    parts[v.name] = _Part(source, shape[0] // size, start // size)
    return parts


def _rows(op: Operator, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, size) along the first dim of each result that has all of the other dims; none of other operators.

    A result of ``unstack`` is one row, without the first dim.
    """
    if op.primitive == "unstack" and op.integer("axis") == 0:
        return [(n, 1) for n in range(shape[0])]
    if op.primitive == "slice" and (op.attr("strides") is None or set(op.ints("strides")) == {1}):
        starts, ends = op.ints("start_indices"), op.ints("limit_indices")
        return [(starts[0], ends[0] - starts[0])] if not any(starts[1:]) and ends[1:] == shape[1:] else []
    if op.primitive == "split" and op.integer("axis") == 0:
        sizes = op.ints("sizes")
        return [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    if op.primitive == "dynamic_slice" and all(isinstance(o, Literal) for o in op.operands[1:]):
        first, *others = (int(o.text) for o in op.operands[1:] if isinstance(o, Literal))
        sizes = op.ints("slice_sizes")
        return [(first, sizes[0])] if sizes[1:] == shape[1:] and not any(others) and first >= 0 else []
    return []


@dataclass(frozen=True)
class _Member:
    """The operator of one copy that a group matches with those of the others: its id and the values that it makes."""

    id: str
    names: tuple[str, ...]


class _Matched:
    """Matches the operators of all copies with each other.

    Args:
        graph: the step.
        count: number of parts.
        parts: values that are parts, by name.
    """

    def __init__(self, graph: Graph, count: int, parts: Mapping[str, _Part]) -> None:
        self.graph, self.count, self.parts = graph, count, parts
        self.member: dict[str, tuple[int, int, int]] = {}  # by value: group of its operator, which result, copy
        self.groups: list[dict[int, _Member]] = []
        self.operands: list[set[int]] = []  # groups that each group reads
        self._match()
        self._drop()

    def _match(self) -> None:
        numbers: dict[object, int] = {}
        seen: Counter[object] = Counter()
        for op in self.graph.operators:
            for copy, key, names in self._places(op):
                nth = seen[copy, key]
                seen[copy, key] += 1
                group = numbers.setdefault((key, nth), len(numbers))
                if group == len(self.groups):
                    self.groups.append({})
                    reads = () if op.results[0].name in self.parts else op.reads
                    self.operands.append({self.member[n][0] for n in reads if n in self.member})
                self.groups[group][copy] = _Member(op.id, names)
                self.member.update((name, (group, n, copy)) for n, name in enumerate(names))

    def _places(self, op: Operator) -> Iterator[tuple[int, object, tuple[str, ...]]]:
        """(copy, what is the same in all copies, values made) of each copy that an operator belongs to."""
        taken = [v.name for v in op.results if v.name in self.parts]
        for name in taken:
            yield self.parts[name].number, ("part", self.parts[name].source, self.graph.types[name]), (name,)
        copies = {self.member[n][2] for n in op.reads if n in self.member}
        of_constants = any(o.primitive == "constant" for _, r in op.regions for o in r.operators)
        if taken or len(copies) != 1 or op.effects or of_constants:
            return
        operands = tuple(
            o.text if isinstance(o, Literal) else self.member[o][:2] if o in self.member else f"outside {o}"
            for o in op.operands
        )
        key = exact_hash(op, self.graph.operand_types(op)), operands
        yield copies.pop(), key, tuple(v.name for v in op.results)

    def _drop(self) -> None:
        """Forgets groups that have no operator in some copy, and those that read such groups."""
        kept: set[int] = set()
        for number, (group, reads) in enumerate(zip(self.groups, self.operands, strict=True)):
            if len(group) == self.count and reads <= kept:
                kept.add(number)
        self.kept = kept
        self.member = {n: at for n, at in self.member.items() if at[0] in kept}

    def copies(self) -> Copies | None:
        """The copies; None where there are none, or a value that all of them take depends on one of them."""
        replaced = frozenset(m.id for number in self.kept for m in self.groups[number].values())
        takers = {self.groups[g][0].id: self.groups[g][0].names[0] for g in self.kept if not self.operands[g]}
        first = {self.groups[number][0].id for number in self.kept} - takers.keys()
        working = tuple(op.id for op in self.graph.operators if op.id in first)
        if not working:
            return None
        operators = [self.graph.by_id[id] for id in working]
        outside = {n for op in operators for n in op.reads if n not in self.member}
        below = {op.id for op in dependents(self.graph.operators, self.member)}
        if any(op.id in below for op in closure(self.graph.operators, outside)):
            return None
        parts = {name: self.parts[name].source for name in takers.values()}
        sums, values, additions = self._left(replaced, {v.name for id in below for v in self.graph.by_id[id].results})
        return Copies(self.count, parts, working, replaced | additions, sums, values)

    def _left(
        self, inside: frozenset[str], below: Container[str]
    ) -> tuple[dict[str, CopiedSum], dict[str, tuple[str, ...]], frozenset[str]]:
        """Sums over copies, values that something else reads, and the ids of the additions of sums.

        Args:
            inside: ids of the operators of copies.
            below: values that depend on some copy.
        """
        readers: dict[str, list[Operator]] = defaultdict(list)
        for op in self.graph.operators:
            if op.id not in inside:
                for read in op.reads:
                    readers[read].append(op)
        returned = {o.operand for o in self.graph.outputs if isinstance(o.operand, str)}
        sums: dict[str, CopiedSum] = {}
        values: dict[str, tuple[str, ...]] = {}
        additions: set[str] = set()
        for name, (group, n, copy) in self.member.items():
            if copy:
                continue
            names = tuple(self.groups[group][k].names[n] for k in range(self.count))
            if not any(readers[m] or m in returned for m in names):
                continue
            chain = None if returned.intersection(names) else _chain(names, readers, returned)
            if chain is None or (isinstance(chain[0].first, str) and chain[0].first in below):
                values[name] = names
            else:
                sums[name] = chain[0]
                additions.update(chain[1])
        return sums, values, frozenset(additions)


def _chain(
    names: tuple[str, ...], readers: Mapping[str, list[Operator]], returned: set[str]
) -> tuple[CopiedSum, list[str]] | None:
    """The additions of one value after another; None where they are read by something else, or out of order."""
    total: str | None = None
    first: Operand | None = None
    ids: list[str] = []
    for k, name in enumerate(names):
        reading = readers[name]
        if len(reading) != 1 or reading[0].primitive not in ("add", "add_any"):
            return None
        (op,) = reading
        others = [o for o in op.operands if o != name]
        if len(others) != 1:
            return None
        if k == 0:
            if others[0] == names[1]:
                continue  # the first addition is of the first two values
            first = others[0]
        elif total is None:
            if others[0] != names[0]:
                return None
        elif others[0] != total or total in returned or len(readers[total]) != 1:
            return None
        total = op.results[0].name
        ids.append(op.id)
    return None if total is None else (CopiedSum(total, first), ids)
