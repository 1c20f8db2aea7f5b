"""Values that a plan may keep in host memory: state that only the update needs, and stacks that loops take in slices.

Each layout of such an input is offered twice: on the device, and in the memory of the device's host between updates.
There it costs two moves a step (to the device and back), which overlap with nothing, and holds memory of the device
from its first reader to its last, as does its new value from where it is made to its last reader.

A stack that loops alone read, as parameters of layers that a model scans over, gradients of them, or what the forward
pass leaves for the backward pass, moves a slice at a time inside the loop that takes it, and out of the loop that makes
it: on the device there are slices alone (L2L, Pudipeddi et al., 2020). Each pass of a loop over it is a move of all of
it.

Host memory is a limit of its own, on the sum over all of this. It is stated as one more time at which all that is kept
on hosts is live, with bytes scaled so that the two limits are one number; see `host_usage`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.ir import Graph, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop, phase_of
from autopar.ir.primitives import ALIASES
from autopar.plan.text import bytes_text
from autopar.search.intra.host_update import ON_DEVICES, HostUpdate, host_update
from autopar.search.intra.sharding_problem import Array, NodeDraft, UsageDraft, Use, ValueDraft
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem
from autopar.solver.memory import least_memory

#: Kind of what is kept in host memory; its bytes are scaled, see `host_usage`.
HOST = "host"

_STATE = ("parameter", "optimizer")

#: What is said of a strategy that keeps its input there.
IN_HOST_MEMORY = ", in host memory"


@dataclass(frozen=True)
class Offloading:
    """Values of a graph that may be kept in host memory.

    Args:
        inputs: their names.
        stacks: names of inputs and of results of loops that loops take in slices.
        forced: whether these stacks must lie there.
        update: what must lie there, and the operators that run there.
        nested: stacks among the inputs of ``update`` that loops inside of a loop over microbatches take in slices.
        notes: why there are none, where the user asked for it and cannot have it.
    """

    inputs: frozenset[str] = frozenset()
    stacks: frozenset[str] = frozenset()
    forced: bool = False
    update: HostUpdate = ON_DEVICES
    nested: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


#: Nothing may lie there.
NOTHING = Offloading()


def offloading(problem: Problem) -> Offloading:
    """Values that may be kept in host memory, as the options and the cluster allow."""
    if problem.job.offload == "none":
        return NOTHING
    if any(g.host_bandwidth is None for g in problem.cluster.groups):
        text = f"offload={problem.job.offload!r} moves nothing to host memory: {problem.cluster.name} has no"
        return Offloading(notes=(f"{text} host_bandwidth for some of its nodes",))
    if problem.job.offload == "update":
        update = _cut(problem, frozenset())
        return Offloading(inputs=update.inputs, update=update)
    if problem.job.offload == "layers" and problem.subproblem.separate_programs:
        nested = nested_stacks(problem.graph)
        update = _cut(problem, nested)
        note = "offload='layers' finds no stack in this stage that loops over layers alone take"
        return Offloading(update.inputs, update=update, nested=nested, notes=() if nested else (note,))
    forced, graph = problem.job.offload == "layers", problem.graph
    notes = (*kept_whole(graph), *kept_by_recomputation(graph))
    return Offloading(movable(graph), stacks(graph), forced, notes=notes * forced)


def kept_whole(graph: Graph) -> tuple[str, ...]:
    """Note on gradients of stacks that stay on the devices because an operator of the update reads them whole."""
    loops = [op for op in graph.operators if op.primitive == "scan" and phase_of(op) == "backward"]
    gradients = {v.name: v.type for op in loops for v in op.results[Scan.of(op).num_carry :]}
    readers = [op for op in graph.operators if phase_of(op) == "update" and op.primitive != "scan"]
    whole = {o for op in readers for o in op.reads if o in gradients}
    if not whole:
        return ()
    place = next(op.source or op.id for op in readers if whole.intersection(op.reads))
    bytes = sum(gradients[name].nbytes for name in whole)
    return (f"{bytes_text(bytes)} of gradients of stacks stay on the devices: the update reads them whole ({place})",)


def kept_by_recomputation(graph: Graph) -> tuple[str, ...]:
    """A note on stacks of the state that stay on devices, since a pass that is computed again waits for whole stacks.

    The barrier before such a pass keeps the compiler from taking the first pass for it.
    """
    barriers = [op for op in graph.operators if op.primitive == "optimization_barrier"]
    inputs = {i.name: i.type for i in graph.inputs if i.role in _STATE}
    through = {v.name: o for op in barriers for o, v in zip(op.operands, op.results, strict=True) if o in inputs}
    loops = [Scan.of(op) for op in graph.operators if op.primitive == "scan"]
    operands = [op.operands for op in graph.operators if op.primitive == "scan"]
    sliced = {
        through.get(str(o), o) for loop, some in zip(loops, operands, strict=True) for o in some[loop.num_whole :]
    }
    kept = {o for o in through.values() if o in sliced}
    if not kept:
        return ()
    text = f"{bytes_text(sum(inputs[name].nbytes for name in kept))} of stacks of layers stay on the devices"
    return (f"{text}: recomputation reads them whole; remat='none', or jax.checkpoint of a layer, takes slices",)


def _cut(problem: Problem, nested: frozenset[str]) -> HostUpdate:
    """The cheapest cut of the update, one for all meshes; ``nested`` as of `Offloading`."""
    graph, cost = problem.graph, problem.cost_model
    key = problem.store.key("host update", graph, cost, nested)
    return problem.store.once(key, lambda: host_update(graph, movable(graph), cost, nested))


def nested_stacks(graph: Graph) -> frozenset[str]:
    """Inputs that the step replaces, and that its update reads and loops inside of a loop over microbatches, in slices.

    Such loops are those of a stage, whose passes are programs of one microbatch.
    """
    replaced = {o.updates for o in graph.outputs}
    returned = {o.operand for o in graph.outputs}
    taken: dict[str, bool] = {}
    for op in graph.operators:
        if not is_stage_loop(op):
            taken.update((o, taken.get(o, True) and _updates(op)) for o in op.reads)
            continue
        loop = Scan.of(op)
        inner = zip(op.operands, loop.body.inputs, strict=True)
        sliced = {o for n, (o, i) in enumerate(inner) if n < loop.num_consts and takes_slices(loop.body, i.name)}
        taken.update((o, taken.get(o, True) and o in sliced) for o in op.reads)
    loops = [op for op in graph.operators if is_stage_loop(op)]
    state = {i.name for i in graph.inputs if i.role in _STATE and i.name in replaced and i.name not in returned}
    read = {o for op in loops for o in op.reads}
    return frozenset(name for name in state & read if taken[name] and _has_slices(graph, name))


def takes_slices(graph: Graph, name: str) -> bool:
    """Whether loops alone read a value of a graph, each trip a slice of it."""
    readers = [op for op in graph.operators if name in op.reads]
    return (
        bool(readers)
        and all(o.operand != name for o in graph.outputs)
        and all(op.primitive == "scan" and name not in op.operands[: Scan.of(op).num_whole] for op in readers)
    )


def movable(graph: Graph) -> frozenset[str]:
    """Inputs that a step replaces and that its update alone reads: moments of an optimizer, master weights."""
    returned = Counter(o.operand for o in graph.outputs if isinstance(o.operand, str))
    replaced = {
        o.updates
        for o in graph.outputs
        if isinstance(o.operand, str) and returned[o.operand] == 1 and _makes(graph.producers.get(o.operand))
    }
    refused = {o for op in graph.operators if not _updates(op) for o in op.reads}
    refused.update(o for o in returned if isinstance(o, str))
    return frozenset(
        i.name
        for i in graph.inputs
        if i.name in replaced
        and i.name not in refused
        and i.type.rank
        and i.type.nbytes
        and not i.type.dtype.startswith("key<")
    )


def stacks(graph: Graph) -> frozenset[str]:
    """Values that loops alone take, in slices, and that come into the step or are the stacked result of a loop.

    An input that the step replaces is one of them only where what replaces it is, and nothing else reads that.
    """
    sliced, otherwise = set[str](), set[str]()
    results = set[str]()
    for op in graph.operators:
        if op.primitive != "scan":
            otherwise.update(op.reads)
            continue
        loop = Scan.of(op)
        otherwise.update(o for o in op.operands[: loop.num_whole] if isinstance(o, str))
        sliced.update(o for o in op.operands[loop.num_whole :] if isinstance(o, str))
        results.update(v.name for v in op.results[loop.num_carry :])
    returned = Counter(o.operand for o in graph.outputs if isinstance(o.operand, str))
    replaced = {o.updates: str(o.operand) for o in graph.outputs if o.updates is not None}
    unread = {name for name in results - sliced - otherwise if returned[name] == 1}
    state = {i.name for i in graph.inputs if i.role in _STATE and replaced.get(i.name, "") in unread | {""}}
    candidates = {name for name in (state | results) & sliced - otherwise if not returned[name]}
    return frozenset(name for name in candidates if _has_slices(graph, name))


def _has_slices(graph: Graph, name: str) -> bool:
    """Whether slices of a stack are arrays of numbers."""
    type = graph.types[name]
    return type.rank > 1 and bool(type.nbytes) and not type.dtype.startswith("key<")


def _makes(op: Operator | None) -> bool:
    """Whether an operator makes a value of its own."""
    return op is not None and op.primitive not in ALIASES


def _updates(op: Operator) -> bool:
    """Whether an operator is of the update, and takes an operand no earlier than it runs."""
    return phase_of(op) == "update" and not op.regions and op.primitive not in ALIASES


def share_bytes(cluster: Cluster) -> float:
    """Bytes of host memory that are there for each device; inf where that is unknown."""
    return min(
        math.inf if g.host_memory_bytes is None else g.host_memory_bytes / g.devices_per_node for g in cluster.groups
    )


def on_device(v: ValueDraft, bytes: Array) -> Array:
    """``bytes``, those of a value by strategy, where it is in device memory between updates; else 0."""
    return np.where(v.hosted, 0.0, bytes) if v.hosted else bytes


def host_usage(problem: Problem, v: ValueDraft, bytes: Array, stop: int) -> UsageDraft:
    """Host memory of a value, at a time after the step at which only such usages are live.

    Args:
        problem: its limit is what bytes of host memory are measured by.
        v: the value; of an input that is not donated the old and the new one are kept.
        bytes: bytes a device in each of its layouts.
        stop: end of the step.
    """
    assert v.node is not None
    once = not v.source or v.key in problem.job.donated
    kept = (bytes - on_device(v, bytes)) * (1 if once else 2)
    scale = problem.memory_limit_bytes / share_bytes(problem.cluster)
    return UsageDraft(v.node, stop, stop + 1, kept * scale, HOST, v.key)


def add_host_seconds(
    cost: CostModel, nodes: Sequence[NodeDraft], values: Mapping[str, ValueDraft], sizes: Mapping[str, int]
) -> None:
    """Adds to the costs of nodes the seconds a step of moving to the device and back what lies in host memory.

    Args:
        cost: what a move costs.
        nodes: all nodes.
        values: all values by key.
        sizes: of the mesh axes.
    """
    for v in values.values():
        if v.hosted and v.node is not None:
            layout_bytes = (k.local_bytes(v.type, sizes) for k in v.layouts)
            moves = [moves_s(cost, v, n) if there else 0.0 for there, n in zip(v.hosted, layout_bytes, strict=True)]
            nodes[v.node].costs = nodes[v.node].costs + np.array(moves)
        elif (use := moved_down(v)) is not None:
            down = [cost.host_s(k.local_bytes(v.type, sizes)) for k in use.required]
            nodes[use.node].costs = nodes[use.node].costs + np.array(down)


def moved_down(v: ValueDraft) -> Use | None:
    """The first use on the host of a value that lies on the device; None where there is none."""
    return next((u for u in v.uses if u.there), None) if not v.hosted and v.node is not None else None


def moves_s(cost: CostModel, v: ValueDraft, bytes: float) -> float:
    """Seconds a step of moving what lies in host memory to the device and back.

    Args:
        cost: what a move costs.
        v: the value: it goes to the device where an operator there reads it, and what replaces it comes back where one
            makes that. A stack goes to the device for each loop that takes it, and comes back once where one makes it.
        bytes: of one device's piece of it.
    """
    if v.trips == 1 and not v.alias:
        up = any(not u.there and not u.as_made for u in v.uses)
        down = not v.made_there and not v.replaced_there
        return (up + down) * cost.host_s(bytes)
    taken = sum(u.stacked for u in v.uses)
    return (taken + v.replaced) * v.weight * v.trips * cost.host_s(bytes / v.trips)


def hosted(values: Mapping[str, ValueDraft], choice: Sequence[int]) -> frozenset[str]:
    """Values that a choice keeps in host memory."""
    return frozenset(v.key for v in values.values() if v.hosted and v.node is not None and v.hosted[choice[v.node]])


def least_device_memory(problem: ChoiceProblem, usages: Sequence[UsageDraft]) -> float:
    """The least bytes of device memory with which some choice fits.

    What is kept on hosts is scaled by the limit. So for a larger limit the answer may be less: it is scaled to each
    answer until one holds. No answer is more than what would do, for a choice that fits the hosts fits that one.

    Args:
        problem: under a limit that nothing fits.
        usages: what the usages of ``problem`` are of, in the same order.
    """
    limit, least = problem.limit_bytes, least_memory(problem)[0]
    if limit is None or not any(u.kind == HOST for u in usages):
        return least
    while least > limit * (1 + 1e-9) and math.isfinite(least):
        scaled = tuple(
            replace(s, bytes=s.bytes * (least / limit)) if u.kind == HOST else s
            for s, u in zip(problem.usages, usages, strict=True)
        )
        problem, limit = replace(problem, usages=scaled, limit_bytes=least), least
        least = least_memory(problem)[0]
    return least


def down_s(cost: CostModel, values: Iterable[ValueDraft], choice: Sequence[int], sizes: Mapping[str, int]) -> float:
    """Seconds of moving to hosts what operators there take of values on devices.

    Args:
        cost: what moving takes.
        values: all of a step.
        choice: strategy of each node.
        sizes: of the mesh's axes.
    """
    used = ((v, moved_down(v)) for v in values)
    return sum(cost.host_s(u.required[choice[u.node]].local_bytes(v.type, sizes)) for v, u in used if u is not None)
