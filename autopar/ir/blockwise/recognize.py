"""`find`: the cores of attention of a graph, by what their values are and not by how they are spelled.

From a product whose result may be scores its readers are followed in order. Each value is one of a few things
(`matches.Kind`); what an operator makes of them follows from the algebra of `Terms`. A core is taken only if all that
is made of its scores comes to the product with the values, and to the gradients of queries, keys and values.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from autopar.ir.blockwise.matches import EXPONENTIALS, GRADIENTS, OF_SCORES, AttentionCore, CoreValue, Terms
from autopar.ir.blockwise.products import CoreProducts, UnmatchedError, dot_dims
from autopar.ir.blockwise.spec import IN_PLACE, MOVES, SAME, Labels, moved, unified
from autopar.ir.graph import Graph, Literal, Operand, Operator
from autopar.ir.primitives import is_fusible


def find(graph: Graph, least_scores: int) -> tuple[AttentionCore, ...]:
    """The cores of attention of a graph; those in bodies of its operators are not looked at.

    Args:
        graph: a step, or a body.
        least_scores: elements of the scores of one head from which a core is looked for.
    """
    readers: dict[str, list[Operator]] = defaultdict(list)
    place = {op.id: n for n, op in enumerate(graph.operators)}
    candidates = [op for op in graph.operators if _may_be_scores(graph, op, least_scores)]
    if not candidates:
        return ()
    for op in graph.operators:
        for name in dict.fromkeys(op.reads):
            readers[name].append(op)
    cores: list[AttentionCore] = []
    taken: set[str] = set()
    for op in candidates:
        if op.id in taken:
            continue
        try:
            match = _Recognition(graph, op, readers, place).match()
        except UnmatchedError:
            continue
        if taken.isdisjoint(match.inside):
            taken |= match.inside
            cores.append(match)
    return tuple(cores)


def _may_be_scores(graph: Graph, op: Operator, least: int) -> bool:
    """Whether an operator is a product of two large free dims that one dim is contracted for."""
    if op.primitive != "dot_general" or len(op.reads) != 2:
        return False
    (contracted, _), (batch, _) = dot_dims(op)
    left = graph.operand_types(op)[0]
    free = [n for d, n in enumerate(left.shape) if d not in contracted and d not in batch]
    rest = op.results[0].type.shape[len(batch) + len(free) :]
    return bool(free) and bool(rest) and max(free) * max(rest) >= least


class _Recognition(CoreProducts):
    """Follows what is made of the result of one product; see `find`."""

    def match(self) -> AttentionCore:
        """The core. Raises UnmatchedError where there is none."""
        self.scores()
        queue = [(self.place[op.id], op.id) for op in self.readers[self.product.results[0].name]]
        heapq.heapify(queue)
        done = set()
        by_id = self.graph.by_id
        while queue:
            _, id = heapq.heappop(queue)
            if id in done:
                continue
            done.add(id)
            op = by_id[id]
            self.inside[id] = op
            result_value = self._made(op)
            if result_value is None:
                continue  # a product that leaves the core
            (result,) = op.results
            if result.name in self.returned:
                raise UnmatchedError
            self.known[result.name] = result_value
            for reader in self.readers[result.name]:
                heapq.heappush(queue, (self.place[reader.id], reader.id))
        return self.finished()

    def _made(self, op: Operator) -> CoreValue | None:
        """Role of an operator's result, from the roles of its operands; None for a product that leaves the core."""
        if op.effects or op.regions or len(op.results) != 1:
            raise UnmatchedError
        if op.primitive == "dot_general":
            self.leaves(op)
            return None
        if op.primitive in ("reduce_max", "reduce_sum"):
            return self._reduced(op)
        if op.primitive in MOVES or op.primitive in SAME:
            return self._moved(op)
        if op.primitive in IN_PLACE and is_fusible(op):
            return self._elementwise(op)
        raise UnmatchedError

    def _reduced(self, op: Operator) -> CoreValue:
        known, axes = self.known[op.reads[0]], op.ints("axes")
        labels = tuple(label for d, label in enumerate(known.labels) if d not in axes)
        over = [known.labels[d] for d in axes if self.types[op.reads[0]].shape[d] > 1]
        if known.kind == "other":
            return CoreValue("other", labels)
        if op.primitive == "reduce_max":
            if known.kind != "scores" or len(over) != 1 or over[0] is None:
                raise UnmatchedError
            return self._largest(op, over[0], labels)
        if known.kind != "terms":
            raise UnmatchedError
        if not over or not known.terms.of:
            return CoreValue("terms", labels, known.terms)
        if over == [self.key_loop]:
            summed = known.terms.summed()
            if summed is not None:
                return CoreValue("terms", labels, summed)
        raise UnmatchedError

    def _largest(self, op: Operator, loop: int, labels: Labels) -> CoreValue:
        """The largest of each row: it says which dim the keys are, and what the softmax is of."""
        name = op.reads[0]
        if self.softmax not in ("", name):
            raise UnmatchedError
        at_left, at_right = loop in self.labels["left"], loop in self.labels["right"]
        if at_left == at_right:
            raise UnmatchedError
        self.softmax, self.key_loop = name, loop
        self.asking = "right" if at_left else "left"
        return CoreValue("largest", labels)

    def _moved(self, op: Operator) -> CoreValue:
        known, type = self.known[op.reads[0]], self.types[op.reads[0]]
        if len(op.operands) != 1:
            raise UnmatchedError
        labels = moved(op, type, known.labels) if op.primitive in MOVES else known.labels
        if labels is None:
            raise UnmatchedError
        if known.kind in ("scores", "slope"):
            (self.chain if known.kind == "scores" else self.back).append(op)
        return CoreValue(known.kind, labels, known.terms)

    def _elementwise(self, op: Operator) -> CoreValue:
        given = [None if isinstance(o, Literal) else self.known.get(o) for o in op.operands]
        labels = self._labels(op, given)
        kinds = {k.kind for k in given if k is not None}
        if "other" in kinds or (op.primitive in ("eq", "ge") and "largest" in kinds):
            return self._cancelled(op, given, labels)
        if "largest" in kinds:
            return self._of_largest(op, given, labels)
        if kinds == {"shifted"} and op.primitive == "exp":
            return CoreValue("terms", labels, EXPONENTIALS)
        if "shifted" in kinds:
            raise UnmatchedError
        if "terms" in kinds:
            terms = self._of_terms(op, given, labels)
            if terms is not None:
                return CoreValue("terms", labels, terms)
            return self._slope(op, given, labels)
        if "slope" in kinds:
            return self._slope(op, given, labels)
        self._outside(op, given, labels)
        self.chain.append(op)
        return CoreValue("scores", labels)

    def _labels(self, op: Operator, given: Sequence[CoreValue | None]) -> Labels:
        """Labels of the result: those of all operands that are known together."""
        rank = op.results[0].type.rank
        labels: Labels = (None,) * rank
        for operand, known in zip(op.operands, given, strict=True):
            if known is None or not self.types[str(operand)].rank:
                continue
            both = unified(labels, known.labels)
            if both is None:
                raise UnmatchedError
            labels = both
        missing = [i for i in self.labels["scores"] if i is not None and i not in labels]
        open_dims = [d for d, n in enumerate(op.results[0].type.shape) if n > 1 and labels[d] is None]
        if len(missing) == len(open_dims) == 1 and any(k is None for k in given):
            return tuple(missing[0] if d == open_dims[0] else i for d, i in enumerate(labels))
        return labels

    def _cancelled(self, op: Operator, given: Sequence[CoreValue | None], labels: Labels) -> CoreValue:
        """A result with an operand of no known kind: zero if it is multiplied by zero, else of no known kind."""
        zeros = [k is not None and k.kind == "terms" and not k.terms.of for k in given]
        if (op.primitive == "mul" and any(zeros)) or (op.primitive == "div" and zeros[0]):
            return CoreValue("terms", labels)
        if any(k is not None and k.kind == "slope" for k in given):
            raise UnmatchedError
        return CoreValue("other", labels)

    def _of_largest(self, op: Operator, given: Sequence[CoreValue | None], labels: Labels) -> CoreValue:
        """Role of the largest score of each row: itself, or the scores less it."""
        if op.primitive == "max":  # with what is no larger than any score
            (other,) = (o for o, k in zip(op.operands, given, strict=True) if k is None or k.kind != "largest")
            if isinstance(other, Literal) and other.text == "-inf":
                return CoreValue("largest", labels)
        first, last = (given[0], given[-1]) if len(given) == 2 else (None, None)
        if op.primitive == "sub" and op.operands[0] == self.softmax and last is not None and last.kind == "largest":
            assert first is not None
            return CoreValue("shifted", first.labels)
        raise UnmatchedError

    def _of_terms(self, op: Operator, given: Sequence[CoreValue | None], labels: Labels) -> Terms | None:
        """The terms that an operator makes of terms; None where it makes none."""
        if any(k is not None and k.kind == "terms" and k.terms == OF_SCORES for k in given):
            if op.primitive == "neg":
                return OF_SCORES.scaled(Fraction(-1))
            if op.primitive not in ("add", "add_any"):
                return None
        if op.primitive == "integer_pow":
            (only,) = given
            return None if only is None else only.terms.power(op.integer("y"))
        if op.primitive in ("neg", "square"):
            (only,) = given
            assert only is not None
            return only.terms.scaled(Fraction(-1)) if op.primitive == "neg" else only.terms.times(only.terms)
        if op.primitive not in ("mul", "div", "add", "add_any", "sub") or len(given) != 2:
            return None
        a, b = (self._terms_of(o, k, labels) for o, k in zip(op.operands, given, strict=True))
        if a is None or b is None:
            return None
        if op.primitive == "mul":
            return a.times(b)
        if op.primitive == "div":
            inverse = b.power(-1) if b.of else None
            return None if inverse is None else a.times(inverse)
        return a.plus(b, -1 if op.primitive == "sub" else 1)

    def _terms_of(self, operand: Operand, known: CoreValue | None, labels: Labels) -> Terms | None:
        """An operand as terms: a number, terms, or the gradient of the probabilities, which comes from outside."""
        if isinstance(operand, Literal):
            number = float(operand.text)
            return Terms.one().scaled(Fraction(number)) if math.isfinite(number) else None
        if known is not None:
            return known.terms if known.kind == "terms" else None
        return GRADIENTS if self.is_gradient(operand, labels) else None

    def _slope(self, op: Operator, given: Sequence[CoreValue | None], labels: Labels) -> CoreValue:
        """Result of an elementwise function of the gradient of the softmax's operand."""
        for operand, known in zip(op.operands, given, strict=True):
            if known is None or known.kind in ("scores", "slope"):
                continue
            if known.kind == "terms" and known.terms == OF_SCORES and known.labels == labels:
                self.starts(str(operand))
            else:
                raise UnmatchedError
        self._outside(op, given, labels)
        self.back.append(op)
        return CoreValue("slope", labels)

    def _outside(self, op: Operator, given: Sequence[CoreValue | None], labels: Labels) -> None:
        """Raises where a dim of a value from outside is of no known loop."""
        for operand, known in zip(op.operands, given, strict=True):
            if known is not None or isinstance(operand, Literal):
                continue
            type = self.types[operand]
            loops: Labels = ()
            if type.rank:
                loops = tuple(None if n == 1 else label for n, label in zip(type.shape, labels, strict=True))
            if any(n > 1 and label is None for n, label in zip(type.shape, loops, strict=True)):
                raise UnmatchedError
