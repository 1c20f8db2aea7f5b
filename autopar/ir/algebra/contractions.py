"""Products of tensors whose dims have labels, the best order of three factors, and sums of such products.

`operand_labels` and `LabelledProduct` say what a ``dot_general`` computes. A label in both factors of a product is a
batch dim where somebody asks for it later, and is summed over where not.

`Cone` is what is linear in a product: transposes, products with scalars, sums with other tensors. Where it ends in
products alone, these may be computed from the factors instead, and the cone is not made at all. The rewriting is
`autopar.ir.algebra.rewrite`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir.graph import Attr, Graph, Operand, Operator
from autopar.ir.types import is_float

#: Label of each dim of a tensor.
Labels: TypeAlias = tuple[int, ...]

#: The attribute ``dimension_numbers``: dims summed over of both sides, then batch dims of both.
DimensionNumbers: TypeAlias = tuple[tuple[Labels, Labels], tuple[Labels, Labels]]
_SUMS = ("add", "add_any", "sub")
_SCALED = ("mul", "div")


def dimension_numbers(op: Operator) -> DimensionNumbers:
    """The dims of a ``dot_general``."""
    return op.attr("dimension_numbers")  # type: ignore[return-value]


@dataclass(frozen=True)
class LabelledTensor:
    """A tensor in a product.

    Args:
        name: of the value; "" of one that is not made yet.
        labels: of its dims.
        place: by which factors of a product are ordered; later comes first.
    """

    name: str
    labels: Labels
    place: int


def product_labels(op: Operator, lhs: Labels, rhs: Sequence[int]) -> Labels:
    """Labels of the result of a ``dot_general``: batch, free of the left, free of the right."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers(op)
    free = [k for n, k in enumerate(lhs) if n not in (*lhs_sum, *lhs_batch)]
    return (*(lhs[n] for n in lhs_batch), *free, *(k for n, k in enumerate(rhs) if n not in (*rhs_sum, *rhs_batch)))


