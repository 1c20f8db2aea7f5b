"""Meaning of a choice: layouts, conversions, communication, seconds, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from autopar.cost import CostModel
from autopar.ir import Graph, Layout
from autopar.plan import CollectiveKind, Communication, Copy, Memory
from autopar.search.intra.collective_matmul import TimedCollectives, timed_collectives
from autopar.search.intra.collectives import PricedCollective, Thresholds, collectives
from autopar.search.intra.host import down_s, hosted, moves_s
from autopar.search.intra.memory import BESIDES, is_in_flight
from autopar.search.intra.program import Answer, Works, ends_of, program_costs
from autopar.search.intra.sharding_problem import ShardingProblem, UsageDraft, Use, ValueDraft
from autopar.search.intra.slices import slices_ahead
from autopar.search.intra.stage_loops import StageLoops, carried
from autopar.search.problem import Problem
from autopar.search.resharding import path_tables
from autopar.sharding.routes import Routes
from autopar.solver.meter import Work

_SHOWN_OPERATORS = 4


@dataclass(frozen=True)
class Sharding:
    """The sharding that a choice of strategies means.

    Args:
        inputs: layout of each top-level input by name.
        outputs: layout of each top-level output.
        copies: shared copies that differ from the value as made.
        communication: all collectives of a step, dearest first.
        compute_s: busy seconds of computing a step.
        communication_s: seconds of collectives a step.
        exposed_s: of them, those that computation does not hide.
        memory: bytes a device at the fullest time, by kind.
        work_times: seconds a step by kind of work, where there is a loop over microbatches.
        activation_bytes: bytes a device that the forward pass of one microbatch leaves for the backward pass.
        hosted: inputs that lie in host memory between updates.
        slices_ahead: how many trips ahead loops fetch slices of what lies there; None where none do.
        host_s: seconds a step of moving to the device and back these and stacks between loops that lie there.
        host_bytes: bytes a device of all of them.
        weight_stash_bytes: bytes a device that one microbatch keeps between its input and its weight gradients.
        accumulation_bytes: bytes a device of what microbatches add up.
        state_bytes: bytes a device of parameters and optimizer state that lie there between steps.
        starts_s: seconds that devices wait for the host to start kernels.
        program_s: seconds that the program of the cluster's stack takes beyond what was traced.
        thresholds: bytes up to which the compiler is asked to send collectives as one; None for its own.
        notes: lines on what is sent in formats of its own, and on what is not though it was asked for.
        memory_bound: as in `autopar.plan.PlanContent`.
        sent: all collectives, each alone, value by value.
        times: what collectives cost as they are sent.
    """

    inputs: Mapping[str, Layout]
    outputs: tuple[Layout, ...]
    copies: tuple[Copy, ...]
    communication: tuple[Communication, ...]
    compute_s: float
    communication_s: float
    exposed_s: float
    memory: Memory
    work_times: tuple[tuple[str, float], ...] = ()
    activation_bytes: int = 0
    hosted: frozenset[str] = frozenset()
    host_s: float = 0.0
    slices_ahead: int | None = None
    host_bytes: int = 0
    weight_stash_bytes: int = 0
    accumulation_bytes: int = 0
    state_bytes: int = 0
    starts_s: float = 0.0
    program_s: float = 0.0
    thresholds: Thresholds | None = None
    notes: tuple[str, ...] = ()
    memory_bound: bool = False
    sent: tuple[PricedCollective, ...] = field(default=(), repr=False)
    times: TimedCollectives = field(default=TimedCollectives((), (), ()), repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.exposed_s + self.host_s + self.starts_s + self.program_s


def extract(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    thresholds: Thresholds | None = None,
) -> Sharding:
    """The sharding that ``choice`` means.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node of ``stated.problem``.
        thresholds: bytes up to which the compiler is asked to send collectives as one; None for its own.
    """
    problem.meter.add(Work.EXTRACTED, len(sharding_problem.sites))
    layouts = value_layouts(sharding_problem, choice)
    copies = copy_layouts(sharding_problem, choice, layouts)
    if not sharding_problem.memory_bound and _exceeds_limit(problem, sharding_problem, choice, layouts, copies):
        sharding_problem = replace(sharding_problem, memory_bound=True)
    by_work = Works(problem.graph, problem.cost_model, problem.subproblem.met)
    sent = tuple(collectives(problem, sharding_problem, choice, layouts, copies))
    times = timed_collectives(problem, sharding_problem, choice, sent, thresholds)
    communication = _communication(times.sent, times.exposed_s, by_work)
    ends = ends_of(sharding_problem.sites) if problem.cost_model.stack.start_s else frozenset()
    for s in sharding_problem.sites:
        by_work.add(s.id, s.phase, float(s.seconds[choice[s.node]]) + times.longer_s.get(s.id, 0.0))
        by_work.start(s, ends)
    program_s = 0.0
    for more in program_costs(Answer(problem, sharding_problem, choice, layouts, times.sent, times.exposed_s, ends)):
        program_s += by_work.add_cost(more)
    there = hosted(sharding_problem.values, choice)
    moved = {
        k: layouts[k].local_bytes(sharding_problem.values[k].type, sharding_problem.mesh.sizes) for k in sorted(there)
    }
    in_passes = _sliced_s(problem.cost_model, sharding_problem, moved)
    host_s = float(sum(moves_s(problem.cost_model, sharding_problem.values[k], n) for k, n in moved.items()))
    host_s += down_s(problem.cost_model, sharding_problem.values.values(), choice, sharding_problem.mesh.sizes)
    for consumer, phase, seconds in in_passes:
        by_work.add(consumer, phase, seconds)
    by_work.add("", "update", host_s - sum(seconds for _, _, seconds in in_passes))
    first_touch_s = _first_touch_s(problem, sharding_problem, choice)
    by_work.add("", "update", first_touch_s)
    longer_s = sum(times.longer_s.values())
    return Sharding(
        inputs={i.name: layouts[i.name] for i in problem.graph.inputs},
        outputs=_outputs(problem.graph, sharding_problem, choice),
        copies=tuple(Copy(k, str(layout), phase) for k, by in copies.items() for phase, layout in by.items()),
        communication=communication,
        compute_s=float(sum(s.seconds[choice[s.node]] for s in sharding_problem.sites)) + first_touch_s + longer_s,
        communication_s=sum(c.seconds for c in communication),
        exposed_s=float(sum(times.exposed_s)),
        memory=memory_of(sharding_problem, choice),
        work_times=by_work.times(),
        activation_bytes=_activation_bytes(sharding_problem, by_work.loops, layouts),
        weight_stash_bytes=_weight_stash_bytes(sharding_problem, by_work.loops, layouts, by_work.sent),
        accumulation_bytes=_accumulation_bytes(sharding_problem, problem.graph, layouts),
        state_bytes=_state_bytes(sharding_problem, problem.graph, layouts, there),
        hosted=frozenset(i.name for i in problem.graph.inputs if i.name in there),
        host_s=host_s,
        slices_ahead=slices_ahead((sharding_problem.values[k] for k in sorted(there)), sharding_problem.mesh),
        host_bytes=sum(n for k, n in moved.items() if not _is_other_name(sharding_problem.values[k])),
        starts_s=by_work.stall_s,
        program_s=program_s,
        thresholds=thresholds,
        notes=_wire_notes(sharding_problem, sent),
        memory_bound=sharding_problem.memory_bound,
        sent=sent,
        times=times,
    )


def _exceeds_limit(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    layouts: Mapping[str, Layout],
    copies: Mapping[str, Mapping[str, Layout]],
) -> bool:
    """Whether what one pass converts for itself leaves no room if it is held for the next one.

    Usages count such a conversion while it is read, once in each pass. Programs that are not memory bound convert once.
    """
    if not sharding_problem.usages:
        return False
    change = np.zeros(max(u.stop for u in sharding_problem.usages) + 1)
    tables = path_tables(sharding_problem.mesh, problem.cost_model)
    for v in sharding_problem.values.values():
        if v.key not in layouts or len({u.phase for u in v.uses}) < 2:
            continue
        routes = Routes(tables.sending(v.wire), v.sent, layouts[v.key], dict(copies.get(v.key, {})))
        readers: dict[tuple[str, Layout], list[Use]] = defaultdict(list)
        for use in v.uses:
            readers[routes.place(use.required[choice[use.node]], use.phase)].append(use)
        for (phase, layout), uses in readers.items():
            shared = layout in (layouts[v.key], routes.copies.get(phase))
            if not shared and len({u.phase for u in uses}) > 1:
                ends = sorted(min(u.time, len(change) - 1) for u in uses)
                held_bytes = layout.local_bytes(v.type, sharding_problem.mesh.sizes)
                change[ends[0] + 1 : ends[0] + 2] += held_bytes
                change[ends[-1] : ends[-1] + 1] -= held_bytes
    held = np.cumsum(change)
    if not held.any():
        return False
    counted = _held([u for u in sharding_problem.usages if u.kind not in BESIDES], choice)
    return bool((counted[: len(held)] + held[: len(counted)]).max() > problem.memory_limit_bytes)


def _wire_notes(sharding_problem: ShardingProblem, sent: Sequence[PricedCollective]) -> tuple[str, ...]:
    """A line for each format that was asked for: whether any collective sends codes of it."""
    asked = sorted({v.wire for v in sharding_problem.values.values() if v.wire})
    sends = {c.wire for c in sent}
    texts = {wire: wire.replace("/", " in blocks of ") for wire in asked}
    return tuple(
        f"gathered or added up as {texts[wire]}, as wire= says"
        if wire in sends
        else f"wire= has no effect: no collective of this plan sends what is marked as {texts[wire]}"
        for wire in asked
    )


def _outputs(graph: Graph, sharding_problem: ShardingProblem, choice: Sequence[int]) -> tuple[Layout, ...]:
    """Layouts of the results."""
    return tuple(
        Layout.replicated(o.type.rank) if port is None else port[1][choice[port[0]]]
        for o, port in zip(graph.outputs, sharding_problem.outputs, strict=True)
    )


def _first_touch_s(problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int]) -> float:
    """Seconds that the first writing of what a step makes takes longer, where devices say."""
    touches = any(d.first_touch_bandwidth is not None for d in problem.cluster.device_types)
    made_bytes = _computed_bytes(sharding_problem, problem.graph, choice) if touches else 0.0
    return problem.cost_model.first_touch_s(made_bytes)


def _activation_bytes(sharding_problem: ShardingProblem, loops: StageLoops, layouts: Mapping[str, Layout]) -> int:
    """Bytes of what the loop over microbatches makes in the forward pass and reads in the backward pass."""
    sizes = sharding_problem.mesh.sizes
    total = 0
    for v in sharding_problem.values.values():
        if v.key in layouts and is_in_flight(v, loops):
            total += layouts[v.key].local_bytes(v.type, sizes)
    return total


def _weight_stash_bytes(
    sharding_problem: ShardingProblem, loops: StageLoops, layouts: Mapping[str, Layout], sent: frozenset[str]
) -> int:
    """Bytes of what the backward pass makes on the way to what leaves the stage, and gradients of parameters read.

    ``sent`` is that of `_sent`.
    """
    computed = {
        prefix + v.name
        for prefix, body in loops.bodies.items()
        for op in body.operators
        if prefix + op.id in sent
        for v in op.results
    }
    total = 0
    for key in sorted(computed & layouts.keys()):
        v = sharding_problem.values[key]
        put_off = any(u.phase == "backward" and loops.outermost(u.consumer) not in sent for u in v.uses)
        if v.phase == "backward" and not v.alias and put_off:
            total += layouts[key].local_bytes(v.type, sharding_problem.mesh.sizes)
    return total


def _accumulation_bytes(sharding_problem: ShardingProblem, graph: Graph, layouts: Mapping[str, Layout]) -> int:
    """Bytes of what loops over microbatches carry on from one to the next: gradients, losses."""
    sizes = sharding_problem.mesh.sizes
    return sum(layouts[v.name].local_bytes(v.type, sizes) for v in carried(graph) if v.name in layouts)


def _state_bytes(
    sharding_problem: ShardingProblem, graph: Graph, layouts: Mapping[str, Layout], there: frozenset[str]
) -> int:
    """Bytes of parameters and optimizer state, but for what lies ``there``, in host memory."""
    state = (i for i in graph.inputs if i.role in ("parameter", "optimizer") and i.name not in there)
    return sum(layouts[i.name].local_bytes(i.type, sharding_problem.mesh.sizes) for i in state)


def value_layouts(sharding_problem: ShardingProblem, choice: Sequence[int]) -> dict[str, Layout]:
    """The layout in which a choice makes every value that has one."""
    return {
        v.key: v.layouts[choice[v.node]] for v in sharding_problem.values.values() if v.node is not None and v.layouts
    }


def copy_layouts(
    sharding_problem: ShardingProblem, choice: Sequence[int], layouts: Mapping[str, Layout]
) -> dict[str, dict[str, Layout]]:
    """Layout of the shared copies that differ from the value as made, by value and phase."""
    copies: dict[str, dict[str, Layout]] = defaultdict(dict)
    for c in sharding_problem.copies:
        layout = c.layouts[choice[c.node]]
        if layout != layouts[c.key]:
            for phase in c.phases:
                copies[c.key][phase] = layout
    return dict(copies)


def _is_other_name(v: ValueDraft) -> bool:
    """Whether what lies in host memory is counted under the name of what it replaces, or that it comes in by."""
    return v.made_there or v.alias


def _sliced_s(
    cost: CostModel, sharding_problem: ShardingProblem, moved: Mapping[str, int]
) -> list[tuple[str, str, float]]:
    """Phase and seconds a step of slices from hosts, by loop inside of a loop over microbatches."""
    stacks = ((sharding_problem.values[k], n) for k, n in moved.items() if sharding_problem.values[k].alias)
    return [
        (u.consumer, u.phase, v.weight * v.trips * cost.host_s(bytes / v.trips))
        for v, bytes in stacks
        for u in v.uses
        if u.stacked
    ]


def _communication(
    sent: Sequence[PricedCollective], exposed: Sequence[float], by_work: Works
) -> tuple[Communication, ...]:
    total: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    users: dict[tuple[str, int, str], dict[str, None]] = defaultdict(dict)
    for c, seconds in zip(sent, exposed, strict=True):
        key = (c.kind, c.bytes, c.axis)
        total[key][0] += c.weight
        total[key][1] += c.seconds
        by_work.add(c.use.consumer, c.use.phase, seconds)
        users[key][c.use.consumer] = None
    records = [
        Communication(
            cast("CollectiveKind", kind),
            full_bytes,
            axis,
            count,
            0,
            seconds,
            tuple(users[kind, full_bytes, axis])[:_SHOWN_OPERATORS],
        )
        for (kind, full_bytes, axis), (count, seconds) in total.items()
    ]
    return tuple(sorted(records, key=lambda r: (-r.seconds, r.kind, -r.bytes, r.axis)))


def memory_of(sharding_problem: ShardingProblem, choice: Sequence[int]) -> Memory:
    """Bytes a device by kind at the fullest moment of a choice."""
    if not sharding_problem.usages:
        return Memory()
    views = views_of(sharding_problem, choice)
    usages = [u for u in sharding_problem.usages if u.key not in views and u.kind not in BESIDES]
    fullest = int(np.argmax(_held(usages, choice)))
    kinds: dict[str, int] = defaultdict(int)
    for u in usages:
        if u.start <= fullest < u.stop:
            kinds[u.kind] += int(u.bytes[choice[u.node]])
    return Memory(**kinds)


def _held(usages: Sequence[UsageDraft], choice: Sequence[int]) -> np.ndarray:
    """Bytes that ``usages`` hold together at every time."""
    change = np.zeros(max((u.stop for u in usages), default=0) + 1)
    for u in usages:
        held = u.bytes[choice[u.node]]
        change[u.start] += held
        change[u.stop] -= held
    return np.cumsum(change)


def _computed_bytes(sharding_problem: ShardingProblem, graph: Graph, choice: Sequence[int]) -> float:
    """Most bytes a device at any time of what a step makes and gives up again: no inputs, and no results."""
    kept = {i.name for i in graph.inputs} | {o.operand for o in graph.outputs} | views_of(sharding_problem, choice)
    computed = [u for u in sharding_problem.usages if u.key not in kept and u.kind not in BESIDES]
    return float(_held(computed, choice).max()) if computed else 0.0


def views_of(sharding_problem: ShardingProblem, choice: Sequence[int]) -> frozenset[str]:
    """Values that are inputs in another shape, taken by all as they lie: they need no memory of their own.

    The problem counts them, for whether they lie as the input does is a matter of two choices.
    """
    views = []
    for v in sharding_problem.values.values():
        if not v.view or v.node is None:
            continue
        source = sharding_problem.values[v.view]
        assert source.node is not None
        taken = [u for u in source.uses if u.consumer == v.key]
        layout = v.layouts[choice[v.node]]
        moved = any(u.required[choice[u.node]] != source.layouts[choice[source.node]] for u in taken)
        if taken and not moved and all(u.required[choice[u.node]] == layout for u in v.uses):
            views.append(v.key)
    return frozenset(views)
