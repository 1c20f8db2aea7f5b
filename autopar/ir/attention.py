"""Finds the core of attention in a graph: the operators that one fused kernel computes of queries, keys and values.

The scores are what a product with batch dims makes and elementwise operators go on with; they are divided by a sum over
themselves, which distinguishes them from the hidden values of experts; and products with batch dims take them. So it is
in the forward pass (softmax) and in the backward pass (its gradient subtracts a sum over itself).
Dao et al., "FlashAttention", 2022, section 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from autopar.ir.graph import Graph, Operator
from autopar.ir.primitives import REDUCTIONS, is_fusible


def attention_cores(graph: Graph) -> dict[str, bool]:
    """The operators of the core of attention in one graph; those in bodies of its operators are not looked at.

    Args:
        graph: a step, or a body.

    Returns:
        By id whether a mask that no data decides leaves out some of the scores, as a causal one does.
    """
    readers: dict[str, list[Operator]] = defaultdict(list)
    for op in graph.operators:
        for name in op.reads:
            readers[name].append(op)
    cores: dict[str, bool] = {}
    for op in graph.operators:
        if _is_batched(op):
            core = _core_of(graph, op, readers)
            masked = any(_is_masked(graph, inside) for inside in core)
            cores |= {inside.id: masked or cores.get(inside.id, False) for inside in core}
    return cores


def on_chip_operators(graph: Graph, cores: Collection[str]) -> frozenset[str]:
    """Operators of the core of attention whose results no other operator takes: one kernel never writes them.

    Args:
        graph: a step, or a body.
        cores: ids from `attention_cores`.
    """
    elsewhere = {o for op in graph.operators if op.id not in cores for o in op.reads}
    elsewhere |= {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    return frozenset(
        op.id for op in graph.operators if op.id in cores and elsewhere.isdisjoint(v.name for v in op.results)
    )


def _is_masked(graph: Graph, op: Operator) -> bool:
    """Whether an operator chooses among scores by what positions alone decide."""
    if op.primitive != "select_n":
        return False
    left, makers, types = [o for o in op.operands[:1] if isinstance(o, str)], graph.producers, graph.types
    while left:
        name = left.pop()
        maker = makers.get(name)
        if maker is None and types[name].dtype != "bool":
            return False
        left += [] if maker is None else maker.reads
    return True


def _is_batched(op: Operator) -> bool:
    """Whether an operator is a product with batch dims."""
    if op.primitive != "dot_general":
        return False
    numbers = op.attr("dimension_numbers")
    return isinstance(numbers, tuple) and isinstance(numbers[1], tuple) and bool(numbers[1][0])


def _core_of(graph: Graph, product: Operator, readers: Mapping[str, list[Operator]]) -> list[Operator]:
    """The operators between a product and those that take its scores, with both; none if it makes no scores."""
    (scores,) = product.results
    size = scores.type.size
    inside, normalized = _on_the_way(scores.name, size, readers)
    if not normalized:
        return []
    # What is multiplied with scores is of them too: probabilities that the forward pass kept.
    types = graph.types
    wide = {o for op in inside for o in op.reads if types[o].size == size} | {scores.name}
    wide |= {v.name for op in inside for v in op.results if v.type.size == size}
    takers = [op for name in sorted(wide) for op in _takers(name, size, readers)]
    return [product, *takers, *inside] if takers else []


def _on_the_way(start: str, size: int, readers: Mapping[str, list[Operator]]) -> tuple[list[Operator], bool]:
    """Elementwise operators and sums that go on from scores, and whether some sum comes back to scores."""
    inside: dict[str, Operator] = {}
    left: list[tuple[str, bool]] = [(start, False)]
    seen: set[tuple[str, bool]] = set(left)
    normalized = False
    while left:
        name, summed = left.pop()
        for op in readers.get(name, ()):
            if not (is_fusible(op) or op.primitive in REDUCTIONS):
                continue
            sums = op.primitive in REDUCTIONS
            for result in op.results:
                back = summed and result.type.size == size
                normalized |= back
                if result.type.size > size:
                    continue
                inside[op.id] = op
                step = (result.name, (summed or sums) and not back)
                if step not in seen:
                    seen.add(step)
                    left.append(step)
    return list(inside.values()), normalized


def _takers(name: str, size: int, readers: Mapping[str, list[Operator]]) -> Iterable[Operator]:
    """Products with batch dims that take a value, in another order or dtype too."""
    for op in readers.get(name, ()):
        if _is_batched(op):
            yield op
        elif is_fusible(op) and len(op.reads) == 1:
            for result in op.results:
                if result.type.size == size:
                    yield from _takers(result.name, size, readers)
