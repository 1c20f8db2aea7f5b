"""`AttentionSpec`: which dim of the operands and results of an ``attention`` operator is which loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.blockwise.dims import Labels
from autopar.ir.graph import Attr, Operator

#: Queries, keys, values, extras -> result, logarithms of the sums of exponentials.
ATTENTION = "attention"
#: Queries, keys, values, result, logarithms, gradient of the result, extras -> gradients of the first three.
BACKWARD = "attention_backward"

#: What the scores of one block take at most, in elements, where 256 keys leave a choice.
_BLOCK = 1 << 24
_LEAST_KEYS = 256


@dataclass(frozen=True)
class AttentionSpec:
    """Loops of an operator.

    Args:
        keys: number of the loop over keys.
        rows: of the loop over the tokens that ask; None where there is none.
        operands: by operand and dim the number of the loop; None where all blocks take the whole.
        results: likewise.
        scores: of the scores.
        softmax: of what the softmax is of.
        slope: of its gradient, as the region ``gradient`` takes it.
        gradients: of an ``attention_backward``, which of queries, keys and values it has gradients of.
        causal: whether no row has a key that comes after it, see `autopar.ir.blockwise.causal`.
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
        """Loops of the dims of what each row has one of."""
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
