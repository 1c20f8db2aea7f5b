"""A bound that no pipeline of a step beats, however it is sliced, sharded and scheduled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.cluster import Cluster
from autopar.cost import operator_flops
from autopar.ir import Graph, Operator

_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")


def work_bound_s(graph: Graph, cluster: Cluster) -> float:
    """Seconds in which all devices together do the products of a step, each at the best rate that it reaches:

        T >= sum over dtypes of FLOPs(dtype) / sum over devices of FLOP/s(dtype) x best efficiency

    Every product of the step runs on some devices, split or repeated but never less than once; a device does one
    operator at a time. Sums over dtypes hold on equal devices; where devices differ the best rate of any of them in
    any dtype is taken for all, which is lower. Communication, memory, recomputation and waiting only add to it.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cluster: all devices.
    """
    by_dtype: dict[tuple[str, ...], float] = defaultdict(float)
    for dtypes, flops in _products(graph, _live(graph), 1.0):
        by_dtype[dtypes] += flops
    kinds = cluster.device_types
    if len(kinds) > 1:
        by_dtype = defaultdict(float, {tuple({d for names in by_dtype for d in names}): sum(by_dtype.values())})

    def rate(dtypes: tuple[str, ...]) -> float:
        best = (
            d.flops(dtype) * max(part for _, part in d.compute_efficiency.points) for d in kinds for dtype in dtypes
        )
        return max(best) * cluster.num_devices

    return sum(flops / rate(dtypes) for dtypes, flops in by_dtype.items() if flops)


def _live(graph: Graph) -> list[Operator]:
    """Operators that some output depends on: the others are in no stage."""
    needed = {o.operand for o in graph.outputs}
    found = []
    for op in reversed(graph.operators):
        if op.effects or any(v.name in needed for v in op.results):
            found.append(op)
            needed.update(op.operands)
    return found


def _products(graph: Graph, operators: Sequence[Operator], trips: float) -> Iterator[tuple[tuple[str, ...], float]]:
    """Dtypes that each product among ``operators`` may count as, and its FLOPs."""
    for op in operators:
        if op.primitive in _PRODUCTS:
            types = graph.operand_types(op)
            dtypes = tuple(sorted({t.dtype for t in types} | {v.type.dtype for v in op.results}))
            yield dtypes, trips * operator_flops(op, types)
        elif op.primitive in ("scan", "while"):
            body = op.region("body")
            inside = trips * op.integer("length") if op.primitive == "scan" else trips
            yield from _products(body, body.operators, inside)
