"""`reassociated`: a graph whose products of products and of sums are computed in the cheaper order."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autopar.ir.algebra.contractions import (
    Cone,
    LabelledProduct,
    LabelledTensor,
    Labels,
    Scale,
    Term,
    Uses,
    best_order,
    operand_labels,
    product_labels,
    settings,
)
from autopar.ir.analysis import dependents, live, names_made
from autopar.ir.graph import Attr, Graph, Operand, Operator, Value
from autopar.ir.types import TensorType


@dataclass(frozen=True)
class ChangedOperator:
    """An operator that computing products in another order removes or adds.

    Args:
        op: the operator.
        types: of its operands.
        of_batch: whether it takes anything that is computed of the batch, so that devices may share it by examples.
    """

    op: Operator
    types: tuple[TensorType, ...]
    of_batch: bool


@dataclass(frozen=True)
class Change:
    """One place that may be computed otherwise. A product ``x w`` that is in both forms is in neither list.

    Args:
        product: id of the product that is no longer made.
        source: its line in the program.
        distributed: whether a product of a sum becomes a sum of products.
        before: operators that are no longer needed.
        after: those that stand for them.
    """

    product: str
    source: str
    distributed: bool
    before: tuple[ChangedOperator, ...]
    after: tuple[ChangedOperator, ...]


@dataclass(frozen=True)
class Reassociated:
    """A rewritten graph.

    Args:
        graph: the graph.
        changes: what was changed, in running order within each round.
        likes: by id of a new operator that of one before which has its parameters; for the others attributes say all.
    """

    graph: Graph
    changes: tuple[Change, ...]
    likes: Mapping[str, str]


def reassociated(graph: Graph, batch: Collection[str], pays: Callable[[Change], bool]) -> Reassociated:
    """``graph`` with products computed in another order where that pays; bodies of its operators stay as they are.

    ``(p q) z`` becomes ``p (q z)``, and ``x (w + p q)`` becomes ``x w + (x p) q``, transposes and scalar factors in
    between included. A product is given up only where all that reads it is rewritten. Equal in exact arithmetic.

    Args:
        graph: a step, or a body.
        batch: inputs that hold examples, or are computed of them.
        pays: whether a change is made. It must not hold of a change and its inverse.
    """
    changes: list[Change] = []
    likes: dict[str, str] = {}
    counts: dict[str, int] = {}
    while True:
        rewriting = _Round(graph, batch, pays, counts)
        if not rewriting.changes:
            return Reassociated(graph, tuple(changes), likes)
        graph = rewriting.result()
        changes += rewriting.changes
        likes.update((new, likes.get(old, old)) for new, old in rewriting.likes.items())


class _Round:
    """Changes that concern different operators. See `reassociated`."""

    def __init__(
        self, graph: Graph, batch: Collection[str], pays: Callable[[Change], bool], counts: dict[str, int]
    ) -> None:
        self.graph = graph
        self.of_batch = {*batch, *names_made(dependents(graph.operators, batch))}
        self.uses = Uses.of(graph)
        self.known = Existing.of(graph, counts)
        self.changes: list[Change] = []
        self.likes: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.before: dict[int, list[Operator]] = {}
        touched: set[str] = set()
        for op in graph.operators:
            cone = self.uses.cone(op) if self.uses.is_product(op) else None
            if cone is None:
                continue
            ids = {op.id, *(o.id for o in (*cone.linear, *cone.ends))}
            emission = Emission(self.uses, self.known.child())
            if ids & touched or not all(emission.end(e, n, cone) for e, n in zip(cone.ends, cone.sides, strict=True)):
                continue
            change = self._change(cone, emission)
            if pays(change):
                touched |= ids | {w.op.id for w in change.before}
                self._keep(change, emission)

    def _keep(self, change: Change, emission: Emission) -> None:
        self.changes.append(change)
        self.likes.update(emission.likes)
        self.names.update(emission.names)
        for at, op in emission.operators:
            self.known.add(op, 2 * at - 1)
            self.before.setdefault(at, []).append(op)

    def _change(self, cone: Cone, emission: Emission) -> Change:
        """Operators that a change removes and adds."""
        taken = {o for _, op in emission.operators for o in op.reads} - set(emission.names) | set(
            emission.names.values()
        )
        removed = {op.id: op for op in cone.ends}
        pending = list(cone.ends)
        while pending:
            for name in pending.pop().reads:
                op = self.graph.producers.get(name)
                if op is not None and op.id not in removed and self._is_unread(op, removed, taken):
                    removed[op.id] = op
                    pending.append(op)
        before = sorted(removed.values(), key=lambda op: self.uses.places[op.results[0].name])
        added = [op for _, op in emission.operators]
        of_batch = {*self.of_batch, *names_made(dependents(added, self.of_batch))}

        def works(operators: Sequence[Operator]) -> tuple[ChangedOperator, ...]:
            return tuple(
                ChangedOperator(
                    op, tuple(_type(o, emission.known) for o in op.operands), not of_batch.isdisjoint(op.reads)
                )
                for op in operators
                if op.id not in emission.unchanged
            )

        return Change(cone.product.id, cone.product.source, emission.distributed, works(before), works(added))

    def _is_unread(self, op: Operator, removed: Mapping[str, Operator], taken: set[str]) -> bool:
        names = [v.name for v in op.results]
        if op.effects or any(n in taken or n in self.uses.returned for n in names):
            return False
        return all(reader.id in removed for n in names for reader in self.uses.readers.get(n, ()))

    def result(self) -> Graph:
        """The graph with all changes."""
        operators: list[Operator] = []
        for n, op in enumerate(self.graph.operators):
            operators += [*self.before.get(n, []), op]
        renamed = [replace(op, operands=self._renamed(op.operands)) for op in operators]
        outputs = tuple(replace(o, operand=self._renamed([o.operand])[0]) for o in self.graph.outputs)
        kept = tuple(live(renamed, (o.operand for o in outputs)))
        return replace(self.graph, operators=kept, outputs=outputs)

    def _renamed(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(self._new(o) if isinstance(o, str) else o for o in operands)

    def _new(self, name: str) -> str:
        while name in self.names:
            name = self.names[name]
        return name


def _type(operand: Operand, known: Existing) -> TensorType:
    return known.types[operand] if isinstance(operand, str) else operand.type


#: By what two operators are the same.
_Key: TypeAlias = tuple[str, str, tuple[Operand, ...]]


@dataclass(frozen=True)
class Existing:
    """Operators and values of a graph before it is rewritten, by what they compute.

    Args:
        results: by what it computes the place and result of an operator: twice its index, one less where it is new.
        counts: by what precedes the count in ids the next count.
        types: of values.
    """

    results: MutableMapping[_Key, tuple[int, str]]
    counts: MutableMapping[str, int]
    types: MutableMapping[str, TensorType]

    @staticmethod
    def of(graph: Graph, counts: MutableMapping[str, int]) -> Existing:
        """Operators and values of a graph.

        Args:
            graph: the graph.
            counts: those of the rounds before, which are added to: no id of an operator that is gone comes back, since
                what running it needs is kept by id.
        """
        known = Existing({}, counts, dict(graph.types))
        for n, op in enumerate(graph.operators):
            if len(op.results) == 1 and not op.regions and not op.effects:
                known.add(op, 2 * n)
            known.count(op.id)
        return known

    def child(self) -> Existing:
        """A copy, to which operators are added that this one does not get."""
        return Existing(ChainMap({}, self.results), ChainMap({}, self.counts), ChainMap({}, self.types))

    def add(self, op: Operator, place: int) -> None:
        """Adds an operator with one result."""
        self.results.setdefault((op.primitive, repr(op.attrs), op.operands), (place, op.results[0].name))
        self.types[op.results[0].name] = op.results[0].type
        self.count(op.id)

    def count(self, id: str) -> None:
        """Reserves an id: later ids of its stem get a higher number."""
        stem, _, count = id.rpartition(".")
        if count.isdigit():
            self.counts[stem] = max(self.counts.get(stem, 0), int(count) + 1)


@dataclass
class Emission:
    """Operators in the making, for the ends of one cone.

    Args:
        uses: of the graph.
        known: operators that are there.
        operators: new ones with their places, in running order.
        likes: for an operator made here the id of one of the graph with its parameters.
        names: for the result of each end what stands for it.
        distributed: whether some end became a sum.
        unchanged: ids of ends whose product with one summand costs as much as they do, and of these products.
    """

    uses: Uses
    known: Existing
    operators: list[tuple[int, Operator]] = field(default_factory=list)
    likes: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    distributed: bool = False
    unchanged: set[str] = field(default_factory=set)

    def type_of(self, name: str) -> TensorType:
        """Type of a value of the graph or of here."""
        return self.known.types[name]

    def end(self, end: Operator, side: int, cone: Cone) -> bool:
        """Factors that replace one end of a chain; False where it cannot be computed from them."""
        ranks = [t.rank for t in self.uses.graph.operand_types(end)]
        labels = operand_labels(end, ranks[0], ranks[1])
        asked = product_labels(end, *labels)
        other, summed = str(end.operands[1 - side]), str(end.operands[side])
        x = LabelledTensor(other, labels[1 - side], self._place(other))
        terms = self.uses.expanded(summed, cone)
        results = [self._term(end, x, term, labels[side], asked) for term in terms]
        if None in results:
            return False
        total, *more = (str(r) for r in results)
        for name in more:
            total = self._operator(end, "add", (total, name), (), self.type_of(total))
        self.distributed = self.distributed or bool(more)
        self.names[end.results[0].name] = total
        return True

    def _place(self, name: str) -> int:
        return self.uses.places[name]

    def _term(self, end: Operator, x: LabelledTensor, term: Term, labels: Labels, asked: Labels) -> str | None:
        """The product of ``x`` with one summand, whose dims have ``labels`` in the sum."""
        dims = [0] * len(labels)
        for dim, label in zip(term.permutation, labels, strict=True):
            dims[dim] = label
        sizes = dict(zip(x.labels, self.type_of(x.name).shape, strict=True))
        sizes.update(zip(dims, self.type_of(term.leaf).shape, strict=True))
        leaf = LabelledTensor(term.leaf, tuple(dims), self._place(term.leaf))
        direct = LabelledProduct.of(x, leaf, asked)
        if direct is None:
            return None
        if not term.product:
            count = len(self.operators)
            name = self._pair(end, direct, "", sizes)
            if len(self.operators) > count and end.id not in self.unchanged:
                self.unchanged |= {end.id, name}
            return self._finished(end, name, direct.labels, asked, term.scales)
        p, q = self._factors(term.leaf, leaf.labels, sizes)
        order = best_order(x, p, q, asked, sizes)
        if order is None:
            return None
        inner, outer = order
        first = self._pair(end, inner, "", sizes)
        early = self.type_of(first).size <= math.prod(sizes[k] for k in outer.labels)
        for scale in term.scales if early else ():
            first = self._scaled(end, first, scale)
        result = self._pair(end, outer, first, sizes)
        return self._finished(end, result, outer.labels, asked, () if early else term.scales)

    def _factors(self, product: str, labels: Labels, sizes: dict[int, int]) -> tuple[LabelledTensor, LabelledTensor]:
        """Factors of a product whose dims have ``labels``; sizes of what it sums over are added."""
        op = self.uses.graph.producers[product]
        types = self.uses.graph.operand_types(op)
        inside = operand_labels(op, types[0].rank, types[1].rank)
        outside = dict(zip(product_labels(op, *inside), labels, strict=True))
        fresh = max(sizes, default=0) + 1
        named = [tuple(outside.get(k, fresh + k) for k in ks) for ks in inside]
        for ks, type in zip(named, types, strict=True):
            sizes.update(zip(ks, type.shape, strict=True))
        p, q = (LabelledTensor(str(o), ks, self._place(str(o))) for o, ks in zip(op.operands, named, strict=True))
        return p, q

    def _pair(self, end: Operator, pair: LabelledProduct, inner: str, sizes: Mapping[int, int]) -> str:
        operands = (pair.lhs.name or inner, pair.rhs.name or inner)
        attrs = tuple(sorted((*settings(end), ("dimension_numbers", pair.dims))))
        type = TensorType(tuple(sizes[k] for k in pair.labels), end.results[0].type.dtype)
        return self._operator(end, "dot_general", operands, attrs, type, end)

    def _finished(self, end: Operator, name: str, labels: Labels, asked: Labels, scales: Sequence[Scale]) -> str:
        """A product with its scales, and its dims in the order that is asked for."""
        for scale in scales:
            name = self._scaled(end, name, scale)
        if labels == asked:
            return name
        order = tuple(labels.index(k) for k in asked)
        type = replace(self.type_of(name), shape=tuple(self.type_of(name).shape[d] for d in order))
        return self._operator(end, "transpose", (name,), (("permutation", order),), type)

    def _scaled(self, end: Operator, name: str, scale: Scale) -> str:
        operands: tuple[Operand, ...] = (name,)
        if scale.by is not None:
            first = scale.like is not None and scale.like.operands[0] == scale.by
            operands = (scale.by, name) if first else (name, scale.by)
        attrs = () if scale.like is None else scale.like.attrs
        return self._operator(end, scale.primitive, operands, attrs, self.type_of(name), scale.like)

    def _operator(
        self,
        end: Operator,
        primitive: str,
        operands: tuple[Operand, ...],
        attrs: tuple[tuple[str, Attr], ...],
        type: TensorType,
        like: Operator | None = None,
    ) -> str:
        """The result of an operator in front of ``end``: of one that is there already, or of a new one."""
        at = self._place(end.results[0].name)
        there = self.known.results.get((primitive, repr(attrs), operands))
        if there is not None and there[0] < 2 * at:
            return there[1]
        stem = f"{end.scope}/{primitive}" if end.scope else primitive
        id = f"{stem}.{self.known.counts.get(stem, 0)}"
        op = Operator(id, primitive, operands, (Value(id, type),), attrs, (), end.source, end.scope, (), end.marks)
        self.known.add(op, 2 * at - 1)
        self.operators.append((at, op))
        if like is not None:
            self.likes[id] = like.id
        return id
