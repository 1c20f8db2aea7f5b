"""`CoreProducts`: the products of a core of attention, with the loops that the dims of their operands are.

A dim is a loop. Loops of the scores have the numbers of their dims, contracted ones those after. Of a product with a
value from outside the new loops are 1000 and on until it is known which of the core's they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir.blockwise.matches import OF_SCORES, PROBABILITIES, AttentionCore, CoreValue, Product
from autopar.ir.blockwise.spec import SAME, Labels
from autopar.ir.graph import Graph, Operator

_NEW = 1000


class UnmatchedError(Exception):
    """A product is no scores of attention that could run in blocks."""


def dot_dims(op: Operator) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]:
    """``(contracted dims of both), (batch dims of both)`` of a product."""
    value: Any = op.attr("dimension_numbers")
    (a, b), (c, d) = value
    return (tuple(a), tuple(b)), (tuple(c), tuple(d))


class CoreProducts:
    """Facts about a core of attention of which a product may make the scores.

    Args:
        graph: that the product is in.
        product: the product.
        readers: operators that read a value, by name.
        place: position of each operator.
    """

    def __init__(
        self, graph: Graph, product: Operator, readers: Mapping[str, Sequence[Operator]], place: Mapping[str, int]
    ) -> None:
        self.graph, self.product, self.readers, self.place = graph, product, readers, place
        self.types, self.makers = graph.types, graph.producers
        self.returned = {o.operand for o in graph.outputs}
        self.known: dict[str, CoreValue] = {}
        self.inside: dict[str, Operator] = {}
        self.chain: list[Operator] = []
        self.back: list[Operator] = []
        self.softmax, self.key_loop = "", -1
        self.values, self.gradient, self.slope = "", "", ""
        self.result: Product | None = None
        self.seen: Product | None = None
        self.products: dict[str, Product] = {}
        self.labels: dict[str, Labels] = {}
        self.asking = ""
        self.next_label = 0

    def scores(self) -> None:
        """Numbers the loops of the product: those of the scores by dim, then the contracted."""
        op = self.product
        (contracted, right_contracted), (batch, right_batch) = dot_dims(op)
        left, right = self.graph.operand_types(op)
        result = op.results[0].type
        number = {d: d for d, n in enumerate(result.shape) if n > 1}
        scores: Labels = tuple(number.get(d) for d in range(result.rank))
        at_left: list[int | None] = [None] * left.rank
        at_right: list[int | None] = [None] * right.rank
        for r, (i, j) in enumerate(zip(batch, right_batch, strict=True)):
            at_left[i] = at_right[j] = scores[r]
        free = [d for d in range(left.rank) if d not in contracted and d not in batch]
        for r, d in enumerate(free, len(batch)):
            at_left[d] = scores[r]
        others = [d for d in range(right.rank) if d not in right_contracted and d not in right_batch]
        for r, d in enumerate(others, len(batch) + len(free)):
            at_right[d] = scores[r]
        for n, (i, j) in enumerate(zip(contracted, right_contracted, strict=True), result.rank):
            at_left[i] = at_right[j] = n if left.shape[i] > 1 else None
        self.next_label = result.rank + len(contracted)
        self.labels = {"left": tuple(at_left), "right": tuple(at_right), "scores": scores}
        self.known[op.results[0].name] = CoreValue("scores", scores)

    def finished(self) -> AttentionCore:
        """The core, if nothing of it is missing."""
        if not self.softmax or not self.values or self.product.results[0].name in self.returned:
            raise UnmatchedError
        if self.products and self.seen is None:
            raise UnmatchedError
        if self.seen is not None:
            self.labels["gradient"] = self.seen.other_labels
            if "values" in self.products:
                if self.products["values"].other != self.gradient:
                    raise UnmatchedError
                self.products["values"] = self.renamed(self.products["values"], self.seen.other_labels)
        self.check_loops()
        self.inside[self.product.id] = self.product
        left, right = self.product.reads
        asks_left = self.asking == "left"
        queries, keys = (left, right) if asks_left else (right, left)
        names = ("left", "right") if asks_left else ("right", "left")
        labels = {"queries": self.labels[names[0]], "keys": self.labels[names[1]], "scores": self.labels["scores"]}
        return AttentionCore(
            self.product, queries, keys, self.values, self.key_loop, self.softmax, self.result, self.slope,
            self.gradient, self.seen, self.products, (*self.chain, *self.back), self.known,
            {**labels, **{k: self.labels[k] for k in ("values", "gradient") if k in self.labels}},
            frozenset(self.inside),
        )  # fmt: skip

    def check_loops(self) -> None:
        """Every loop of rows is one of the result and of its gradient, and the keys have one loop of their own."""
        queries = self.labels["left" if self.asking == "left" else "right"]
        keys = self.labels["right" if self.asking == "left" else "left"]
        scores = {i for i in self.labels["scores"] if i is not None}
        rows = scores - {self.key_loop}
        inner = {i for i in self.labels["values"] if i is not None} - scores
        if {i for i in keys if i in scores} - {i for i in queries if i is not None} != {self.key_loop}:
            raise UnmatchedError
        values = set(self.labels["values"])
        if self.key_loop not in values or not values & rows <= set(keys):
            raise UnmatchedError
        wanted = rows | inner
        for labels in (None if self.result is None else self.result.labels, self.labels.get("gradient")):
            if labels is not None and {i for i in labels if i is not None} != wanted:
                raise UnmatchedError

    def is_gradient(self, name: str, labels: Labels) -> bool:
        """Whether a value from outside is a product of some value and ``values``, one element a score."""
        steps = []
        maker = self.makers.get(name)
        while maker is not None and (maker.primitive == "transpose" or maker.primitive in SAME):
            steps.append(maker)
            maker = self.makers.get(str(maker.operands[0]))
        if maker is None or maker.primitive != "dot_general" or len(maker.reads) != 2:
            return False
        if self.result is not None and self.values not in maker.reads:
            return False
        for step in steps:
            if step.primitive == "transpose":
                order = step.ints("permutation")
                labels = tuple(labels[order.index(d)] for d in range(len(order)))
        if None in [label for label, n in zip(labels, maker.results[0].type.shape, strict=True) if n > 1]:
            return False
        if self.seen is not None:
            return self.seen.op.id == maker.id and self.seen.labels == labels
        return self.see(maker, labels)

    def see(self, op: Operator, labels: Labels) -> bool:
        """Takes a product as that which makes the gradient of the probabilities, if its loops are theirs."""
        if sorted(x for x in labels if x is not None) != sorted(x for x in self.labels["scores"] if x is not None):
            return False
        sides = self.sides(op, labels)
        has_keys = [self.key_loop in side for side in sides]
        if has_keys.count(True) != 1:
            return False
        at = has_keys.index(True)
        values, gradient = op.reads[at], op.reads[1 - at]
        known = self.labels.get("values")
        if known is None:
            sides = self.numbered(sides)
            self.labels["values"] = sides[at]
        else:
            if len(known) != len(sides[at]) or self.values not in ("", values):
                return False
            names = {i: k for i, k in zip(sides[at], known, strict=True) if i is not None and i >= _NEW}
            left, right = (tuple(names.get(i, i) if i is not None else None for i in side) for side in sides)
            sides = (left, right)
            if sides[at] != known:
                return False
        self.values, self.gradient = values, gradient
        self.seen = Product(op, labels, (sides[0], sides[1]), gradient, values)
        return True

    def sides(self, op: Operator, labels: Labels) -> tuple[Labels, Labels]:
        """Labels of the operands of a product from those of its result; contracted loops are `_NEW` and on."""
        (contracted, right_contracted), (batch, right_batch) = dot_dims(op)
        left, right = self.graph.operand_types(op)
        at: tuple[list[int | None], list[int | None]] = ([None] * left.rank, [None] * right.rank)
        for r, (i, j) in enumerate(zip(batch, right_batch, strict=True)):
            at[0][i] = at[1][j] = labels[r]
        rest = iter(labels[len(batch) :])
        for side, type, left_out in ((0, left, (*contracted, *batch)), (1, right, (*right_contracted, *right_batch))):
            for d in range(type.rank):
                if d not in left_out:
                    at[side][d] = next(rest)
        for n, (i, j) in enumerate(zip(contracted, right_contracted, strict=True), _NEW):
            at[0][i] = at[1][j] = n if left.shape[i] > 1 else None
        return tuple(at[0]), tuple(at[1])

    def numbered(self, sides: tuple[Labels, Labels]) -> tuple[Labels, Labels]:
        """Labels with numbers of their own for loops that were contracted."""
        new = {}
        for label in (*sides[0], *sides[1]):
            if label is not None and label >= _NEW and label not in new:
                new[label] = self.next_label
                self.next_label += 1
        return tuple(new.get(i, i) for i in sides[0]), tuple(new.get(i, i) for i in sides[1])  # type: ignore[arg-type]

    def starts(self, name: str) -> None:
        """Takes a value as the gradient of what the softmax is of. Raises UnmatchedError where another is."""
        if self.slope not in ("", name):
            raise UnmatchedError
        self.slope = name

    def leaves(self, op: Operator) -> None:
        """A product with something from outside: the result, or a gradient."""
        inside = [o for o in op.reads if o in self.known]
        if len(op.reads) != 2 or len(inside) != 1 or not self.softmax:
            raise UnmatchedError
        at = op.reads.index(inside[0])
        square, other = inside[0], op.reads[1 - at]
        known = self.known[square]
        product = self.labelled(op, at, known.labels, square, other)
        if op.results[0].name in self.known:
            raise UnmatchedError
        if known.kind == "slope" or (known.kind == "terms" and known.terms == OF_SCORES):
            if known.kind == "terms":
                self.starts(square)
            self.gradient_of(product, square)
        elif known.kind == "terms" and known.terms == PROBABILITIES:
            self.of_probabilities(product)
        else:
            raise UnmatchedError

    def labelled(self, op: Operator, at: int, labels: Labels, square: str, other: str) -> Product:
        """A product with labels, where loops of the other operand alone are new."""
        contracted, batch = dot_dims(op)
        types = self.graph.operand_types(op)
        sides: list[list[int | None]] = [[None] * t.rank for t in types]
        sides[at] = list(labels)
        for pairs in (contracted, batch):
            for mine, theirs in zip(pairs[at], pairs[1 - at], strict=True):
                sides[1 - at][theirs] = labels[mine]
        taken = {*contracted[1 - at], *batch[1 - at]}
        result: list[int | None] = [labels[d] for d in batch[at]]
        for side in (0, 1):
            for d in range(types[side].rank):
                if d in contracted[side] or d in batch[side]:
                    continue
                if side != at and d not in taken:
                    sides[side][d] = _NEW + d if types[side].shape[d] > 1 else None
                result.append(sides[side][d])
        return Product(op, tuple(result), (tuple(sides[0]), tuple(sides[1])), other, square)

    def renamed(self, product: Product, known: Labels) -> Product:
        """A product whose new loops are those that its other operand has in ``known``; raises where dims differ."""
        other = product.other_labels
        if len(other) != len(known):
            raise UnmatchedError
        names = {i: k for i, k in zip(other, known, strict=True) if i is not None and i >= _NEW}
        if any(i != k for i, k in zip(other, known, strict=True) if i is None or i < _NEW) or None in names.values():
            raise UnmatchedError

        def rename(labels: Labels) -> Labels:
            return tuple(names.get(i, i) if i is not None else None for i in labels)

        sides = (rename(product.operands[0]), rename(product.operands[1]))
        return Product(product.op, rename(product.labels), sides, product.other, product.square)

    def of_probabilities(self, product: Product) -> None:
        """Probabilities times the values, or times the gradient of the result."""
        contracted = [i for i in product.other_labels if i is not None and i not in product.labels]
        if contracted == [self.key_loop]:
            if self.result is not None or self.values not in ("", product.other):
                raise UnmatchedError
            if "values" in self.labels:
                product = self.renamed(product, self.labels["values"])
            else:
                sides = self.numbered(product.operands)
                at = product.op.reads.index(product.other)
                product = self.renamed(product, sides[at])
                self.labels["values"] = product.other_labels
            self.values, self.result = product.other, product
            return
        if "values" in self.products or self.key_loop not in product.labels:
            raise UnmatchedError
        self.products["values"] = product  # its other operand is looked at in `finish`
        if self.gradient not in ("", product.other):
            raise UnmatchedError

    def gradient_of(self, product: Product, square: str) -> None:
        """The gradient of the scores times the keys or the queries."""
        left, right = self.product.reads
        queries, keys = (left, right) if self.asking == "left" else (right, left)
        of_queries = self.key_loop not in product.labels
        wanted, other = ("queries", keys) if of_queries else ("keys", queries)
        if product.other != other or wanted in self.products:
            raise UnmatchedError
        side = "left" if other == left else "right"
        self.products[wanted] = self.renamed(product, self.labels[side])
