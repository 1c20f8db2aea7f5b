"""`cheapest_saved`: the values to hold with which a layer's cheap operators can run again, of least bytes.

For operators o that may run again and values v, with sides F (there from the forward pass) and B (made or taken in
the backward pass), the least

    sum of bytes(v) over results v of o, with o in F and v in B

such that v is in B where the backward pass needs it, an operator's operands are in B where it is in B, and operators
that are not repeated are in F. That is a minimum cut; the networks of recomputation are from Jain et al.
(Checkmate, MLSys'20) and, as a cut, from PyTorch's AOTAutograd ("min-cut rematerialization").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any

from autopar.ir import Graph, Operator

_SOURCE, _SINK = "forward pass", "backward pass"


def cheapest_saved(
    graph: Graph,
    needed: Iterable[str],
    maker: Callable[[str], Operator | None],
    repeats: Callable[[Operator], bool],
    saved: Collection[str],
) -> frozenset[str]:
    """Values to hold, besides ``held``, so that all of ``needed`` are held or can be made again from what is.

    Args:
        graph: types of values.
        needed: values that the backward pass takes.
        maker: the operator that makes a value; None for one that is there anyway, as inputs of the graph are.
        repeats: whether an operator may run again for this.
        saved: values that are held already, which costs nothing.

    Returns those with the fewest bytes; of several such sets the one with which the least runs again.
    """
    nx: Any = import_module("networkx")  # it takes longer to load than small models to plan
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    stack = list(dict.fromkeys(needed))
    for name in stack:
        network.add_edge(("value", name), _SINK)
    seen = set(stack)
    while stack:
        name = stack.pop()
        op = None if name in saved else maker(name)
        if op is None:
            continue
        if op.id not in network:
            network.add_node(op.id)
            if not repeats(op):
                network.add_edge(_SOURCE, op.id)
            else:
                for operand in op.reads:
                    network.add_edge(("value", operand), op.id)
                    if operand not in seen:
                        seen.add(operand)
                        stack.append(operand)
        network.add_edge(op.id, ("value", name), capacity=graph.types[name].nbytes)
    _, (_, behind) = nx.minimum_cut(network, _SOURCE, _SINK)
    crossing = (
        (op, value) for op, value in network.edges if op not in behind and value in behind and isinstance(value, tuple)
    )
    return frozenset(value[1] for _, value in crossing)
