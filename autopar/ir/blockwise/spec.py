"""`AttentionSpec`: which dim of the operands and results of an ``attention`` operator is which loop.

Loops are labels of dims. `moved`, `before` and `unified` carry labels through operators that keep or move dims, for
recognition as for rewriting; `labels_of` reads the ones that an operator of a region carries as an attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.ir.graph import Attr, Operator
from autopar.ir.primitives import ELEMENTWISE, is_fusible, is_generator
from autopar.ir.types import TensorType

#: By dim its loop; None where it has one element, or the value is the same along it.
Labels: TypeAlias = tuple[int | None, ...]

#: What keeps every value as it is, but for its dtype.
SAME = frozenset({"convert_element_type", "copy", "stop_gradient", "reduce_precision"})
#: What keeps every element where it is.
IN_PLACE = ELEMENTWISE | SAME
#: What moves dims, or adds some of one element.
MOVES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"})
#: Queries, keys, values, extras -> result, logarithms of the sums of exponentials.
ATTENTION = "attention"
#: Queries, keys, values, result, logarithms, gradient of the result, extras -> gradients of the first three.
BACKWARD = "attention_backward"

#: What the scores of one block take at most, in elements, where 256 keys leave a choice.
_BLOCK = 1 << 24
_LEAST_KEYS = 256


def moved(op: Operator, type: TensorType, labels: Labels) -> Labels | None:
    """Labels of the result of an operator of `MOVES`, from those of its operand; None where dims are joined."""
    result = op.results[0].type
    if op.primitive == "transpose":
        return tuple(labels[d] for d in op.ints("permutation"))
    if op.primitive == "broadcast_in_dim":
        by_dim: dict[int, int | None] = {}
        for at, label, n in zip(op.ints("broadcast_dimensions"), labels, type.shape, strict=True):
            by_dim[at] = label if n == result.shape[at] else None
        return tuple(by_dim.get(d) for d in range(result.rank))
    pairs = [(n, label) for n, label in zip(type.shape, labels, strict=True) if n != 1]
    if [n for n, _ in pairs] != [n for n in result.shape if n != 1]:
        return None
    left = iter(label for _, label in pairs)
    return tuple(None if n == 1 else next(left) for n in result.shape)


def before(op: Operator, type: TensorType, labels: Labels) -> Labels | None:
    """Labels of the operand's dims of a transpose, reshape or broadcast, from those of its result."""
    result = op.results[0].type
    if op.primitive == "transpose":
        order = op.ints("permutation")
        return tuple(labels[order.index(d)] for d in range(len(order)))
    if op.primitive == "broadcast_in_dim":
        at = op.ints("broadcast_dimensions")
        return tuple(None if n == 1 else labels[d] for d, n in zip(at, type.shape, strict=True))
    left = iter(label for n, label in zip(result.shape, labels, strict=True) if n != 1)
    if [n for n in result.shape if n != 1] != [n for n in type.shape if n != 1]:
        return None
    return tuple(None if n == 1 else next(left) for n in type.shape)


def unified(a: Labels, b: Labels) -> Labels | None:
    """Labels of two values of one rank together; None where a dim is another loop."""
    if len(a) != len(b) or any(x is not None and y is not None and x != y for x, y in zip(a, b, strict=True)):
        return None
    both = tuple(y if x is None else x for x, y in zip(a, b, strict=True))
    known = [x for x in both if x is not None]
    return both if len(known) == len(set(known)) else None


def is_positional(op: Operator) -> bool:
    """Whether a block of the result of an operator is made of blocks of its operands, and of where the block is."""
    if op.effects or op.regions or len(op.results) != 1 or op.primitive == "constant":
        return False
    return is_generator(op) or (is_fusible(op) and op.primitive in IN_PLACE | MOVES)


@dataclass(frozen=True)
class AttentionSpec:
    """Loops of an operator ``attention``, as over heads, queries and keys, by dim of its operands and results.

    Args:
        keys: number of the loop over keys.
        rows: of the loop over the tokens that ask; None where there is none.
        operands: by operand and dim the number of the loop; None where all blocks take the whole.
        results: by result and dim the number of the loop.
        scores: by dim of the scores the number of the loop.
        softmax: by dim of the softmax's operand the number of the loop.
        slope: by dim of the gradient of that operand the number of the loop.
        gradients: of an ``attention_backward``, which of queries, keys and values it has gradients of.
        causal: whether a mask leaves each row the keys up to its own alone.
    """

    keys: int
    rows: int | None
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    scores: Labels
    softmax: Labels
    slope: Labels = ()
    gradients: tuple[int, ...] = ()
    causal: bool = False

    @property
    def attrs(self) -> tuple[tuple[str, Attr], ...]:
        """The spec as attributes of an operator."""
        return (
            ("causal", self.causal),
            ("gradients", self.gradients),
            ("keys", self.keys),
            ("operands", tuple(map(_plain, self.operands))),
            ("results", tuple(map(_plain, self.results))),
            ("rows", -1 if self.rows is None else self.rows),
            ("scores", _plain(self.scores)),
            ("slope", _plain(self.slope)),
            ("softmax", _plain(self.softmax)),
        )

    @staticmethod
    def of(op: Operator) -> AttentionSpec:
        """Spec of an operator ``attention`` or ``attention_backward``."""
        rows = op.integer("rows")
        scores, softmax, slope = _read((op.attr("scores"), op.attr("softmax"), op.attr("slope")))
        return AttentionSpec(
            op.integer("keys"),
            None if rows < 0 else rows,
            _read(op.attr("operands")),
            _read(op.attr("results")),
            scores,
            softmax,
            slope,
            op.ints("gradients"),
            bool(op.attr("causal")),
        )

    @property
    def sums(self) -> Labels:
        """Loops of the dims of a value with one element a row, as the sum of exponentials."""
        return tuple(i for i in self.scores if i != self.keys)

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
        """Size of each loop, from the shapes of queries, keys and values, the first operands."""
        return {
            label: n
            for labels, shape in zip(self.operands[:3], shapes, strict=False)
            for label, n in zip(labels, shape, strict=True)
            if label is not None
        }

    def has_halves(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether scores that the mask leaves empty can be left out: rows and keys are taken in halves.

        Args:
            shapes: of queries, keys and values on one device.
        """
        if not self.causal or self.rows is None:
            return False
        sizes = self.sizes(shapes)
        return not (sizes[self.rows] % 2 or sizes[self.keys] % 2)

    def block_keys(self, sizes: dict[int, int]) -> int:
        """Keys of one block: as many as keep its scores small, a divisor of those that there are.

        Args:
            sizes: of the loops on one device.
        """
        keys, rest = sizes[self.keys], 1
        for label in self.scores:
            rest *= 1 if label is None or label == self.keys else sizes[label]
        while keys % 2 == 0 and keys // 2 >= _LEAST_KEYS and keys * rest > _BLOCK:
            keys //= 2
        return keys


def labels_attr(labels: Labels) -> tuple[str, Attr]:
    """The attribute of operators in regions that says which dim is which loop."""
    return ("labels", _plain(labels))


def labels_of(op: Operator) -> Labels:
    """The labels in `labels_attr`."""
    return _read((op.attr("labels"),))[0]


def _plain(labels: Labels) -> Attr:
    return tuple(-1 if label is None else label for label in labels)


def _read(value: Attr) -> tuple[Labels, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"not labels: {value!r}")
    every: list[Labels] = []
    for part in value:
        if not isinstance(part, tuple):
            raise TypeError(f"not labels: {part!r}")
        every.append(tuple(label if isinstance(label, int) and label >= 0 else None for label in part))
    return tuple(every)
