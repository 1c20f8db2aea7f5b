"""`Region`: what lies between the scores and the softmax of a core, and its derivative, as graphs of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from autopar.ir.blockwise.dims import MOVES, Labels, before, is_positional
from autopar.ir.blockwise.matches import AttentionCore
from autopar.ir.blockwise.spec import labels_attr
from autopar.ir.graph import Graph, Input, Operator, Output, Value
from autopar.ir.types import TensorType

#: Inputs of regions: what the product of queries and keys makes, and the gradient of what the softmax is of.
SCORES, SLOPE = "scores", "slope"

#: A value, and the loops of its dims.
Key: TypeAlias = tuple[str, Labels]


class Region:
    """The operators between two values of a core as a graph of their own; a value may be in it with several labels.

    Args:
        whole: the graph that the core is in.
        match: the core.
        outputs: names of what it returns.
        start: `SCORES`, or `SLOPE` where it starts from the gradient of the softmax's operand too.
        type: of the start.
    """

    def __init__(
        self, whole: Graph, match: AttentionCore, outputs: Sequence[str], start: str, type: TensorType
    ) -> None:
        self.whole, self.match = whole, match
        self.origins: dict[str, str] = {}
        scores = match.product.results[0]
        given = {(scores.name, match.labels["scores"]): Input(SCORES, scores.type)}
        if start == SLOPE:
            given[match.slope, match.known[match.slope].labels] = Input(SLOPE, type)
        self.between = {v.name: op for op in match.between for v in op.results}
        wanted = [(name, match.known[name].labels) for name in outputs]
        inside, foreign = self._needed(wanted, frozenset(given))
        self.foreign = tuple(sorted(foreign, key=str))
        names = {key: i.name for key, i in given.items()}
        names.update((key, f"in.{n}") for n, key in enumerate(self.foreign))
        operators = self._operators(inside, names, start)
        inputs = (*given.values(), *(Input(f"in.{n}", whole.types[k]) for n, (k, _) in enumerate(self.foreign)))
        returned = tuple(Output(names[key], f"out.{n}", whole.types[key[0]]) for n, key in enumerate(wanted))
        self.graph = Graph(start, inputs, tuple(operators), returned)

    def _operators(self, inside: dict[Key, Operator], names: dict[Key, str], start: str) -> list[Operator]:
        """The operators, under names of their own, which are added to ``names``."""
        place = {op.id: n for n, op in enumerate(self.whole.operators)}
        operators: list[Operator] = []
        taken: Counter[str] = Counter()
        for key in sorted(inside, key=lambda key: (place[inside[key].id], str(key))):
            op = inside[key]
            taken[op.id] += 1
            id = f"{start}/{op.id}" if taken[op.id] == 1 else f"{start}/{op.id}.{taken[op.id]}"
            self.origins[id] = op.id
            names[key] = id
            reads = iter(self._operands(op, key[1]))
            operands = tuple(names[next(reads)] if isinstance(o, str) else o for o in op.operands)
            attrs = tuple(sorted((*op.attrs, labels_attr(key[1]))))
            results = (Value(id, op.results[0].type),)
            operators.append(replace(op, id=id, operands=operands, attrs=attrs, results=results))
        return operators

    def _needed(self, wanted: Sequence[Key], given: frozenset[Key]) -> tuple[dict[Key, Operator], set[Key]]:
        """The operators that make what is wanted, and what they take from outside."""
        inside: dict[Key, Operator] = {}
        foreign: set[Key] = set()
        left = list(wanted)
        while left:
            key = left.pop()
            if key in given or key in inside or key in foreign:
                continue
            op = self.between.get(key[0]) or self._pulled(*key)
            if op is None:
                foreign.add(key)
            else:
                inside[key] = op
                left += self._operands(op, key[1])
        return inside, foreign

    def _operands(self, op: Operator, loops: Labels) -> list[Key]:
        """What an operator takes, with labels."""
        every: list[Key] = []
        for name in op.reads:
            type = self.whole.types[name]
            known = self.match.known.get(name)
            if known is not None:
                every.append((name, known.labels))
            elif op.primitive in MOVES:
                earlier = before(op, type, loops)
                assert earlier is not None
                every.append((name, earlier))
            elif not type.rank:
                every.append((name, ()))
            else:
                every.append((name, tuple(None if n == 1 else i for n, i in zip(type.shape, loops, strict=True))))
        return every

    def _pulled(self, name: str, loops: Labels) -> Operator | None:
        """The operator that makes a value from outside, where its blocks are made as they are needed."""
        op = self.whole.producers.get(name)
        if op is None or not is_positional(op) or name in self.match.known:
            return None
        if op.primitive in MOVES and op.reads and before(op, self.whole.types[op.reads[0]], loops) is None:
            return None
        labels = self.match.labels
        alone = [i for i in loops if i is not None and i in labels["queries"] and i not in labels["keys"]]
        square = self.match.key_loop in loops and bool(alone)
        return op if square or not loops or self._of_positions(name, loops) else None

    def _of_positions(self, name: str, loops: Labels) -> bool:
        """Whether a value is made of positions alone."""
        op = self.whole.producers.get(name)
        if op is None or not is_positional(op) or name in self.match.known:
            return False
        if op.primitive in MOVES and op.reads and before(op, self.whole.types[op.reads[0]], loops) is None:
            return False
        return all(self._of_positions(*key) for key in self._operands(op, loops))
