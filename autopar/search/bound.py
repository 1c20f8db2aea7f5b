"""Bounds of plans: what no plan of a step beats, however it is sliced, sharded, scheduled and recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from autopar.cluster import Cluster
from autopar.cost import CostModel, operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.ir.analysis import live, unread_effects
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import ALIASES, is_fusible, is_generator, reads_fused
from autopar.microbatch import batch_size
from autopar.plan import Plan
from autopar.search.attention_blocks import block_scores
from autopar.search.bounds.pipelines import least_of_all_s, microbatches_of
from autopar.search.bounds.workers import Workers, workers_of
from autopar.search.critical_path import in_every_microbatch
from autopar.search.problem import Problem
from autopar.search.sure_work import SureWork, sure_works


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


@dataclass(frozen=True)
class Freedom:
    """Over which plans a bound holds.

    Args:
        one_stage: whether plans of one stage are among them.
        most_stages: stages that others have at most, workers of them at most as many; 0 where there are none.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        updates_on_hosts: whether hosts may compute the update.
        is_synchronous: whether, of several stages, those that take what others make wait for it in every step: for
            all of a microbatch at once, with nothing that steps before have left.
        microbatches: their number; None for any.
    """

    one_stage: bool = True
    most_stages: int = 0
    block_scores: int = 0
    updates_on_hosts: bool = False
    is_synchronous: bool = True
    microbatches: int | None = None

    @staticmethod
    def of(problem: Problem) -> Freedom:
        """What a problem leaves free, or asks for: `autopar.search.enumeration.forms`."""
        o, devices, asked = problem.options, problem.cluster.num_devices, problem.options.num_stages
        on_one_mesh = o.mesh_shape is not None and math.prod(o.mesh_shape) == devices
        on_one_mesh = on_one_mesh and o.schedule in ("auto", "none") and not unread_effects(problem.graph)
        several = 0 if devices == 1 or on_one_mesh else devices
        count, size = o.num_microbatches, batch_size(problem.graph)
        return Freedom(
            one_stage=asked is None or asked == 1,
            most_stages=several if asked is None else asked if asked > 1 else 0,
            block_scores=block_scores(problem),
            updates_on_hosts=o.offload in ("auto", "update"),
            is_synchronous=not o.names_pipeline,
            # The last batch of a data set may be smaller, and take another number.
            microbatches=count if count is not None and size and size % count == 0 else None,
        )


@dataclass(frozen=True)
class _KeptBound:
    """A bound that was computed.

    Args:
        graph, cost: of which.
        seconds: the bound.
    """

    graph: Graph
    cost: CostModel
    seconds: float

    @property
    def entries(self) -> int:
        """What a `Memo` counts."""
        return 1


def bounded(plan: Plan, problem: Problem, freedom: Freedom) -> Plan:
    """A plan, of one stage or of several, where more than its sharding was free, with a bound over all of it.

    What the integer program proves of one stage is over shardings in one number of microbatches, with what one level
    of recomputation holds: it becomes ``sharding_bound``.

    Args:
        plan: its search has the bound of the integer program; None of several stages.
        problem: the step, in one microbatch, and all devices.
        freedom: over which plans the bound holds.
    """
    search = plan.content.search
    key, graph, cost = ("bound", id(problem.graph), freedom), problem.graph, problem.cost_model
    known = problem.memo.get(key)
    if not isinstance(known, _KeptBound) or known.graph is not graph or known.cost != cost:
        known = _KeptBound(graph, cost, work_bound_s(graph, cost, freedom))
        problem.memo.keep(key, known)
    whole_s = min(known.seconds, plan.step_time)
    search = msgspec.structs.replace(search, lower_bound=whole_s, sharding_bound=search.lower_bound)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def work_bound_s(graph: Graph, cost: CostModel, freedom: Freedom | None = None) -> float:
    """Seconds that no plan of a step is below, however it is sliced, sharded, scheduled and recomputed.

    One stage is one worker that has all D devices; stages are on W workers that have k each. Of all numbers of workers
    and of microbatches that are free the least holds (`autopar.search.bounds.pipelines` has the formulas). In one stage
    each device does a part of every operator, of a D-th at least, one after the other. What counts as an operator's
    work is sure in any plan (`sure_work`). Of one of m microbatches the operators of a chain run one after another, on
    whatever devices (`critical_path`): the bubble of few microbatches.
    Where devices differ the best of any is taken for all. Communication, recomputation and other waiting only add to
    it. Prices of other classes than `CostModel` may be anything: of them nothing is known.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cost: what things cost on all devices.
        freedom: over which plans it holds.
    """
    if type(cost) is not CostModel:
        return 0.0
    devices = cost.cluster.num_devices
    freedom = freedom or Freedom(most_stages=devices)
    counts = list(microbatches_of(freedom.microbatches, batch_size(graph) or 1))
    every = in_every_microbatch(graph, counts[-1][1])
    bounds = [math.inf]
    if freedom.one_stage:
        works = _works_of(graph, cost, freedom, in_stages=False)
        bounds.append(least_of_all_s(graph, cost, works, every, [Workers(1, devices, devices)], counts[:1]))
    if freedom.most_stages:
        works, most = _works_of(graph, cost, freedom, in_stages=True), min(devices, freedom.most_stages)
        some = workers_of(cost.cluster, most)
        waits = freedom.is_synchronous
        bounds.append(least_of_all_s(graph, cost, works, every, some, counts, waits=waits))
    least_s = min(bounds)
    return least_s if math.isfinite(least_s) else 0.0


def _works_of(graph: Graph, cost: CostModel, freedom: Freedom, *, in_stages: bool) -> list[SureWork]:
    """What is done in any plan, but for what hosts may do."""
    works = sure_works(graph, cost, freedom.block_scores, in_stages=in_stages)
    return [work for work in works if not (freedom.updates_on_hosts and work.phase == "update")]


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