def operand_labels(op: Operator, lhs_rank: int, rhs_rank: int) -> tuple[Labels, Labels]:
    """Labels of both operands of a ``dot_general``, counted from 0 along the left."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = dimension_numbers(op)
    same = dict(zip((*rhs_sum, *rhs_batch), (*lhs_sum, *lhs_batch), strict=True))
    return tuple(range(lhs_rank)), tuple(same.get(n, lhs_rank + n) for n in range(rhs_rank))


@dataclass(frozen=True)
class LabelledProduct:
    """One product of two factors, in an order that does not depend on who asks for it.

    Args:
        lhs, rhs: factors.
        dims: the attribute ``dimension_numbers``.
        labels: of the result.
    """

    lhs: LabelledTensor
    rhs: LabelledTensor
    dims: DimensionNumbers
    labels: Labels

    @staticmethod
    def of(a: LabelledTensor, b: LabelledTensor, kept: Collection[int]) -> LabelledProduct | None:
        """The product; None where a dim of one factor alone would have to be summed over.

        Args:
            a, b: factors; no label is twice in one.
            kept: labels that somebody asks for later.
        """
        lhs, rhs = sorted((a, b), key=lambda f: (-f.place, f.name))
        shared = [k for k in lhs.labels if k in rhs.labels]
        if any(k not in kept and k not in shared for k in (*lhs.labels, *rhs.labels)):
            return None
        batch, summed = ([k for k in shared if (k in kept) is both] for both in (True, False))
        at = [tuple(tuple(f.labels.index(k) for k in ks) for f in (lhs, rhs)) for ks in (summed, batch)]
        free = [[k for k in f.labels if k not in shared] for f in (lhs, rhs)]
        return LabelledProduct(lhs, rhs, (at[0], at[1]), (*batch, *free[0], *free[1]))  # type: ignore[arg-type]

    def multiplications(self, sizes: Mapping[int, int]) -> int:
        """Number of multiplications of the product."""
        return math.prod(sizes[k] for k in {*self.lhs.labels, *self.rhs.labels})


def best_order(
    x: LabelledTensor, p: LabelledTensor, q: LabelledTensor, asked: Labels, sizes: Mapping[int, int]
) -> tuple[LabelledProduct, LabelledProduct] | None:
    """``x (p q)`` as ``(x p) q`` or ``(x q) p``, whichever has fewer multiplications; None where neither can be.

    Args:
        x, p, q: factors.
        asked: labels of the result.
        sizes: of labels.
    """
    orders = []
    for first, last in ((p, q), (q, p)):
        inner = LabelledProduct.of(x, first, {*last.labels, *asked})
        if inner is None:
            continue
        outer = LabelledProduct.of(LabelledTensor("", inner.labels, max(x.place, first.place)), last, asked)
        if outer is not None:
            orders.append((inner, outer))
    return min(orders, key=lambda o: sum(p.multiplications(sizes) for p in o), default=None)


@dataclass(frozen=True)
class Scale:
    """A product with a number, a quotient by one, or a negation.

    Args:
        primitive: ``mul``, ``div`` or ``neg``.
        by: the scalar; None of ``neg``.
        like: the program's operator that does so; None of a difference.
    """

    primitive: str
    by: Operand | None = None
    like: Operator | None = None


@dataclass(frozen=True)
class Term:
    """One summand.

    Args:
        leaf: name of the tensor, or of the result of a product.
        permutation: dims of the leaf in the order of the sum.
        scales: what it is multiplied by, in the program's order.
        product: whether the leaf is the result of a product whose factors are to be taken.
    """

    leaf: str
    permutation: Labels
    scales: tuple[Scale, ...] = ()
    product: bool = False


@dataclass(frozen=True)
class Cone:
    """Linear operators (sums, transposes, scalings) between one product and the products that read them.

    Args:
        product: the product.
        linear: operators between it and ``ends``, in running order.
        ends: products with one operand in the cone.
        sides: for each of them which operand that is.
    """

    product: Operator
    linear: tuple[Operator, ...]
    ends: tuple[Operator, ...]
    sides: tuple[int, ...]


@dataclass(frozen=True)
class Uses:
    """Readers of the values of a graph.

    Args:
        graph: the graph.
        readers: operators by value.
        returned: values that the graph returns.
        places: of operators by id, those of inputs before.
    """

    graph: Graph
    readers: Mapping[str, Sequence[Operator]]
    returned: frozenset[str]
    places: Mapping[str, int]

    @staticmethod
    def of(graph: Graph) -> Uses:
        """The readers of a graph's values."""
        readers: dict[str, list[Operator]] = {}
        for op in graph.operators:
            for name in dict.fromkeys(op.reads):
                readers.setdefault(name, []).append(op)
        places = {i.name: n - len(graph.inputs) for n, i in enumerate(graph.inputs)}
        places.update((v.name, n) for n, op in enumerate(graph.operators) for v in op.results)
        returned = frozenset(o.operand for o in graph.outputs if isinstance(o.operand, str))
        return Uses(graph, readers, returned, places)

    def is_product(self, op: Operator) -> bool:
        """Whether an operator is a product of two floating tensors of the dtype of its result."""
        if op.primitive != "dot_general" or len(op.reads) != 2:
            return False
        dtype = op.results[0].type.dtype
        return is_float(dtype) and all(t.dtype == dtype for t in self.graph.operand_types(op))

    def cone(self, product: Operator) -> Cone | None:
        """The cone of a product; None where some of it is read by anything but a product with another tensor."""
        inside = {product.results[0].name}
        linear_by_id: dict[str, Operator] = {}
        ends: dict[str, Operator] = {}
        pending = list(inside)
        while pending:
            name = pending.pop()
            if name in self.returned or name not in self.readers:
                return None
            for op in self.readers[name]:
                if op.id in linear_by_id or op.id in ends:
                    continue
                if self.is_product(op) and settings(op) == settings(product):
                    ends[op.id] = op
                elif self.is_linear(op, inside):
                    linear_by_id[op.id] = op
                    inside.add(op.results[0].name)
                    pending.append(op.results[0].name)
                else:
                    return None
        last = sorted(ends.values(), key=lambda op: self.places[op.results[0].name])
        if any(sum(o in inside for o in op.reads) != 1 for op in last):
            return None
        linear = sorted(linear_by_id.values(), key=lambda op: self.places[op.results[0].name])
        return Cone(product, tuple(linear), tuple(last), tuple(int(op.reads[1] in inside) for op in last))

    def is_linear(self, op: Operator, inside: set[str]) -> bool:
        """Whether an operator is linear in what it takes of ``inside``, with shapes and dtype as they are or moved."""
        if op.primitive in ("transpose", "neg"):
            return True
        types, type = self.graph.operand_types(op), op.results[0].type if op.results else None
        if op.primitive in _SUMS:
            return all(isinstance(o, str) and t == type for o, t in zip(op.operands, types, strict=True))
        if op.primitive not in _SCALED or types[0].dtype != types[1].dtype:
            return False
        scalar = self._scalar_side(op)
        return scalar is not None and op.operands[1 - scalar] in inside and types[1 - scalar] == type

    def _scalar_side(self, op: Operator) -> int | None:
        """Number of the operand of a product or quotient that is the scalar; None if none is."""
        sides = (1,) if op.primitive == "div" else (0, 1)
        types = self.graph.operand_types(op)
        return next((n for n in sides if types[n].rank == 0 and types[1 - n].rank), None)

    def expanded(self, name: str, cone: Cone) -> tuple[Term, ...]:
        """The sum that a value of a cone is."""
        steps = {op.results[0].name: op for op in cone.linear}
        return self._terms(name, cone.product.results[0].name, steps)

    def _terms(self, name: str, product: str, steps: Mapping[str, Operator]) -> tuple[Term, ...]:
        rank = self.graph.types[name].rank
        if name == product:
            return (Term(name, tuple(range(rank)), (), True),)
        op = steps.get(name)
        if op is None:
            return (self._foreign(name, product),)
        if op.primitive not in _SUMS:
            side = self._tensor_side(op)
            return tuple(self._stepped(t, op) for t in self._terms(str(op.operands[side]), product, steps))
        first, second = (self._terms(str(o), product, steps) for o in op.operands)
        if op.primitive == "sub":
            second = tuple(_scaled(t, Scale("neg")) for t in second)
        return (*first, *second)

    def _tensor_side(self, op: Operator) -> int:
        scalar = self._scalar_side(op) if op.primitive in _SCALED else None
        return 0 if scalar is None else 1 - scalar

    def _stepped(self, term: Term, op: Operator) -> Term:
        """A summand after one more step."""
        if op.primitive == "transpose":
            permutation = tuple(term.permutation[d] for d in op.ints("permutation"))
            return Term(term.leaf, permutation, term.scales, term.product)
        scalar = self._scalar_side(op) if op.primitive in _SCALED else None
        return _scaled(term, Scale(op.primitive, None if scalar is None else op.operands[scalar], op))

    def _foreign(self, name: str, product: str) -> Term:
        """A summand from outside of the cone: a product after transposes and scales, or the tensor as it is."""
        steps: list[Operator] = []
        at = name
        while (op := self.graph.producers.get(at)) is not None:
            if self.is_product(op) and settings(op) == settings(self.graph.producers[product]):
                term = Term(at, tuple(range(self.graph.types[at].rank)), (), True)
                for step in reversed(steps):
                    term = self._stepped(term, step)
                return term
            moves = op.primitive in ("transpose", "neg")
            if not moves and not (op.primitive in _SCALED and self._scalar_side(op) is not None):
                break
            steps.append(op)
            at = str(op.operands[self._tensor_side(op)])
        return Term(name, tuple(range(self.graph.types[name].rank)))


def settings(op: Operator) -> tuple[tuple[str, Attr], ...]:
    """Attributes of a product besides its dims: precision, and the dtype that it sums in."""
    return tuple((name, value) for name, value in op.attrs if name not in ("dimension_numbers", "band"))


def _scaled(term: Term, scale: Scale) -> Term:
    return Term(term.leaf, term.permutation, (*term.scales, scale), term.product)
