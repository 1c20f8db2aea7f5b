"""Elementwise values that one kernel alone computes, however many of its operators read them."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.primitives import is_fusible


def converging(graph: Graph) -> frozenset[str]:
    """Names of the values whose readers all run in one kernel: a product, a reduction, or what ends in one value.

    Of ``y = gelu(x)`` or of its derivative, values in between are read by several operators, which all go into one
    result: they are in no memory, as no kernel but that of the result reads them.

    Args:
        graph: whose operators are looked at, those of regions left out.
    """
    readers: dict[str, set[str]] = {}
    for op in graph.operators:
        for name in op.reads:
            readers.setdefault(name, set()).add(op.id)
    returned = {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    names: set[str] = set()
    kernel_of: dict[str, str] = {}
    for op in reversed(graph.operators):
        kernels = {kernel_of[r] for v in op.results for r in readers.get(v.name, ())}
        together = is_fusible(op) and len(kernels) == 1 and not any(v.name in returned for v in op.results)
        kernel_of[op.id] = kernels.pop() if together else op.id
        if together:
            names.update(v.name for v in op.results)
    return frozenset(names)
