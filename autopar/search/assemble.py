"""Makes a `Plan` from a sharding."""

from __future__ import annotations

from collections import Counter

import msgspec

from autopar.ir import Graph
from autopar.ir.fingerprint import fingerprint
from autopar.plan import (
    CombinedBytes,
    HostMemory,
    InputRecord,
    OutputRecord,
    Plan,
    PlanContent,
    SearchContent,
    Stage,
    StepForm,
)
from autopar.plan.text import bytes_text, seconds_text
from autopar.search.axis_roles import axis_roles
from autopar.search.clock import Clock
from autopar.search.intra import Sharding, ShardingProblem
from autopar.search.intra.overlap import link_class
from autopar.search.problem import Problem
from autopar.solver.meter import Work


def assemble(
    problem: Problem,
    sharding_problem: ShardingProblem,
    sharding: Sharding,
    search: SearchContent,
    clock: Clock,
) -> Plan:
    """The plan of one stage on all devices.

    Args:
        problem: what was planned.
        sharding_problem: the problem on the chosen mesh.
        sharding: what was chosen.
        search: its record. The bound of the plan is never above its step time: readers may share a conversion that the
            objective counts for each.
        clock: time of planning so far.
    """
    graph, cluster = problem.graph, problem.cluster
    problem.meter.add(Work.ASSEMBLED, len(sharding_problem.sites))
    stage = _stage(problem, sharding_problem, sharding)
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
        operators=sharding.operators,
        copies=sharding.copies,
        choices=sharding.choices,
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


def _stage(problem: Problem, sharding_problem: ShardingProblem, sharding: Sharding) -> Stage:
    """The only stage, on all devices."""
    joined = sharding.thresholds
    return Stage(
        mesh_axes=tuple(sharding_problem.mesh.axes),
        devices=tuple(range(problem.cluster.num_devices)),
        operators=tuple(r.id for r in sharding.operators),
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
        axis_roles=axis_roles(problem.graph, sharding_problem.mesh.axes, sharding.operators),
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
    travels = Counter(
        "sums" if o.collective_matmul == "result" else "operands" for o in sharding.operators if o.collective_matmul
    )
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
