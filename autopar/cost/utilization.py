"""FLOPs of the products of a step as it was written, of which the model FLOPs utilization of a plan is made."""

from __future__ import annotations

from autopar.cost.attention import ATTENTIONS
from autopar.cost.compute import operator_flops
from autopar.cost.work import PRODUCTS
from autopar.ir import Graph
from autopar.ir.loops import runs_inside

_COUNTED = PRODUCTS | ATTENTIONS | {"ragged_dot", "ragged_dot_general"}


def product_flops(graph: Graph) -> tuple[tuple[str, float], ...]:
    """Counts the FLOPs of products of one run of a graph by dtype of their left operand, loops and attention included.

    Divided by the peak rates of the devices it is the least time of a step, whose share of the step time is the model
    FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B). Products that the program itself recomputes count.

    Args:
        graph: the step as it was written.

    Returns:
        (dtype, FLOPs), in order of dtypes.
    """
    flops: dict[str, float] = {}
    for op in graph.operators:
        if op.primitive in _COUNTED:
            dtype = graph.operand_types(op)[0].dtype
            flops[dtype] = flops.get(dtype, 0.0) + operator_flops(op, graph.operand_types(op))
        elif op.regions:
            runs = runs_inside(op)
            for _, region in op.regions:
                for dtype, inner in product_flops(region):
                    flops[dtype] = flops.get(dtype, 0.0) + runs * inner
    return tuple(sorted(flops.items()))
