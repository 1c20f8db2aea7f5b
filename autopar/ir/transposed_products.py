"""Products that a transposition alone reads, such as gradients of weights, computed with their operands swapped.

XLA for CPUs folds such a transposition into its product. Where several dims are summed over, the folded product reads
both of its matrices against their order and takes up to twice the CPU time of the product of swapped operands, whose
result comes in the order that is read. `transposed_products` finds them for prices and programs; `swapped` is how a
program computes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from autopar.ir.algebra.contractions import dimension_numbers
from autopar.ir.graph import Graph


def transposed_products(graph: Graph) -> dict[str, str]:
    """Ids of transpositions that swap the free dims of a product which nothing else reads, by the product's id."""
    reads = Counter(name for op in graph.operators for name in op.reads)
    reads.update(o.operand for o in graph.outputs if isinstance(o.operand, str))
    transpositions: dict[str, str] = {}
    for op in graph.operators:
        maker = graph.producers.get(op.reads[0]) if op.primitive == "transpose" and op.reads else None
        if maker is None or maker.primitive != "dot_general" or reads[op.reads[0]] > 1:
            continue
        (summed, _), (shared, _) = dimension_numbers(maker)
        free = graph.type_of(maker.operands[0]).rank - len(summed)
        rank = maker.results[0].type.rank
        if not shared and op.ints("permutation") == (*range(free, rank), *range(free)):
            transpositions[maker.id] = op.id
    return transpositions


def swapped(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parameters of a ``dot_general`` whose operands are swapped; None where their precision names one of them."""
    ((left, right), (left_batch, right_batch)) = params["dimension_numbers"]
    precision = params.get("precision")
    if isinstance(precision, tuple):
        if len(set(precision)) > 1:
            return None
    elif precision is not None:
        return None
    return {**params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
