"""Bounds of plans: what no plan of a step beats, however it is sliced, sharded, scheduled and recomputed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from autopar.cluster import Cluster
from autopar.cost import CostModel, operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.ir.analysis import live
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator, reads_fused
from autopar.plan import Plan


@dataclass(frozen=True)
class OperatorWork:
    """One operator and how often it runs.

    Args:
        dtypes: those that it may compute in.
        flops: of one run.
        bytes: that one run reads and writes at least.
        runs: in one step, at least.
        phase: that it is in.
    """

    dtypes: tuple[str, ...]
    flops: float
    bytes: float
    runs: float
    phase: str


@dataclass(frozen=True)
class BestRates:
    """What devices of a cluster reach at best.

    Args:
        cluster: the devices; where they differ the best of any is taken.
    """

    cluster: Cluster

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second."""
        kinds = self.cluster.device_types
        return max(d.memory_bandwidth * max(part for _, part in d.memory_efficiency.points) for d in kinds)

    @cached_property
    def _flops(self) -> dict[tuple[str, ...], float]:
        return {}

    def flops_rate(self, dtypes: tuple[str, ...]) -> float:
        """FLOPs a second in the fastest of some dtypes."""
        if dtypes not in self._flops:
            self._flops[dtypes] = max(
                d.flops(dtype) * max(part for _, part in d.compute_efficiency.points)
                for d in self.cluster.device_types
                for dtype in dtypes
            )
        return self._flops[dtypes]

    def seconds(self, dtypes: tuple[str, ...], flops: float, moved_bytes: float) -> float:
        """Seconds of work on one device, whichever takes longer: computing, or moving its bytes."""
        return max(flops / self.flops_rate(dtypes) if flops else 0.0, moved_bytes / self.memory_rate)


def bounded(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """A plan, of one stage or of several, where more than its sharding was free, with a bound over all of it.

    What the integer program proves of one stage is over shardings in one number of microbatches, with what one level
    of recomputation holds: it becomes ``sharding_bound``.

    Args:
        plan: its search has the bound of the integer program; None of several stages.
        graph: the step, in one microbatch.
        cluster: all devices.
    """
    search = plan.content.search
    whole_s = min(work_bound_s(graph, cluster), plan.step_time)
    search = msgspec.structs.replace(search, lower_bound=whole_s, sharding_bound=search.lower_bound)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def work_bound_s(graph: Graph, cluster: Cluster) -> float:
    """Seconds in which all devices together do the work of a step, each at the best rates that it reaches:

        T >= sum over operators of runs x max(FLOPs / best FLOP/s, bytes / best bytes/s) / number of devices

    Every operator runs on some devices, split or repeated but never less than once, in any number of microbatches; a
    device does one at a time. Counted are operators that go by memory however others are fused into them: those that
    are not `is_fusible`, and light ones whose results such an operator reads or the step returns. Where kernels are
    priced by what they read, of those that fuse only what they write is sure. Where devices differ the best rate of
    any is taken for all. Communication, launches, recomputation and waiting only add to it.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cluster: all devices.
    """
    rates = BestRates(cluster)
    by_rates: dict[tuple[tuple[str, ...], float, float], float] = defaultdict(float)
    for work in works_of(graph, fused=CostModel(cluster).fuses):
        by_rates[work.dtypes, work.flops, work.bytes] += work.runs
    total_s = 0.0
    for (dtypes, flops, moved), runs in by_rates.items():
        total_s += runs * rates.seconds(dtypes, flops, moved)
    return total_s / cluster.num_devices


def works_of(graph: Graph, *, fused: bool = False) -> Iterator[OperatorWork]:
    """What the operators of a step do that go by memory.

    Args:
        graph: the step.
        fused: reductions read what their operands are computed from, and what constants decide is never stored.
    """
    return _works(graph, {o.operand for o in graph.outputs}, 1.0, "update", fused)


def _works(graph: Graph, returned: set[object], runs: float, enclosing: str, fused: bool) -> Iterator[OperatorWork]:
    """What operators of a graph do, those in bodies of loops included, and are in memory for.

    Args:
        graph: the step or a body.
        returned: values that are stored in any case.
        runs: of the graph in a step.
        enclosing: phase of the operator whose body it is.
        fused: see `works_of`.
    """
    needed = live(graph.operators, (o.operand for o in graph.outputs))
    # Values that are in memory: made, or read, by something that does not compute where it is read.
    stored = {*returned, *(o for op in needed if not is_fusible(op) for o in op.reads)}
    computed = {i.name for i in graph.inputs} | {v.name for op in needed if not is_fusible(op) for v in op.results}
    for op in needed:
        phase = phase_of(op.scope, enclosing)
        if op.regions:
            if op.primitive in ("scan", "while"):
                inside = runs * Scan.of(op).length if op.primitive == "scan" else runs
                yield from _works(op.region("body"), set(), inside, phase, fused)
            continue
        if is_generator(op) or op.primitive in ALIASES:
            continue
        types = graph.operand_types(op)
        dtypes = tuple(sorted({t.dtype for t in types} | {v.type.dtype for v in op.results}))
        if fused and reads_fused(op):
            if sum(t.nbytes for o, t in zip(op.operands, types, strict=True) if o in computed):
                results = sum(v.type.nbytes for v in op.results if v.name in stored)
                yield OperatorWork(dtypes, operator_flops(op, types), float(results), runs, phase)
        elif not is_fusible(op):
            yield OperatorWork(dtypes, operator_flops(op, types), operator_bytes(op, types), runs, phase)
        elif any(v.name in stored for v in op.results):
            read = sum(t.nbytes for o, t in zip(op.operands, types, strict=True) if o in computed)
            yield OperatorWork(
                dtypes, operator_flops(op, types), float(sum(v.type.nbytes for v in op.results) + read), runs, phase
            )
