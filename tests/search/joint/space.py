"""Every way to run a small step: what `autopar.parallelize` chooses among, enumerated without its search.

    one stage    microbatches x recomputation x logical mesh x sharding of every operator
    a pipeline   microbatches x number of stages x cuts between the layers x submeshes x schedule, and for each stage
                 recomputation x logical mesh x sharding of every operator

All under one limit on the bytes of a device. ZeRO 1, 2 and 3 are layouts among the shardings. What a way takes and
needs is said by what the plans are made with: the cost model, the memory of stages and the simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import CostModel
from autopar.errors import MicrobatchError, ScheduleError
from autopar.frontend import SignatureOptions, Traced, flatten_call, trace
from autopar.ir.fingerprint import fingerprint
from autopar.lower.microbatch import microbatched
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.lower.rewrites import recomputed_step
from autopar.plan import PlanContent, StepForm
from autopar.recompute import LEVELS
from autopar.schedule import Table, get
from autopar.search import Job, Problem
from autopar.search.intra import ShardingProblem, build
from autopar.search.mesh_search import MeshSearch, MeshSolution
from autopar.search.pipeline.compose import on_devices
from autopar.search.pipeline.memory import received_bytes, stage_bytes
from autopar.search.pipeline.record import pipeline_of
from autopar.search.pipeline.stage_problem import in_flight
from autopar.search.source import Sliced
from autopar.simulate import step_of as simulated
from autopar.solver import Solution, Status
from autopar.stages import cluster as layers_of
from tests.search.joint.sharding import cheapest, cost_of, peak_bytes
from tests.search.problems import problem_with

SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "eager-1f1b", "gpipe")

#: By how much the seconds that a sharding is chosen by may exceed those of its plan.
SLACK = 1.25

#: Times a stage is sharded for less, while what is known only from its plan exceeds the limit.
TIGHTENED = 12


@dataclass(frozen=True)
class Asked:
    """What is not free: numbers of stages and of microbatches, name of the schedule; None where it is."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class Way:
    """One way, and how long a step takes."""

    seconds: float
    microbatches: int
    schedule: str
    stages: tuple[PlanContent, ...]
    cut: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """For messages of tests."""
        sizes = [len(c.stages[0].devices) for c in self.stages]
        meshes = ["x".join(str(n) for _, n in c.stages[0].mesh_axes) for c in self.stages]
        return (
            f"{self.seconds:.9g} s: {self.microbatches} microbatches, {self.schedule}, cuts {self.cut}, devices "
            f"{sizes}, meshes {meshes}, remat {[c.stages[0].form.remat for c in self.stages]}"
        )


