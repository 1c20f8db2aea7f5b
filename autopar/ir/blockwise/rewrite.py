"""`blockwise`: a graph whose cores of attention are one operator a pass, which keeps no scores.

The forward operator keeps the logarithm of each row's sum of exponentials; the backward operator makes the scores of a
block again from it (Dao et al., "FlashAttention", 2022, section 3.1). What lies between the product and the softmax
(scale, mask, cap) is a region of the operator, ``scores``, and its derivative another, ``gradient``: whatever is
computed element by element there is computed block by block, positions and masks that are made of them included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.ir.analysis import live
from autopar.ir.blockwise.causal import is_causal
from autopar.ir.blockwise.matches import AttentionCore
from autopar.ir.blockwise.recognize import find
from autopar.ir.blockwise.spec import (
    ATTENTION,
    BACKWARD,
    MOVES,
    AttentionSpec,
    Labels,
    before,
    is_positional,
    labels_attr,
)
from autopar.ir.graph import Attr, Graph, Input, Operand, Operator, Output, Value
from autopar.ir.types import TensorType


@dataclass(frozen=True)
class Blockwise:
    """A rewritten graph.

    Args:
        graph: the graph.
        cores: by id of an operator ``attention`` or ``attention_backward`` the id of a product that it replaces.
        origins: by id of an operator in a region of theirs the id of that in the graph before.
    """

    graph: Graph
    cores: Mapping[str, str]
    origins: Mapping[str, str]


def blockwise(graph: Graph, least_scores: int) -> Blockwise:
    """``graph`` with attention in blocks; that in bodies of its operators is left as it is.

    What is no longer read is gone.

    Args:
        graph: a step, or a body.
        least_scores: elements of the scores of one head from which attention runs in blocks.
    """
    rewriting = _BlockRewriting(graph)
    for match in find(graph, least_scores):
        rewriting.add(match)
    return rewriting.result()


class _BlockRewriting:
    """See `blockwise`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.place = {op.id: n for n, op in enumerate(graph.operators)}
        self.before: dict[int, list[Operator]] = {}
        self.names: dict[str, str] = {}
        self.cores: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def result(self) -> Blockwise:
        """The graph with all that was added."""
        if not self.cores:
            return Blockwise(self.graph, {}, {})
        operators: list[Operator] = []
        for n, op in enumerate(self.graph.operators):
            operators += self.before.get(n, [])
            operators.append(op)
        renamed = [replace(op, operands=self._renamed(op.operands)) for op in operators]
        outputs = tuple(replace(o, operand=self._renamed([o.operand])[0]) for o in self.graph.outputs)
        kept = tuple(live(renamed, (o.operand for o in outputs)))
        return Blockwise(replace(self.graph, operators=kept, outputs=outputs), self.cores, self.origins)

    def _renamed(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(self.names.get(o, o) if isinstance(o, str) else o for o in operands)

    def _fresh(self, like: Operator, primitive: str) -> str:
        stem = f"{like.scope}/{primitive}" if like.scope else primitive
        self.counts[stem] += 1
        return f"{stem}.{self.counts[stem] - 1}"

    def add(self, match: AttentionCore) -> None:
        """One core; nothing where an operand is made too late for its new place."""
        backward = [p.op for p in (match.seen, *match.products.values()) if p is not None]
        back_at = min((self.place[op.id] for op in backward), default=-1)
        at = back_at if match.result is None else self.place[match.result.op.id]
        types = self.graph.types
        scores = Region(self.graph, match, [match.softmax], SCORES, types[match.product.results[0].name])
        slopes = [match.products[k].square for k in ("queries", "keys") if k in match.products]
        gradient = Region(self.graph, match, slopes, SLOPE, types[match.slope]) if slopes else None
        taken = [match.queries, match.keys, match.values, *(n for n, _ in scores.foreign)]
        late = [match.gradient, *(n for n, _ in (gradient.foreign if gradient is not None else ()))]
        if not self._there(taken, at) or (
            match.products and (back_at < at or not self._there([*taken, *late], back_at))
        ):
            return
        self.origins.update({**scores.origins, **(gradient.origins if gradient is not None else {})})
        attention = self._forward(match, scores, at)
        if match.products:
            self._backward(match, scores, gradient, attention, back_at)

    def _there(self, names: Sequence[str], at: int) -> bool:
        makers = self.graph.producers
        return all(not n or n not in makers or self.place[makers[n].id] < at for n in names)

    def _forward(self, match: AttentionCore, scores: Region, at: int) -> Operator:
        types = self.graph.types
        if match.result is not None:
            like, labels, type = match.result.op, match.result.labels, match.result.op.results[0].type
        else:
            assert match.seen is not None
            like, labels, type = match.seen.op, match.labels["gradient"], types[match.gradient]
        loops = zip(match.product.results[0].type.shape, match.labels["scores"], strict=True)
        rows = [(n, i) for n, i in loops if i != match.key_loop]
        given = tuple(match.labels[k] for k in ("queries", "keys", "values"))
        spec = AttentionSpec(
            match.key_loop,
            self._rows(match),
            (*given, *(k for _, k in scores.foreign)),
            (labels, tuple(i for _, i in rows)),
            match.labels["scores"],
            match.known[match.softmax].labels,
            match.known[match.slope].labels if match.slope else (),
            causal=self._is_causal(match, scores),
        )
        id = self._fresh(like, ATTENTION)
        sums = TensorType(tuple(n for n, _ in rows), types[match.softmax].dtype)
        op = Operator(
            id,
            ATTENTION,
            (match.queries, match.keys, match.values, *(n for n, _ in scores.foreign)),
            (Value(f"{id}:0", type), Value(f"{id}:1", sums)),
            tuple(sorted((*spec.attrs, *self._dtypes(match), *_precision(match)))),
            (("scores", scores.graph),),
            like.source,
            like.scope,
            marks=like.marks,
        )
        self.before.setdefault(at, []).append(op)
        self.cores[id] = like.id
        if match.result is not None:
            self.names[match.result.op.results[0].name] = f"{id}:0"
        return op

    def _backward(
        self, match: AttentionCore, scores: Region, gradient: Region | None, attention: Operator, at: int
    ) -> None:
        products = [(n, match.products[k]) for n, k in enumerate(("queries", "keys", "values")) if k in match.products]
        forward = AttentionSpec.of(attention)
        foreign = [*scores.foreign, *(gradient.foreign if gradient is not None else ())]
        first = (match.queries, match.keys, match.values, *(v.name for v in attention.results), match.gradient)
        spec = replace(
            forward,
            operands=(*forward.operands[:3], *forward.results, match.labels["gradient"], *(k for _, k in foreign)),
            results=tuple(p.labels for _, p in products),
            gradients=tuple(n for n, _ in products),
        )
        assert match.seen is not None
        like = match.seen.op
        id = self._fresh(like, BACKWARD)
        names = [id] if len(products) == 1 else [f"{id}:{n}" for n in range(len(products))]
        results = tuple(Value(name, p.op.results[0].type) for name, (_, p) in zip(names, products, strict=True))
        regions = (("scores", scores.graph), *(() if gradient is None else (("gradient", gradient.graph),)))
        attrs = tuple(sorted((*spec.attrs, *self._dtypes(match), *_precision(match))))
        operands = (*first, *(n for n, _ in foreign))
        op = Operator(id, BACKWARD, operands, results, attrs, regions, like.source, like.scope, (), like.marks)
        self.before.setdefault(at, []).append(op)
        self.cores[id] = like.id
        self.names.update((p.op.results[0].name, v.name) for v, (_, p) in zip(results, products, strict=True))

    def _dtypes(self, match: AttentionCore) -> tuple[tuple[str, str], ...]:
        """Dtypes of the probabilities in products with values and with the gradient, and of their own gradient."""
        names = {
            "probabilities": "" if match.result is None else match.result.square,
            "seen": "" if match.seen is None else match.seen.op.results[0].name,
            "weights": match.products["values"].square if "values" in match.products else "",
        }
        return tuple((k, self.graph.types[name or match.softmax].dtype) for k, name in names.items())

    def _is_causal(self, match: AttentionCore, scores: Region) -> bool:
        """Whether no token sees a later one of as many."""
        rows = self._rows(match)
        sizes = dict(zip(match.labels["scores"], match.product.results[0].type.shape, strict=True))
        same = rows is not None and sizes[rows] == sizes[match.key_loop]
        return rows is not None and same and is_causal(scores.graph, rows, match.key_loop)

    def _rows(self, match: AttentionCore) -> int | None:
        """The longest loop that the queries have alone."""
        sizes = dict(zip(match.labels["queries"], self.graph.types[match.queries].shape, strict=True))
        alone = [i for i in match.labels["queries"] if i in match.labels["scores"] and i not in match.labels["keys"]]
        return max((i for i in alone if i is not None), key=lambda i: (sizes[i], -i), default=None)


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
        """Operands of an operator, with their labels."""
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
        """The operator that makes ``name`` outside of the loop over blocks, if the loop may make its blocks instead."""
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
        """Whether a value depends on positions alone, not on any operand of the attention."""
        op = self.whole.producers.get(name)
        if op is None or not is_positional(op) or name in self.match.known:
            return False
        if op.primitive in MOVES and op.reads and before(op, self.whole.types[op.reads[0]], loops) is None:
            return False
        return all(self._of_positions(*key) for key in self._operands(op, loops))


def _precision(match: AttentionCore) -> tuple[tuple[str, Attr], ...]:
    """The attribute ``precision`` of the product that makes the scores; nothing where it asks for none."""
    return tuple((name, value) for name, value in match.product.attrs if name == "precision" and value is not None)
