"""Makes a `Plan` from a sharding; `renamed` gives it as the answer of another strategy.

`axis_roles` says which dims of products with parameters each mesh axis splits. The graph is needed because layouts
alone do not tell a matrix from what it is multiplied by: an axis that splits labels by examples may still share the
matrices of every layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from autopar.cost.compute import operator_flops
from autopar.ir import Graph, Layout, Operator
from autopar.ir.fingerprint import fingerprint
from autopar.ir.loops import Scan, While, runs_inside
from autopar.ir.phases import MICROBATCHES, STAGE
from autopar.ir.primitives import DENSE_CONTRACTIONS
from autopar.plan import (
    AxisRole,
    CombinedBytes,
    HostMemory,
    InputRecord,
    OperatorRecord,
    OutputRecord,
    Plan,
    PlanContent,
    SearchContent,
    Stage,
    StepForm,
)
from autopar.plan.text import bytes_text, seconds_text
from autopar.plan.types import AxisUse
from autopar.search.clock import Clock
from autopar.search.intra import Sharding, ShardingProblem
from autopar.search.intra.overlap import link_class
from autopar.search.intra.records import operator_records, reasons_of
from autopar.search.problem import Problem
from autopar.sharding import rule_for
from autopar.solver.meter import Work


def assemble(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    sharding: Sharding,
    search: SearchContent,
    clock: Clock,
) -> Plan:
    """The plan of one stage on all devices.

    Args:
        problem: what was planned.
        sharding_problem: the problem on the chosen mesh.
        choice: strategy of each node of it.
        sharding: what it means.
        search: its record. The bound of the plan is never above its step time: readers may share a conversion that the
            objective counts for each.
        clock: time of planning so far.
    """
    graph, cluster = problem.graph, problem.cluster
    problem.meter.add(Work.ASSEMBLED, len(sharding_problem.sites))
    operators = operator_records(problem, sharding_problem, choice, sharding.times.matmuls)
    stage = _stage(problem, sharding_problem, sharding, operators)
    bound_s = None if search.lower_bound is None else min(search.lower_bound, stage.step_time)
    content = PlanContent(
        program=graph.name,
        fingerprint=fingerprint(graph),
        cluster=cluster.to_json(),
        cluster_name=str(cluster),
        step_time=stage.step_time,
        peak_memory=sharding.memory.total,
        num_microbatches=problem.job.num_microbatches or 1,
        schedule="none",
        stages=(stage,),
        inputs=_inputs(graph, sharding),
        outputs=tuple(
            OutputRecord(o.path, str(o.type), str(layout), o.updates)
            for o, layout in zip(graph.outputs, sharding.outputs, strict=True)
        ),
        operators=operators,
        copies=sharding.copies,
        choices=reasons_of(sharding_problem, choice),
        search=msgspec.structs.replace(search, lower_bound=bound_s),
        notes=(
            *sharding_problem.notes,
            *sharding.notes,
            *_batch_notes(problem, sharding),
            *_overlap_notes(sharding),
            *_matmul_notes(sharding),
            *_joining_notes(sharding),
        ),
        memory_bound=sharding.memory_bound,
        memory_limit=problem.memory_limit_bytes,
        donated=tuple(i.name for i in graph.inputs if i.name in problem.job.donated),
    )
    return Plan(content, clock.phases())


def _stage(
    problem: Problem, sharding_problem: ShardingProblem, sharding: Sharding, operators: Sequence[OperatorRecord]
) -> Stage:
    """The only stage, on all devices."""
    joined = sharding.thresholds
    return Stage(
        mesh_axes=tuple(sharding_problem.mesh.axes),
        devices=tuple(range(problem.cluster.num_devices)),
        operators=tuple(r.id for r in operators),
        step_time=sharding.step_s,
        compute_time=sharding.compute_s,
        memory=sharding.memory,
        collectives=sharding.communication,
        work_times=sharding.work_times,
        activation_bytes=sharding.activation_bytes,
        host=HostMemory(sharding.host_bytes, sharding.host_s),
        weight_stash_bytes=sharding.weight_stash_bytes,
        accumulation_bytes=sharding.accumulation_bytes,
        state_bytes=sharding.state_bytes,
        form=StepForm(microbatches=problem.job.num_microbatches or 1, slices_ahead=sharding.slices_ahead),
        thresholds=None if joined is None else CombinedBytes(int(joined.combine_bytes), int(joined.gather_bytes)),
        axis_roles=axis_roles(problem.graph, sharding_problem.mesh.axes, operators),
    )


def _inputs(graph: Graph, sharding: Sharding) -> tuple[InputRecord, ...]:
    """Records of inputs."""
    return tuple(
        InputRecord(
            i.name,
            str(i.type),
            i.role,
            str(sharding.inputs[i.name]),
            memory="host" if i.name in sharding.hosted else "device",
        )
        for i in graph.inputs
    )


def step_bound_s(problem: Problem, sharding_problem: ShardingProblem, lower_bound: float | None) -> float | None:
    """Seconds below which no step on one mesh can be, from the least sum of computation and collectives.

    Where they run in parallel with each other the longest of the resources takes its share of the sum or more, but for
    what joining collectives saves; and no step is shorter than what the fastest choices of all operators compute.
    """
    cost = problem.cost_model
    hides = problem.request.collective_matmul != "none" and cost.computes_while_sending
    least_s = float(sum(s.seconds.min() for s in sharding_problem.sites))
    if lower_bound is None or not (cost.knows_kernels or hides):
        return lower_bound
    if hides:
        return min(least_s, lower_bound)
    if not cost.overlaps:
        return max(0.0, lower_bound) * min(cost.exposed_share(of_state=s) for s in (False, True))
    links = {link_class(sharding_problem.mesh, axis) for axis, n in sharding_problem.mesh.axes if n > 1}
    if cost.stack.combine_bytes or cost.stack.gather_bytes:
        return least_s
    return max(least_s, lower_bound / (1 + len(links)))


def _overlap_notes(sharding: Sharding) -> list[str]:
    """Says how much of the collectives overlaps with computation, and how long devices wait for the host."""
    hidden_s = sharding.communication_s - sharding.exposed_s
    if sharding.starts_s > 1e-3 * sharding.compute_s:
        return [f"devices wait {seconds_text(sharding.starts_s)} for the host to start their kernels"]
    if hidden_s <= 1e-3 * sharding.communication_s:
        return []
    total_s = sharding.compute_s + sharding.communication_s + sharding.host_s
    return [
        f"collectives of {seconds_text(hidden_s)} overlap with computation: "
        f"one after the other all would take {seconds_text(total_s)}"
    ]


def _matmul_notes(sharding: Sharding) -> list[str]:
    """Says how many products run in blocks."""
    travels = Counter("sums" if of == "result" else "operands" for of in sharding.times.matmuls.values())
    if not travels:
        return []
    counts = " and ".join(f"{travels[of]} of {of}" for of in ("operands", "sums") if travels[of])
    return [f"collective matmul: {counts} travel in blocks next to their products, no gather or scatter"]


def _joining_notes(sharding: Sharding) -> list[str]:
    """Says up to how many bytes the compiler is asked to send collectives as one."""
    t = sharding.thresholds
    if t is None:
        return []
    return [
        f"sums are sent together up to {bytes_text(int(t.combine_bytes))}, gathers up to "
        f"{bytes_text(int(t.gather_bytes))}: the compiler is asked to"
    ]


def _batch_notes(problem: Problem, sharding: Sharding) -> list[str]:
    """Says of batch arguments that no mesh axis divides that they are whole on every device."""
    notes = []
    for i in problem.graph.inputs:
        if i.role == "batch" and sharding.inputs[i.name].is_replicated and i.type.rank:
            n = problem.cluster.num_devices
            if n > 1 and all(d % p for d in i.type.shape for p in range(2, n + 1) if n % p == 0):
                notes.append(f"{i.name} {i.type} is whole on every device: no mesh axis divides any of its dims")
    return notes


def renamed(plan: Plan, strategy: str, *notes: str) -> Plan:
    """``plan`` as the answer of ``strategy``, with further notes."""
    search = msgspec.structs.replace(plan.content.search, strategy=strategy)
    content = msgspec.structs.replace(plan.content, search=search, notes=(*plan.content.notes, *notes))
    return replace(plan, content=content)


class _Source(Flag):
    """Sources of a value: the batch or another stage, parameters, optimizer state."""

    DATA = auto()
    PARAMETER = auto()
    STATE = auto()


_CONSTANT: Final = _Source(0)
_SOURCES: Final[Mapping[str, _Source]] = MappingProxyType(
    {"batch": _Source.DATA, "other": _Source.DATA, "parameter": _Source.PARAMETER, "optimizer": _Source.STATE}
)
_Uses: TypeAlias = tuple[AxisUse | None, ...]


def axis_roles(
    graph: Graph, mesh_axes: Sequence[tuple[str, int]], records: Sequence[OperatorRecord]
) -> tuple[AxisRole, ...]:
    """The uses of mesh axes, each with the share of the FLOPs of products of the batch with parameters that have it.

    Args:
        graph: a train step or a stage of one.
        mesh_axes: (axis, size).
        records: layouts of the operators of ``graph``.
    """
    axes = [axis for axis, size in mesh_axes if size > 1]
    if not axes:
        return ()
    walk = _Walk()
    walk.graph(graph, [_SOURCES.get(i.role, _CONSTANT) for i in graph.inputs], "", 1.0)
    flops: dict[tuple[str, AxisUse], float] = {}
    total = 0.0
    for record in records:
        product = walk.products.get(record.id)
        if product is None:
            continue
        total += product.flops
        layouts = [Layout.parse(text) for text in record.operands[:2]]
        for axis in axes:
            if (use := product.use_of(axis, layouts)) is not None:
                flops[axis, use] = flops.get((axis, use), 0.0) + product.flops
    split = _gradients_split(graph, records)
    return tuple(
        AxisRole(axis, use, round(n / total, 3), round(split[axis], 3)) for (axis, use), n in sorted(flops.items()) if n
    )


def _gradients_split(graph: Graph, records: Sequence[OperatorRecord]) -> Mapping[str, float]:
    """By mesh axis the share that it splits of what microbatches add up in the shape of a parameter."""
    loops = {op.id: op for op in graph.operators if {MICROBATCHES, STAGE}.intersection(op.marks)}
    shapes = {i.type.shape for i in graph.inputs if i.role == "parameter"} if loops else set()
    split, total = Counter[str](), 0
    for record in records if loops else ():
        if (op := loops.get(record.id)) is not None:
            for v, text in list(zip(op.results, record.results, strict=True))[: Scan.of(op).num_carry]:
                if v.type.shape in shapes:
                    total += v.type.size
                    split.update(dict.fromkeys(Layout.parse(text).axes, v.type.size))
    return defaultdict(float, {axis: size / total for axis, size in split.items()})


@dataclass(frozen=True)
class _Product:
    """A product of the batch with parameters.

    Args:
        flops: FLOPs of a step.
        sides: for each operand, that of parameters first, its number, and the use of an axis that splits each dim.
    """

    flops: float
    sides: tuple[tuple[int, _Uses], ...]

    def use_of(self, axis: str, layouts: Sequence[Layout]) -> AxisUse | None:
        """The use of an axis that splits the operands so; of one that splits both that in the parameter."""
        for number, uses in self.sides:
            for dim, use in zip(layouts[number].dims, uses, strict=True):
                if axis in dim and use is not None:
                    return use
        return None


class _Walk:
    """Follows sources through a graph and collects products by the ids that plans have for them."""

    def __init__(self) -> None:
        self.products: dict[str, _Product] = {}

    def graph(self, graph: Graph, inputs: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the outputs of a graph, from those of its inputs."""
        known = {i.name: source for i, source in zip(graph.inputs, inputs, strict=True)}
        for op in graph.operators:
            sources = [known.get(o, _CONSTANT) if isinstance(o, str) else _CONSTANT for o in op.operands]
            region = _REGIONS.get(op.primitive) if op.regions else None
            if region is not None:
                results = region(self, op, sources, f"{prefix}{op.id}/", runs_inside(op, runs))
            else:
                results = [reduce(or_, sources, _CONSTANT)] * len(op.results)
                if (product := _product(graph, op, sources, runs)) is not None:
                    self.products[prefix + op.id] = product
            known.update((v.name, source) for v, source in zip(op.results, results, strict=True))
        return [known.get(o.operand, _CONSTANT) if isinstance(o.operand, str) else _CONSTANT for o in graph.outputs]

    def scan(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of a scan."""
        scan = Scan.of(op)
        consts, carried, stacks = scan.split(sources)
        while True:
            results = self.graph(scan.body, [*consts, *carried, *stacks], f"{prefix}body/", runs)
            passed, rows = scan.split_results(results)
            joined = [a | b for a, b in zip(carried, passed, strict=True)]
            if joined == carried:
                return [*carried, *rows]
            carried = joined

    def while_loop(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of a while loop."""
        loop = While.of(op)
        _, in_body, carried = loop.split(sources)
        while True:
            results = self.graph(loop.body, [*in_body, *carried], f"{prefix}body/", runs)
            joined = [a | b for a, b in zip(carried, results, strict=True)]
            if joined == carried:
                return carried
            carried = joined

    def cond(self, op: Operator, sources: Sequence[_Source], prefix: str, runs: float) -> list[_Source]:
        """The sources of the results of branches."""
        branches = [self.graph(branch, sources[1:], f"{prefix}{name}/", runs) for name, branch in op.regions]
        return [reduce(or_, of_result) for of_result in zip(*branches, strict=True)]


_REGIONS: Final[Mapping[str, Callable[[_Walk, Operator, Sequence[_Source], str, float], list[_Source]]]] = (
    MappingProxyType({"scan": _Walk.scan, "while": _Walk.while_loop, "cond": _Walk.cond})
)


def _product(graph: Graph, op: Operator, sources: Sequence[_Source], runs: float) -> _Product | None:
    """``op`` as a product of the batch with parameters; None of other operators."""
    is_ragged = op.primitive == "ragged_dot"
    if not is_ragged and op.primitive not in DENSE_CONTRACTIONS:
        return None
    parameter = next((n for n in (0, 1) if sources[n] == _Source.PARAMETER and sources[1 - n] & _Source.DATA), None)
    if parameter is None:
        return None
    types = graph.operand_types(op)
    flops = runs * operator_flops(op, types)
    if is_ragged:
        return _Product(flops, ((1, ("expert", "tensor", "tensor")), (0, ("data", None)))) if parameter == 1 else None
    rule, _ = rule_for(op, types)
    of_parameter, of_data, result = rule.operands[parameter], rule.operands[1 - parameter], rule.results[0]
    shared = {*of_data}.intersection(result)
    inner: AxisUse = "space" if op.primitive == "conv_general_dilated" else "context"
    brought = [f for f in result if f is not None and f in of_data and f not in of_parameter]
    weights: _Uses = tuple("expert" if f is not None and f in shared else "tensor" for f in of_parameter)
    # The first dim that the batch brings is that of examples, unless there is but one.
    examples = None if types[1 - parameter].shape[:1] == (1,) else next(iter(brought), None)
    batch: _Uses = tuple(None if f not in brought else "data" if f == examples else inner for f in of_data)
    return _Product(flops, ((parameter, weights), (1 - parameter, batch)))