@dataclass
class Space:
    """The ways of one step on one cluster.

    Args:
        fn: the step.
        args: abstract arguments.
        cluster: devices.
        limit_bytes: of a device.
        donated: positions of arguments whose buffers may be reused.
        counts: numbers of microbatches.
        asked: what is not free.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    cluster: Cluster
    limit_bytes: int
    donated: tuple[int, ...] = ()
    counts: tuple[int, ...] = (1, 2, 4)
    asked: Asked = Asked()
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)
    least_s: float = math.inf

    @cached_property
    def traced(self) -> Traced:
        """The step."""
        signature, _ = flatten_call(self.fn, tuple(self.args), {}, SignatureOptions())
        return trace(self.fn, signature)

    @cached_property
    def source(self) -> TracedStages:
        """Cuts the step."""
        return TracedStages(step_of(self.traced))

    @cached_property
    def job(self) -> Job:
        """What all choice problems are under."""
        names = frozenset(path for path, argument, _ in self.traced.arguments if argument in self.donated)
        return Job(memory_limit_bytes=self.limit_bytes, donated=names)

    def best(self) -> Way | None:
        """The fastest that keeps the limit; None where none does."""
        found = None
        for way in itertools.chain(self.of_one_stage() if self.asked.stages is None else (), self.of_several()):
            if way.seconds < self.least_s:
                found, self.least_s = way, way.seconds
        return found

    def worse(self, seconds: float) -> bool:
        """Whether what takes at least so many seconds cannot be the fastest.

        The seconds that a sharding is chosen by may be more than those of the plan, in which conversions to the same
        layout are one.
        """
        return seconds > SLACK * self.least_s

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.counts if self.asked.microbatches is None else (self.asked.microbatches,)

    # One stage

    def of_one_stage(self) -> Iterator[Way]:
        """Ways without a pipeline."""
        for count, mesh in itertools.product(self._counts, self.cluster.logical_meshes()):
            for level in LEVELS:
                try:
                    again, ends = recomputed_step(self.traced, level)
                    graph = microbatched(again, count).graph
                except MicrobatchError:
                    continue
                job = replace(self.job, num_microbatches=count)
                problem = Problem(graph, self.cluster, CostModel(self.cluster), job=job)
                fits_free = False
                for split in (False, True):
                    sharding_problem = Stated(problem, build(problem, mesh, split_phases=split))
                    if self.worse(sharding_problem.free_s):
                        continue
                    content = sharding_problem.limited(self.limit_bytes)
                    if content is not None:
                        fits_free |= content is sharding_problem.free
                        form = StepForm(count, level, layer_ends=ends)
                        yield Way(content.step_time, count, "none", (content.in_form(form),))
                if fits_free:
                    break  # computing again only adds work

    # Pipelines

    def of_several(self) -> Iterator[Way]:
        """Pipelines."""
        for count in self._counts:
            try:
                found = self.source.microbatches(count)
            except MicrobatchError:
                continue
            layers = layers_of(self.traced.graph, found, 10**6).members
            asked, most = self.asked.stages, min(len(layers), self.cluster.num_devices)
            for stages in range(2, most + 1) if asked is None else [asked]:
                tables = list(_tables(self.asked.schedule, stages, count))
                for cut in itertools.combinations(range(1, len(layers)), stages - 1):
                    runs = [layers[a:b] for a, b in itertools.pairwise((0, *cut, len(layers)))]
                    for homes in homes_of(self.cluster, stages):
                        for table in tables:
                            yield from self._scheduled(count, cut, runs, homes, table)

    def _scheduled(
        self,
        count: int,
        cut: tuple[int, ...],
        runs: Sequence[Sequence[tuple[str, ...]]],
        homes: Sequence[tuple[int, int]],
        table: Table,
    ) -> Iterator[Way]:
        members = tuple(tuple(id for layer in run for id in layer) for run in runs)
        sliced = self.source.slice(count, members)
        each: list[list[PlanContent]] = []
        for s in range(len(runs)):
            each.append(list(self._of_stage(count, members, runs, s, homes[s], table, sliced)))
            if not each[-1]:
                return
        for parts in itertools.product(*each):
            placed = [on_devices(c, s, homes[s]) for s, c in enumerate(parts)]
            flow, durations = pipeline_of(self.traced.graph, sliced, placed, table, CostModel(self.cluster))
            yield Way(simulated(table, flow, durations).seconds, count, table.name, tuple(placed), cut)

    def _of_stage(
        self,
        count: int,
        members: tuple[tuple[str, ...], ...],
        runs: Sequence[Sequence[tuple[str, ...]]],
        stage: int,
        home: tuple[int, int],
        table: Table,
        sliced: Sliced,
    ) -> Iterator[PlanContent]:
        """Plans of a stage that fit with its microbatches in flight, for every recomputation and mesh."""
        part = self.cluster.part(*home)
        unauthenticated = in_flight(table, stage) - 1
        received = unauthenticated * received_bytes(sliced, stage, home[1])

        def over(content: PlanContent) -> int:
            return stage_bytes(content, sliced, table, stage) - self.limit_bytes

        for mesh in part.logical_meshes():
            for level in LEVELS:
                ends = None if level == "none" else tuple(layer[-1] for layer in runs[stage][:-1])
                form = StepForm(count, level, layer_ends=ends)
                graph = sliced.graphs[stage]
                if level != "none":
                    graph = self.source.in_form(members, stage, form).graph
                job = replace(self.job, num_microbatches=count)
                problem = problem_with(
                    Problem(graph, part, CostModel(part), job=job),
                    separate_programs=True,
                    arriving=sliced.arriving(stage),
                )
                fits_free = False
                for split in (False, True):
                    sharding_problem = self._stated(problem, mesh, split)
                    if self.worse(sharding_problem.free_s):
                        continue
                    content = sharding_problem.free
                    if over(content) <= 0:
                        fits_free = True
                    else:
                        waited = problem_with(problem, extra_in_flight=unauthenticated)
                        content = self._stated(waited, mesh, split).fitting(self.limit_bytes - received, over)
                    if content is not None:
                        yield content.in_form(form)
                if fits_free:
                    break  # computing again only adds work

    def _stated(self, problem: Problem, mesh: LogicalMesh, split_phases: bool) -> Stated:
        where = (problem.cluster.to_json(), str(mesh), split_phases)
        key = (fingerprint(problem.graph), problem.graph.name, *where, problem.subproblem.extra_in_flight)
        if key not in self.known:
            self.known[key] = Stated(problem, build(problem, mesh, split_phases=split_phases))
        return self.known[key]


@dataclass
class Stated:
    """A graph on a mesh as a problem of choices, with those that were found."""

    problem: Problem
    sharding_problem: ShardingProblem
    within: dict[float, PlanContent | None] = field(default_factory=dict)

    @cached_property
    def choice(self) -> tuple[int, ...]:
        """The cheapest where memory is no matter."""
        found = cheapest(self.sharding_problem.problem)
        assert found is not None
        return found

    @property
    def free_s(self) -> float:
        """Seconds that it is chosen by."""
        return cost_of(self.sharding_problem.problem, self.choice)

    @cached_property
    def free(self) -> PlanContent:
        """Its plan."""
        return self._content(self.sharding_problem, self.choice)

    def limited(self, limit_bytes: float) -> PlanContent | None:
        """The plan of the cheapest choice within a limit; None where there is none."""
        if peak_bytes(self.sharding_problem.problem, self.choice) <= limit_bytes:
            return self.free
        if limit_bytes not in self.within:
            choice = cheapest(self.sharding_problem.problem, limit_bytes) if limit_bytes > 0 else None
            # Without room to spare conversions share no further copies, see `autopar.sharding.routes`.
            tight = replace(self.sharding_problem, memory_bound=True)
            self.within[limit_bytes] = None if choice is None else self._content(tight, choice)
        return self.within[limit_bytes]

    def fitting(self, limit_bytes: float, over: Callable[[PlanContent], int]) -> PlanContent | None:
        """The fastest plan that is over by nothing; None where there is none.

        What a stage needs next to its sharding's bytes is known from its plan alone, so it is sharded for less until
        all of it fits.
        """
        for _ in range(TIGHTENED):
            content = self.limited(limit_bytes)
            if content is None or (more := over(content)) <= 0:
                return content
            own = content.peak_memory + self.problem.subproblem.extra_in_flight * content.stages[0].activation_bytes
            limit_bytes = min(limit_bytes - 1, own - more)
        return None

    def _content(self, sharding_problem: ShardingProblem, choice: tuple[int, ...]) -> PlanContent:
        """The plan of a choice, as the planner writes it down."""
        solution = Solution(Status.FEASIBLE, choice, 0.0, 0.0, 0.0, "")
        return MeshSearch(self.problem).plan([MeshSolution(sharding_problem, solution)], "every").content


def _tables(asked: str | None, stages: int, count: int) -> Iterator[Table]:
    for name in SCHEDULES if asked is None else [asked]:
        try:
            yield get(name).table(stages, count)
        except ScheduleError:
            continue


def homes_of(cluster: Cluster, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """By stage (first device, number of devices): all sizes that are powers of two inside a node, or whole nodes.

    Devices are dealt out in the order of the sizes, the largest first, so that no stage straddles a node.
    """
    (group,) = cluster.groups
    inside = group.devices_per_node
    sizes = [n for n in range(1, inside) if n & (n - 1) == 0 and inside % n == 0]
    sizes += [inside * n for n in range(1, group.count + 1)]
    for chosen in itertools.product(sizes, repeat=stages):
        if sum(chosen) == cluster.num_devices:
            order = sorted(range(stages), key=lambda s: (-chosen[s], s))
            at = dict(zip(order, itertools.accumulate((0, *(chosen[s] for s in order))), strict=False))
            yield tuple((at[s], chosen[s]) for s in range(stages))
