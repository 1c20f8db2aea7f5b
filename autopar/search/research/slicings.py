"""Strategies that cut a step into stages by themselves: `GPipeStrategy` and `PipeDreamStrategy`.

GPipe takes balanced slices (Huang et al., NeurIPS'19). The planner of PipeDream makes the slowest stage as fast as can
be (Narayanan et al., SOSP'19, section 3.1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from autopar.errors import InfeasiblePlanError, ScheduleError
from autopar.plan import Plan
from autopar.schedule.without_flush.schedules import VersionMap, flushes
from autopar.search.alpa import alpa
from autopar.search.assemble import renamed
from autopar.search.outcome import within_reach
from autopar.search.pipeline.candidates import Candidate, CuttableStep, schedule_of
from autopar.search.pipeline.partition import Slice, Submesh, even_stages, placed, submeshes
from autopar.search.pipeline.plan_candidate import plan_candidate
from autopar.search.pipeline.profiling import layer_costs
from autopar.search.pipeline.search_space import microbatch_counts, microbatchings
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.solver.problem import Array
from autopar.stages import Layers, assign, cluster


@dataclass(frozen=True)
class Cut:
    """A problem that can be cut: its source, and the number of microbatches of every try."""

    problem: Problem
    source: StageSource
    counts: tuple[int, ...]


def one_stage(problem: Problem, name: str) -> Plan:
    """The plan of one stage by the integer program, for problems that cannot be cut."""
    return renamed(within_reach(alpa(problem)), name, f"{name}: one stage, as nothing was there to cut")


def cuttable(problem: Problem, name: str) -> Cut | None:
    """``problem`` as one that can be cut; None where one stage is all that is asked for or that there can be.

    Raises:
        InfeasiblePlanError: several stages were asked for and the problem has no source or devices for them.
    """
    asked, devices = problem.job.num_stages, problem.cluster.num_devices
    if problem.source is None or devices == 1:
        if asked is not None and asked > 1:
            raise InfeasiblePlanError(
                f"{name} cannot make {asked} stages of {problem.graph.name}",
                cause="one device" if devices == 1 else "the problem was made from a graph alone",
                remedy="more devices" if devices == 1 else "plan by autopar.parallelize(...).plan(...)",
            )
        return None
    if asked == 1:
        return None
    count = problem.job.num_microbatches
    return Cut(problem, problem.source, tuple(microbatch_counts(problem)) if count is None else (count,))


def best_candidate(
    cut: Cut, name: str, schedule: str, candidates: Iterable[Candidate], planned: int = 3, failed: int = 12
) -> Plan:
    """The fastest plan of the candidates with the least estimates; inside a stage the integer program shards.

    Args:
        cut: what is planned.
        name: name of the strategy.
        schedule: name of the schedule where the job leaves it free.
        candidates: ways to cut.
        planned: number of them that are planned exactly, those with the least estimates.
        failed: number of them that may fail before none is tried any more.

    Raises:
        InfeasiblePlanError: none of them fits the memory, or there is none.
    """
    problem = cut.problem
    if problem.job.schedule in ("auto", "none"):
        problem = replace(problem, job=replace(problem.job, schedule=schedule))
    plans: list[Plan] = []
    failures: list[InfeasiblePlanError | ScheduleError] = []
    for candidate in sorted(candidates, key=lambda c: (c.estimate_s, c.count, len(c.members))):
        if len(plans) == planned or len(failures) == failed:
            break
        try:
            plans.append(within_reach(plan_candidate(CuttableStep(problem, cut.source, alpa), candidate)))
        except (InfeasiblePlanError, ScheduleError) as error:
            failures.append(error)
    if plans:
        return renamed(min(plans, key=lambda p: p.step_time), name)
    if failures:
        raise failures[0]
    raise InfeasiblePlanError(
        f"{name} finds no way to cut {problem.graph.name} into stages on {problem.cluster.name}",
        cause="too few layers or devices for the number of stages",
        remedy="fewer stages, or search='alpa'",
    )


class _SlicingStrategy(ABC):
    """A strategy that plans those of its slicings that have the least estimates."""

    cuts_stages: ClassVar[bool] = True
    name: ClassVar[str]
    schedule: ClassVar[str]

    @abstractmethod
    def candidates(self, cut: Cut) -> Iterable[Candidate]:
        """Ways to cut, with estimates."""

    def __call__(self, problem: Problem) -> Plan:
        """The plan.

        Raises:
            InfeasiblePlanError: there are too few layers or devices for the stages, or a stage does not fit.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        cut = cuttable(problem, self.name)
        if cut is None:
            return one_stage(problem, self.name)
        return best_candidate(cut, self.name, self.schedule, self.candidates(cut))


