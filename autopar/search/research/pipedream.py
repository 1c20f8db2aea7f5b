"""The planner of PipeDream (Narayanan et al., SOSP'19, section 3.1): the slowest stage as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autopar.errors import InfeasiblePlanError
from autopar.plan import Plan
from autopar.schedule.versions import VersionMap
from autopar.schedule.without_flush import flushes
from autopar.search.enumeration.candidates import Candidate, schedule_of
from autopar.search.partition.dp import Slice
from autopar.search.partition.submesh import Submesh, placed, submeshes
from autopar.search.problem import Problem
from autopar.search.profiling.sharding import layer_costs
from autopar.search.research.stages import Cut, best_candidate, cuttable, dividing_counts, one_stage
from autopar.solver.problem import Array
from autopar.stages import Layers, assign, cluster


@dataclass(frozen=True)
class PipeDreamStrategy:
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

    cuts_stages: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        """The plan.

        Raises:
            InfeasiblePlanError: there are too few layers or devices for the stages, or a stage does not fit.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        cut = cuttable(problem, "pipedream")
        return one_stage(problem, "pipedream") if cut is None else best_candidate(cut, "pipedream", "1f1b", _cuts(cut))


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
    for count in dividing_counts(cut):
        wanted = (asked or min(devices, 8)) * policy.layers_per_stage
        layers = cluster(problem.graph, cut.source.microbatches(count), min(wanted, policy.most_layers))
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
