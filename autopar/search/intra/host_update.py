"""Chooses operators of an update that run on the host: a minimum cut between devices and hosts (ZeRO-Offload, section
3).

State that only the update reads lies on the host, and so do parameters of which the passes read narrower copies alone.
The operators between them and the gradients may run on either side.

Variables: the side of each elementwise operator of the update, and of the conversions of such parameters.
Objective: seconds of the link for each value that is made on one side and read on the other, and seconds of memory for
what is written by the side that runs it, on devices also for gradients that wait there for a norm.
Constraints: passes, reductions and products run on devices; inputs on the host begin there, and what replaces them ends
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from autopar.cost import CostModel
from autopar.ir import Graph, Layout, Operator
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ELEMENTWISE, is_generator

_HOST, _DEVICE = "host", "device"


@dataclass(frozen=True)
class HostUpdate:
    """Values and operators of a step on the host.

    Args:
        inputs: names of the inputs that lie there.
        operators: ids of the operators that run there.
    """

    inputs: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()


#: Nothing of an update is on the host.
ON_DEVICES = HostUpdate()


def host_update(
    graph: Graph, state: frozenset[str], cost: CostModel, nested: frozenset[str] = frozenset()
) -> HostUpdate:
    """The cheapest division of an update between devices and hosts: a minimum cut of its operators.

    Args:
        graph: a step.
        state: inputs that only the update reads, and that the step replaces.
        cost: what moves, and the memories of both sides, cost.
        nested: further inputs that lie on the host: loops over microbatches take slices of them, whatever the cut.
    """
    hosted = state | nested | masters(graph)
    returned = {o.operand for o in graph.outputs}
    replaced = {o.operand for o in graph.outputs if o.updates in hosted}
    nx: Any = import_module("networkx")  # it takes longer to load than small models to plan
    network = nx.DiGraph()
    network.add_nodes_from((_HOST, _DEVICE))
    sums = cost.cluster.num_devices > 1
    movable = {op.id for op in graph.operators if _may_run_there(op, hosted) or (not sums and _widens_gradient(op))}
    late = _late(graph, movable)
    for op in graph.operators:
        if op.id not in movable:
            network.add_edge(_side(op), _DEVICE)  # no capacity: never cut
            continue
        written = 2 * sum(v.type.nbytes for v in op.results if v.name in replaced)
        # Of two equal cuts the one with less on the host.
        network.add_edge(_side(op), _DEVICE, capacity=1 + _units(cost.host_memory_s(written)))
        again = 2 * sum(v.type.nbytes for v in op.results) if op.id in late else 0
        network.add_edge(_HOST, _side(op), capacity=_units(cost.device_memory_s(written + again)))
    for name, maker, readers in _values(graph, hosted):
        seconds = _units(cost.host_s(graph.types[name].nbytes))
        whole = (op for op in readers if name not in nested or not op.regions)
        ends = [*map(_side, whole)] + [_HOST if name in replaced else _DEVICE] * (name in returned)
        up, down = f"up {name}", f"down {name}"
        network.add_edge(maker, up, capacity=seconds)
        network.add_edge(down, maker, capacity=seconds)
        for end in ends:
            network.add_edge(up, end)
            network.add_edge(end, down)
    _, (there, _) = nx.minimum_cut(network, _HOST, _DEVICE)
    return HostUpdate(hosted, frozenset(id for id in movable if f"op {id}" in there))


def _late(graph: Graph, movable: AbstractSet[str]) -> frozenset[str]:
    """Movable operators that read a gradient after the update made a number of arrays, as a norm of all gradients: a
    device would hold it until then, and read and write it once more."""
    late, after, gradients = set[str](), set[str](), set[str]()
    for op in graph.operators:
        if phase_of(op) == "backward":
            gradients.update(v.name for v in op.results)
        elif phase_of(op) == "update" and (after.intersection(op.reads) or _reduces(op)):
            after.update(v.name for v in op.results)
            late.update({op.id} if gradients.intersection(op.reads) else ())
    return frozenset(late & movable)


def _reduces(op: Operator) -> bool:
    """Whether an operator makes a number of arrays."""
    return bool(op.reads) and op.primitive.startswith("reduce_") and not any(v.type.rank for v in op.results)


def masters(graph: Graph) -> frozenset[str]:
    """Inputs that the step replaces and of which passes read narrower copies alone."""
    returned = Counter(o.operand for o in graph.outputs if isinstance(o.operand, str))
    replaced = {o.updates for o in graph.outputs if isinstance(o.operand, str) and returned[o.operand] == 1}
    otherwise = {o for op in graph.operators if phase_of(op) != "update" and not _narrows(op) for o in op.reads}
    otherwise |= {o for op in graph.operators if op.regions for o in op.reads} | set(map(str, returned))
    narrowed = {o for op in graph.operators if _narrows(op) for o in op.reads}
    return frozenset(
        i.name for i in graph.inputs if i.name in (replaced & narrowed) - otherwise and i.type.rank and i.type.nbytes
    )


def _narrows(op: Operator) -> bool:
    """Whether an operator makes a narrower copy of its operand."""
    if op.primitive != "convert_element_type" or not op.reads:
        return False
    return op.results[0].type.dtype in ("bf16", "f16")


def _may_run_there(op: Operator, hosted: frozenset[str]) -> bool:
    """Whether an operator is elementwise, of arrays, and of the update or a conversion of what is hosted."""
    if op.effects or op.regions or is_generator(op) or not all(v.type.rank for v in op.results):
        return False
    if op.primitive == "broadcast_in_dim":
        return phase_of(op) == "update" and not op.attr("broadcast_dimensions")
    if op.primitive not in ELEMENTWISE:
        return False
    return phase_of(op) == "update" or (_narrows(op) and op.operands[0] in hosted)


def _widens_gradient(op: Operator) -> bool:
    """Whether an operator makes a gradient wider; on several devices that is added up as wide as it is kept, first."""
    if op.primitive != "convert_element_type" or not op.reads or phase_of(op) != "backward":
        return False
    return bool(op.results[0].type.rank) and op.results[0].type.dtype == "f32"


def _values(graph: Graph, hosted: frozenset[str]) -> Iterator[tuple[str, str, list[Operator]]]:
    """Name, side of the maker, and readers of every array that is made or comes in."""
    readers: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for name in dict.fromkeys(op.reads):
            readers.setdefault(name, []).append(op)
    for i in graph.inputs:
        yield i.name, _HOST if i.name in hosted else _DEVICE, readers.get(i.name, [])
    for op in graph.operators:
        if not is_generator(op):
            for v in op.results:
                yield v.name, _side(op), readers.get(v.name, [])


def _side(op: Operator) -> str:
    return f"op {op.id}"


def _units(seconds: float) -> int:
    """Capacity of an edge: whole femtoseconds, so that a cut does not depend on rounding."""
    return round(seconds * 1e15)


def written_s(cost: CostModel, op: Operator, layouts: Sequence[Layout], sizes: Mapping[str, int]) -> float:
    """Seconds of an operator on the host: of what it writes, each host running those of its devices one after another.

    Args:
        cost: what the host's memory costs.
        op: the operator.
        layouts: of its results.
        sizes: of the mesh axes.
    """
    bytes = sum(k.local_bytes(v.type, sizes) for k, v in zip(layouts, op.results, strict=True))
    return cost.host_memory_s(2 * bytes)