@dataclass(frozen=True)
class GPipeStrategy(_SlicingStrategy):
    """Balanced slices on equal submeshes (GPipe, Huang et al., NeurIPS'19).

    The layers are cut into as many runs of about equal FLOPs as there are stages (GPipe, section 2.2: the variance of
    the cells' costs is kept small), each on the same number of devices. A number of stages or microbatches that is left
    open is the one with the least FLOPs on the way of a step, m + K - 1 times those of a slice; those that give the
    fastest plans are taken. The schedule is "gpipe" unless another is named.
    Inside a stage the integer program shards. A problem without a source, or with one stage, gets one stage.
    """

    name: ClassVar[str] = "gpipe"
    schedule: ClassVar[str] = "gpipe"

    def candidates(self, cut: Cut) -> Iterable[Candidate]:
        """Even stages in each number of them that divides the devices."""
        return _slices(cut)


def _slices(cut: Cut) -> Iterable[Candidate]:
    problem = cut.problem
    devices, asked = problem.cluster.num_devices, problem.job.num_stages
    for microbatching in microbatchings(problem, cut.source, cut.counts):
        count = microbatching.count
        wanted = min(max(devices, asked or 1), problem.policy.enumeration.most_layers)
        layers = cluster(problem.graph, microbatching, wanted, stages=asked or 2)
        most = len(layers.members)
        for stages in (s for s in range(2, most + 1) if devices % s == 0 and (asked is None or s == asked)):
            per = devices // stages
            # FLOPs of a device one after the other: a stage's part of a microbatch, m + K - 1 times.
            estimate = sum(layers.flops) / stages / per / count * (count + stages - 1)
            placements = tuple((s * per, per) for s in range(stages))
            yield Candidate(count, even_stages(layers, stages), placements, estimate, layers.members)


@dataclass(frozen=True)
class PipeDreamStrategy(_SlicingStrategy):
    """PipeDream's dynamic program over stages (Narayanan et al., SOSP'19).

    With A(j, k) the time of the slowest stage when layers 0..j are on k devices:

        A(j, k)    = min over i, k' of max(A(i, k - k'), 2 a_i / B, T(i + 1..j, k'))
        T(i..j, k) = 1/k max(sum of t_l, 2 (k - 1) sum of w_l / B)

    t_l: seconds of layer l's microbatch on one device, a_l: bytes that it sends on, w_l: bytes of its parameters, B:
    bandwidth. Gradients are summed once an update, which is of m microbatches (1 in the schedule "pipedream"), so w_l
    counts 1/m. k' is a number of devices that are part of a node or whole nodes. The schedule is 1F1B with a flush
    unless another is named.
    Inside a stage the integer program shards, where PipeDream has replicas. A problem without a source, or with
    one stage, gets one stage; else there are two or more.
    """

    name: ClassVar[str] = "pipedream"
    schedule: ClassVar[str] = "1f1b"

    def candidates(self, cut: Cut) -> Iterable[Candidate]:
        """In each number of microbatches the slicing whose slowest stage is the fastest."""
        return _cuts(cut)


@dataclass(frozen=True)
class LayerProfile:
    """Layers for the dynamic program: seconds, bytes sent on (but for the last), bytes of parameters."""

    seconds: Array
    sent_bytes: Array
    parameter_bytes: Array
    bandwidth: float


