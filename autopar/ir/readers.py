"""Values by the operators that read them: those that products alone read, those that one kernel alone reads.

`read_by_products` finds values whose precision is that of multipliers: of float32 such a reader takes as many bits as
the multipliers of its device do. `converging` finds values that are in no memory. What they cost is decided in
`autopar.search.intra`.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import DENSE_CONTRACTIONS, RESHAPES, is_fusible

_SAME_ELEMENTS = RESHAPES | {"transpose"}
_AS_THE_DEVICE_MULTIPLIES = (None, "DEFAULT", ("DEFAULT", "DEFAULT"))


def read_by_products(graph: Graph, prefix: str = "", phase: str = "update") -> frozenset[str]:
    """Keys of the float32 values whose only readers are products without a precision of their own.

    Args:
        graph: a step, or the body of a loop.
        prefix: names of the enclosing regions; they stand before the names of values, as in ``loop/body/x``.
        phase: of operators whose scope names none.

    A reader that takes the same elements in another shape counts as its own readers do, a loop as its body. Updates of
    parameters do not count, as they take what is stored. What a graph returns, or a loop carries, has other readers.
    """
    readers: dict[str, bool] = {o.operand: False for o in graph.outputs if isinstance(o.operand, str)}
    keys: set[str] = set()
    for op in reversed(graph.operators):
        at = phase_of(op, phase)
        if at == "update":
            continue
        inside: frozenset[str] = frozenset()
        if op.primitive == "scan":
            inside = read_by_products(op.region("body"), f"{prefix}{op.id}/body/", at)
            keys |= inside
        for i, name in enumerate(op.operands):
            if isinstance(name, str):
                readers[name] = readers.get(name, True) and _takes_products(op, i, readers, inside, prefix)
    types = {i.name: i.type for i in graph.inputs} | {v.name: v.type for op in graph.operators for v in op.results}
    return frozenset({*keys, *(prefix + n for n, alone in readers.items() if alone and types[n].dtype == "f32")})


def _takes_products(op: Operator, operand: int, readers: dict[str, bool], inside: frozenset[str], prefix: str) -> bool:
    """Whether an operator takes an operand for products alone."""
    if op.primitive in DENSE_CONTRACTIONS:
        return op.attr("precision") in _AS_THE_DEVICE_MULTIPLIES
    if op.primitive in _SAME_ELEMENTS:
        return readers.get(op.results[0].name, False)
    if op.primitive == "scan":
        loop = Scan.of(op)
        carried = loop.num_consts <= operand < loop.num_whole
        return not carried and f"{prefix}{op.id}/body/{loop.body.inputs[operand].name}" in inside
    return False


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
