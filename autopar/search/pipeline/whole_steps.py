"""The whole step on the devices of one equal stage: how long so many stages take, and what fits.

A pipeline of S equal stages runs each operator on D / S devices, and each device a share 1 / S of the operators. So a
step that takes t where D / S devices run all of it, with what computing hides, takes in m microbatches

    T = c (1 + (S - 1) / v) + (m - 1) b(c, v s) + 2 v f + u w / S,    c = u (t - w) / (S m)

where w is what of t is the update, which all stages run at once, c what a worker computes of one microbatch, s what the
slowest boundary takes to send it on, b the time between two microbatches (`partition.between_s`), and f what all
boundaries take one after the other: the first and the last microbatch pass all of them there and back. The heaviest
stage has u times its share; v is the stages on each worker, whose bubble is that of 1F1B over v (Narayanan et al.,
2021, section 2.2). Schedules with less of the bubble hold more activations: LLaMA 405B was planned a fifth slower by a
third of it. So T has what they leave of it (Qi et al., 2023) where memory is ample: D / S devices hold all state and a
microbatch, of which a stage has a share; and where they save more than it takes to start the program of each
microbatch's weight gradients. T is an estimate and no bound: stages may be unequal, each has a mesh of its
own, what they send may be split otherwise than its share for each device, and as much need not be hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import send_line
from autopar.errors import MicrobatchError
from autopar.ir import Graph
from autopar.plan import StepForm
from autopar.schedule.zero_bubble import bubble_left
from autopar.search.mesh_search import MeshSearch
from autopar.search.pipeline.candidates import trains
from autopar.search.pipeline.partition import between_s
from autopar.search.pipeline.search_space import unevenness
from autopar.search.problem import Problem
from autopar.search.source import StepSource
from autopar.solver import is_feasible
from autopar.solver.memory import memory_floor
from autopar.stages import ForwardCuts

#: What closes a number of stages, in words.
WHOLE_STEP = "the whole step on the devices of one stage with the bubble, an estimate"


@dataclass(frozen=True)
class EqualStages:
    """Estimates the step time of a number of equal stages, by relaxations in one or two numbers of microbatches.

    Seconds without the bubble are taken to be affine in the number of microbatches, t(m) = a + b m with b at least 0:
    more of them start and send more often.

    Args:
        stages: number of stages.
        meshes: meshes of a stage for the next relaxation: the likeliest before there is one, then that of the fastest.
        estimates: (microbatches, seconds in which a stage does its share of the step), by rising microbatches. Seconds
            of the fewest are the cutoff where they are above it.
        uneven: ratio (>= 1) of the heaviest stage's work to an equal share.
        sends: by boundary the seconds of a message without bytes, and those of all bytes of a step in one direction.
        beyond: least number of microbatches in which the seconds are known to be above the cutoff; infinite where none
            is.
        update_s: seconds of a stage's share of the update.
        bubble_left: share of the bubble of 1F1B that the schedule leaves for which memory is ample.
        start_s: seconds that it takes to start one more program, of the weight gradients that fill the bubble.
    """

    stages: int
    meshes: tuple[LogicalMesh, ...]
    estimates: tuple[tuple[int, float], ...] = ()
    uneven: float = 1.0
    sends: tuple[tuple[float, float], ...] = ()
    beyond: float = math.inf
    update_s: float = 0.0
    bubble_left: float = 1.0
    start_s: float = 0.0

    @staticmethod
    def of(problem: Problem, stages: int, like: Sequence[int] = (), update_s: float = 0.0) -> EqualStages:
        """Estimate of a number of equal stages with no number of microbatches solved yet.

        Args:
            problem: the step, and all devices.
            stages: S, which divides the devices.
            like: sizes of the axes of a mesh of all devices on which one stage is fast; the meshes of a stage that
                are most like it are relaxed too. Empty where there is none.
            update_s: seconds of a stage's share of the update.
        """
        part = problem.cluster.part(0, problem.cluster.num_devices // stages)
        meshes = by_likeness(part)[:1]
        distances = {mesh: _mesh_distance(mesh.shape, like) for mesh in part.logical_meshes(None)} if like else {}
        near = sorted((m for m, d in distances.items() if d <= min(distances.values()) + 1e-9), key=lambda m: m.shape)
        uneven = unevenness(problem, stages)
        uneven = uneven if math.isfinite(uneven) else 1.0
        meshes = list(dict.fromkeys([*meshes, *near]))
        sends, start_s = _sends(problem, stages), problem.cost_model.starts.start_s
        return EqualStages(stages, tuple(meshes), uneven=uneven, sends=sends, update_s=update_s, start_s=start_s)

    @property
    def is_beyond(self) -> bool:
        """Whether the seconds are above the cutoff in any number of microbatches."""
        return bool(self.estimates) and self.beyond <= self.estimates[0][0]

    def within(self, counts: Sequence[int]) -> list[int]:
        """Numbers of microbatches in which the seconds may be below the cutoff; the first where none may."""
        return [m for m in counts if m < self.beyond] or [counts[0]]

    def busy_s(self, count: int) -> float:
        """Seconds in which a stage does its share of the step in ``count`` microbatches, without the bubble."""
        (few, few_s), (many, many_s) = self.estimates[0], self.estimates[-1]
        slope_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
        return max(0.0, few_s + slope_s * (count - few))

    def step_s(self, count: int, chunks: int = 1, uneven: float | None = None) -> float:
        """Step time in 1F1B, or interleaved 1F1B, with the share of its bubble that is left.

        Args:
            count: number of microbatches.
            chunks: stages on each worker.
            uneven: ratio of the heaviest worker's work to an equal share; None for that of one stage on each worker.
        """
        times = self.uneven if uneven is None else uneven
        each_s, messages_s = times * self._each_s(count), self._messages_s(count)
        bubble_s = each_s * (self.stages - 1) / chunks
        left_s = self._left(count, self.bubble_left) * bubble_s
        filled_s = each_s + (left_s if left_s + self.start_s * chunks * count < bubble_s else bubble_s)
        between = float(between_s(each_s, chunks * max(messages_s, default=0.0)))
        own_s = times * min(self.update_s, self.busy_s(count))
        return filled_s + 2 * chunks * sum(messages_s) + (count - 1) * between + own_s

    def least_s(self, possible: Sequence[int], bubble_left: float) -> float:
        """Seconds in the best of some numbers of microbatches, with what weight gradients leave of the bubble of 1F1B.

        Args:
            possible: the numbers.
            bubble_left: the share that is left where there is a microbatch for each stage. Of one microbatch it is
                twice that: forward and backward passes are one chain.
        """
        return min(self._least_s(count, bubble_left) for count in possible)

    def _least_s(self, count: int, bubble_left: float) -> float:
        messages_s, fill_s = self._messages_s(count), (self.stages - 1) * self._each_s(count)
        # Plans with two stages on each of as many workers come with those that have one.
        chunks_tried = (1, 2) if count > 1 else (1,)
        bubble_s = min(fill_s / chunks + 2 * chunks * sum(messages_s) for chunks in chunks_tried)
        bubble_s *= self._left(count, bubble_left)
        return max(self.busy_s(count), count * max(messages_s, default=0.0)) + bubble_s

    def _each_s(self, count: int) -> float:
        """Seconds of one microbatch on an equal stage."""
        return max(0.0, self.busy_s(count) - self.update_s) / count

    def _left(self, count: int, bubble_left: float) -> float:
        """Share of the bubble of 1F1B that is left in ``count`` microbatches, of that with one for each stage."""
        return min(1.0, bubble_left * (2 - min(1.0, (count - 1) / max(1, self.stages - 1))))

    def _messages_s(self, count: int) -> list[float]:
        """Seconds of the message of one microbatch, by boundary."""
        return [begins_s + all_s / count for begins_s, all_s in self.sends]


def _sends(problem: Problem, stages: int) -> tuple[tuple[float, float], ...]:
    """See `EqualStages.sends`."""
    size, cuts = problem.cluster.num_devices // stages, problem.graph.fact(ForwardCuts.of)
    sends = []
    for k, nbytes in enumerate(cuts.boundary_bytes(stages)):
        source, target = (range(size * first, size * (first + 1)) for first in (k, k + 1))
        begins_s, byte_s = send_line(problem.cluster, source, target)
        sends.append((begins_s, byte_s * nbytes))
    return tuple(sends)


def equal_stages(
    problem: Problem, step: StepSource, known: EqualStages, form: StepForm, cutoff_s: float
) -> EqualStages | None:
    """Estimates of a number of equal stages, with a further relaxation of the step in a form.

    None where the step cannot be cut so. In more microbatches than before nothing but that is kept which is below the
    cutoff. One stage keeps the memory limit; what a stage of several holds, its layers
    say, which are not known here.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        known: estimates so far, in fewer microbatches.
        form: number of microbatches, and what is recomputed.
        cutoff_s: seconds of a step from which stages are of no use.
    """
    count = form.microbatches
    try:
        graph = problem.graph if form == StepForm() else step.in_form(form).graph
    except MicrobatchError:
        return None
    stages, hidden, gap = known.stages, 1 / problem.policy.partition.near_best, problem.policy.effort.estimate_gap
    meshes = MeshSearch(_on_one_stage(problem, graph, count, stages))
    fastest_s, fastest, ample = math.inf, known.meshes[0], False
    for mesh in known.meshes:
        sum_cutoff_s = min(cutoff_s, fastest_s) * stages / hidden
        sharding_problem = meshes.program(mesh)
        relaxed = meshes.free(sharding_problem, sum_cutoff_s, gap)
        fits = relaxed.found and is_feasible(sharding_problem.problem, relaxed.choice)
        if stages == 1 and relaxed.found and not fits:
            relaxed = meshes.within(sharding_problem, relaxed.lower_bound, sum_cutoff_s, gap) or relaxed
        if not relaxed.found or relaxed.objective >= sum_cutoff_s:
            continue
        seconds = meshes.step_s(sharding_problem, relaxed) / stages
        if seconds < fastest_s:
            fastest_s, fastest, ample = seconds, mesh, fits
    if fastest_s == math.inf:
        estimates = known.estimates or ((count, cutoff_s),)
        return replace(known, estimates=estimates, beyond=min(count, known.beyond))
    estimates = (*known.estimates, (count, fastest_s))
    fills = ample and problem.job.schedule == "auto" and trains(problem)
    left = bubble_left() if fills else 1.0
    return replace(known, meshes=(fastest,), estimates=estimates, bubble_left=left)


def counts_that_may_fit(problem: Problem, step: StepSource, counts: Sequence[int]) -> list[int]:
    """Numbers of microbatches, rising, from the first on in which one stage that recomputes nothing may fit.

    More microbatches hold less, so that the first is found by halving: by what all values hold at least on the mesh
    most like the machine. Where none may fit all are given.

    Args:
        problem: the step in one microbatch.
        step: in other forms.
        counts: numbers of microbatches that may be taken, rising.
    """

    def fits(count: int) -> bool:
        try:
            graph = step.in_form(StepForm(count)).graph
        except MicrobatchError:
            return False
        problem.checkpoint()
        job = replace(problem.job, num_microbatches=count, num_stages=1, remat="auto", schedule="auto")
        meshes = MeshSearch(replace(problem, graph=graph, job=job))
        likeliest = meshes.program(by_likeness(problem.cluster)[0])
        return not likeliest.broken and memory_floor(likeliest.problem) <= problem.memory_limit_bytes

    first = 0 if fits(counts[0]) else bisect_left(counts, True, lo=1, key=fits)
    return list(counts[first:] or counts)


def by_likeness(part: Cluster) -> list[LogicalMesh]:
    """Logical meshes, those most like the machine first: nodes by devices of a node."""
    node = part.groups[0].devices_per_node
    return sorted(part.logical_meshes(None), key=lambda m: (abs(math.log2(m.shape[-1] / node)), m.shape))


def _mesh_distance(shape: Sequence[int], like: Sequence[int]) -> float:
    """Times by which the axes of a mesh differ from those of another, as a sum of logarithms."""
    width = max(len(shape), len(like))
    one, other = ((*s, *(1,) * (width - len(s))) for s in (shape, like))
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


def _on_one_stage(problem: Problem, graph: Graph, count: int, stages: int) -> Problem:
    """The whole step in ``count`` microbatches on the devices of one of so many equal stages."""
    problem.checkpoint()
    part = problem.cluster.part(0, problem.cluster.num_devices // stages)
    job = replace(problem.job, num_microbatches=count, num_stages=1, offload="none", constraints=())
    return replace(problem, graph=graph, cluster=part, cost_model=problem.cost_model.on(part), job=job)