def _cuts(cut: Cut) -> Iterable[Candidate]:
    problem, asked = cut.problem, cut.problem.job.num_stages
    devices = problem.cluster.num_devices
    if len(problem.cluster.groups) > 1:
        raise InfeasiblePlanError(
            f"pipedream plans for equal devices, and {problem.cluster.name} has several groups of nodes",
            remedy="search='alpa'",
        )
    sizes = [m.size for m in submeshes(problem.cluster) if m.size <= devices]
    policy = problem.policy.enumeration
    for microbatching in microbatchings(problem, cut.source, cut.counts):
        count = microbatching.count
        wanted = (asked or min(devices, 8)) * policy.layers_per_stage
        layers = cluster(problem.graph, microbatching, min(wanted, policy.most_layers), stages=asked or 2)
        cut_at = slowest_least(profile(cut, count, layers), sizes, devices, asked)
        if cut_at is None:
            continue
        slowest, stages = cut_at
        members = tuple(tuple(id for run in layers.members[s.first : s.last + 1] for id in run) for s in stages)
        placements = placed(problem.cluster, [Submesh(0, sizes[s.kind]) for s in stages])
        yield Candidate(count, members, placements, slowest * (count + len(stages) - 1), layers.members)


def profile(cut: Cut, count: int, layers: Layers) -> LayerProfile:
    """The layers' profile, from the cost model and one device's plan."""
    problem = cut.problem
    n = len(layers.members)
    by_layer = assign(problem.graph, cut.source.microbatches(count), layers, range(1, n + 1))
    whole = cut.source.slice(count, [[id for run in layers.members for id in run]])
    costs = layer_costs(problem, problem.cluster.part(0, 1), whole, by_layer, count)
    parameters = np.zeros(n)
    for i in problem.graph.inputs:
        if i.role == "parameter" and by_layer.inputs.get(i.name):
            parameters[by_layer.inputs[i.name][0]] += i.type.nbytes / microbatches_an_update(problem, count)
    group = problem.cluster.groups[0]
    link = group.intra if isinstance(group.inter, str) or problem.cluster.num_nodes == 1 else group.inter
    return LayerProfile(costs.loop_s, np.array([*layers.cut_bytes, 0.0]), parameters, link.bandwidth)


def microbatches_an_update(problem: Problem, count: int) -> int:
    """Microbatches whose gradients an update takes.

    Args:
        problem: with the schedule that was asked for.
        count: microbatches of a step.
    """
    name = schedule_of(problem).name
    return count if flushes(name) else VersionMap(name, 1, count).update_every


def slowest_least(
    profile: LayerProfile, sizes: Sequence[int], devices: int, num_stages: int | None
) -> tuple[float, tuple[Slice, ...]] | None:
    """The slicing whose slowest stage is fastest, and that stage's seconds; None where there is none.

    Args:
        profile: of the layers.
        sizes: numbers of devices that a stage may have.
        devices: all of them, which are used.
        num_stages: number of stages, or None for any from two on.
    """
    n = len(profile.seconds)
    time = np.concatenate([[0.0], np.cumsum(profile.seconds)])
    weights = np.concatenate([[0.0], np.cumsum(profile.parameter_bytes)])
    most = min(n, devices) if num_stages is None else min(n, devices, num_stages)
    # [stages, layers, devices]: the slowest stage of the first so many layers on so many devices.
    best = np.full((most + 1, n + 1, devices + 1), math.inf)
    best[0, 0, 0] = 0.0
    back: dict[tuple[int, int, int], tuple[int, int]] = {}
    for s in range(1, most + 1):
        for j in range(s, n + 1):
            for i in range(s - 1, j):
                send = 2 * profile.sent_bytes[i - 1] / profile.bandwidth if i else 0.0
                for kind, k in enumerate(sizes):
                    sync = 2 * (k - 1) * (weights[j] - weights[i]) / profile.bandwidth
                    stage = max(send, max(time[j] - time[i], sync) / k)
                    slowest = np.maximum(best[s - 1, i, : devices + 1 - k], stage)
                    for d in map(int, np.flatnonzero(slowest < best[s, j, k:])):
                        best[s, j, k + d] = slowest[d]
                        back[s, j, k + d] = (i, kind)
    choices = [num_stages] if num_stages is not None else range(2, most + 1)
    least, s = min(((float(best[s, n, devices]), s) for s in choices if s <= most), default=(math.inf, 0))
    if not math.isfinite(least):
        return None
    stages: list[Slice] = []
    j, d = n, devices
    for number in range(s, 0, -1):
        i, kind = back[number, j, d]
        stages.append(Slice(i, j - 1, kind))
        j, d = i, d - sizes[kind]
    return least, tuple(reversed(stages))
