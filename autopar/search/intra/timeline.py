"""Times of operators and collectives of one stage, and memory: the price of a plan over time.

The seconds are those of the price: list scheduling (`overlap`) where collectives overlap with computation,
else one after the other. Moves to the host and waits for it come at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.plan.details import Details, MemoryPoint, TimelineSlice
from autopar.search.intra.collectives import PricedCollective
from autopar.search.intra.extract import Sharding, views_of
from autopar.search.intra.memory import BESIDES
from autopar.search.intra.overlap import RegionSchedule, link_class, region_of
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.problem import Problem

#: Points in time at which memory is shown at most.
MOST_POINTS = 400
#: Operators up to which a timeline is kept with a plan.
MOST_OPERATORS = 20_000


def details_of(
    problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int], sharding: Sharding
) -> Details:
    """The timeline of a choice; nothing for programs of more than `MOST_OPERATORS` operators and stages of pipelines.

    The plan of a pipeline is made of its stages' contents alone, and a search plans hundreds of them.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node.
        sharding: from `extract`.
    """
    if problem.subproblem.separate_programs or len(sharding_problem.sites) > MOST_OPERATORS:
        return Details()
    sent, schedules = sharding.times.listed, sharding.times.schedules
    if schedules is not None:
        of_regions = schedules.of(sharding.thresholds)
        slices = _overlapped(of_regions, sharding_problem, sent)
    else:
        share = sharding.exposed_s / sharding.communication_s if sharding.communication_s else 0.0
        slices = _in_turn(sharding_problem, choice, sent, share)
    end = max((s.end_s for s in slices), default=0.0)
    starts = {s.name: s.start_s for s in slices if s.resource == "compute"}
    slices = [s for s in slices if s.end_s > s.start_s]
    total = sharding.compute_s + sharding.exposed_s + sharding.host_s + sharding.starts_s
    if total > end * (1 + 1e-9):
        slices.append(TimelineSlice("host, first touch and kernel starts", "host", end, total))
    return Details(slices=tuple(slices), memory=_memory(sharding_problem, choice, starts, max(end, total)))


def _overlapped(
    of_regions: Mapping[str, RegionSchedule], sharding_problem: ShardingProblem, sent: Sequence[PricedCollective]
) -> list[TimelineSlice]:
    """Slices of all regions: those of a loop lie where the loop is, all its iterations drawn as one."""
    slices: list[TimelineSlice] = []
    regions = {r.id for r in sharding_problem.region_sites}

    def draw(region: str, offset_s: float) -> None:
        schedule = of_regions[region]
        for id, start_s in schedule.timing.starts_s.items():
            if not id:
                continue
            end_s = schedule.timing.ends_s[id]
            slices.append(TimelineSlice(id, "compute", offset_s + start_s, offset_s + end_s))
            if id in regions:
                draw(id, offset_s + start_s)
        for n, transfer, start_s in zip(schedule.sent, schedule.transfers, schedule.timing.carried_s, strict=True):
            end_s = offset_s + start_s + transfer.seconds
            slices.append(TimelineSlice(_called(sent[n]), transfer.link, offset_s + start_s, end_s))

    draw("", 0.0)
    return sorted(slices, key=lambda s: (s.start_s, s.resource, -s.end_s, s.name))


def _in_turn(
    sharding_problem: ShardingProblem, choice: Sequence[int], sent: Sequence[PricedCollective], share: float
) -> list[TimelineSlice]:
    """Slices one after the other, collectives before the operator that takes the value."""
    regions = {r.id for r in sharding_problem.region_sites}
    before: dict[str, list[PricedCollective]] = defaultdict(list)
    ids = {s.id for s in sharding_problem.sites}
    for c in sent:
        before[c.use.consumer if c.use.consumer in ids else ""].append(c)
    slices: list[TimelineSlice] = []
    opened: dict[str, tuple[float, float]] = {}
    now = 0.0

    def send(consumer: str) -> None:
        nonlocal now
        for c in before.get(consumer, ()):
            end_s = now + share * c.seconds
            slices.append(TimelineSlice(_called(c), link_class(sharding_problem.mesh, c.axis), now, end_s))
            now = end_s

    for s in sorted(sharding_problem.sites, key=lambda s: (s.time, s.id)):
        start_s = now
        send(s.id)
        end_s = now + float(s.seconds[choice[s.node]])
        slices.append(TimelineSlice(s.id, "compute", now, end_s))
        now = end_s
        region = region_of(s.id, regions)
        while region:
            opened[region] = (opened.get(region, (start_s, 0.0))[0], now)
            region = region_of(region, regions)
    send("")
    slices += [TimelineSlice(r, "compute", start_s, end_s) for r, (start_s, end_s) in opened.items()]
    return sorted(slices, key=lambda s: (s.start_s, s.resource, -s.end_s, s.name))


def _called(c: PricedCollective) -> str:
    return f"{c.kind} over {c.axis}: {c.value}"


def _memory(
    sharding_problem: ShardingProblem, choice: Sequence[int], starts: Mapping[str, float], end_s: float
) -> tuple[MemoryPoint, ...]:
    """Bytes by kind when operators start, at most `MOST_POINTS` times; the fullest moment is among them."""
    views = views_of(sharding_problem, choice)
    usages = [u for u in sharding_problem.usages if u.key not in views and u.kind not in BESIDES]
    if not usages:
        return ()
    size = max(u.stop for u in usages) + 1
    kinds = sorted({u.kind for u in usages})
    change = {kind: np.zeros(size + 1) for kind in kinds}
    for u in usages:
        change[u.kind][u.start] += u.bytes[choice[u.node]]
        change[u.kind][u.stop] -= u.bytes[choice[u.node]]
    held = {kind: np.cumsum(c) for kind, c in change.items()}
    at = sorted((s.time, starts[s.id]) for s in sharding_problem.sites if s.id in starts and s.time < size)
    total = np.sum(list(held.values()), axis=0)
    step = max(1, -(-len(at) // MOST_POINTS))
    fullest = max(range(len(at)), key=lambda n: float(total[at[n][0]]), default=0)
    points, latest = [], 0.0
    for n, (time, start_s) in enumerate(at):
        if n % step and n != fullest:
            continue
        latest = max(latest, start_s)
        points.append(MemoryPoint(latest, {kind: int(held[kind][time]) for kind in kinds}))
    return (*points, MemoryPoint(end_s, points[-1].bytes)) if points else ()
