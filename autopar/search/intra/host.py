"""State that a plan may keep in host memory while only the update of the step needs it.

Each layout of such an input is offered twice: on the device, and in the memory of the device's host between updates.
There it costs two moves a step (to the device and back), which overlap with nothing, and holds memory of the device
from its first reader to its last, as does its new value from where it is made to its last reader.

Host memory is a limit of its own, on the sum over all inputs. It is stated as one more time at which all that is kept
on hosts is live, with bytes scaled so that the two limits are one number; see `host_usage`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.ir import Graph, Operator
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES
from autopar.search.intra.draft import Array, NodeDraft, UsageDraft, ValueDraft
from autopar.search.problem import Problem
from autopar.solver import ChoiceProblem
from autopar.solver.memory import least_memory

#: Kind of what is kept in host memory; its bytes are scaled, see `host_usage`.
HOST = "host"

#: What is said of a strategy that keeps its input there.
IN_HOST_MEMORY = ", in host memory"


@dataclass(frozen=True)
class Offloading:
    """What of a graph may be kept in host memory.

    Args:
        inputs: their names.
        notes: why there are none, where the user asked for it and cannot have it.
    """

    inputs: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def offloading(problem: Problem) -> Offloading:
    """What may be kept in host memory, as the options and the cluster allow."""
    if problem.options.offload == "none":
        return Offloading()
    if any(g.host_bandwidth is None for g in problem.cluster.groups):
        text = f"offload={problem.options.offload!r} moves nothing to host memory: {problem.cluster.name} has no"
        return Offloading(notes=(f"{text} host_bandwidth for some of its nodes",))
    return Offloading(movable(problem.graph))


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


def _makes(op: Operator | None) -> bool:
    """Whether an operator makes a value of its own."""
    return op is not None and op.primitive not in ALIASES


def _updates(op: Operator) -> bool:
    """Whether an operator is of the update, and takes an operand no earlier than it runs."""
    return phase_of(op.scope) == "update" and not op.regions and op.primitive not in ALIASES


def share_bytes(cluster: Cluster) -> float:
    """Bytes of host memory that are there for each device; inf where that is unknown."""
    return min(
        math.inf if g.host_memory_bytes is None else g.host_memory_bytes / g.devices_per_node for g in cluster.groups
    )


def on_device(v: ValueDraft, bytes: Array) -> Array:
    """``own``, the bytes of a value by strategy, where it lies on the device between updates; else 0."""
    return np.where(v.hosted, 0.0, bytes) if v.hosted else bytes


def host_usage(problem: Problem, v: ValueDraft, bytes: Array, stop: int) -> UsageDraft:
    """What a value takes of host memory, at a time after the step at which only such usages are live.

    Args:
        problem: its limit is what bytes of host memory are measured by.
        v: the input; of one that is not donated the old and the new value are kept.
        bytes: bytes a device in each of its layouts.
        stop: end of the step.
    """
    assert v.node is not None
    kept = (bytes - on_device(v, bytes)) * (1 if v.key in problem.options.donated else 2)
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
            moves = [2 * cost.host_s(n) if there else 0.0 for there, n in zip(v.hosted, layout_bytes, strict=True)]
            nodes[v.node].costs = nodes[v.node].costs + np.array(moves)


def hosted(values: Mapping[str, ValueDraft], choice: Sequence[int]) -> frozenset[str]:
    """Inputs that a choice keeps in host memory."""
    return frozenset(v.key for v in values.values() if v.hosted and v.node is not None and v.hosted[choice[v.node]])


def least_device_memory(problem: ChoiceProblem, usages: Sequence[UsageDraft]) -> float:
    """The least bytes of device memory that would do, see `autopar.solver.memory.least_memory`.

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
