"""Balanced slices (Huang et al.: GPipe, NeurIPS'19)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plan import Plan
from autopar.search.enumeration.candidates import Candidate
from autopar.search.partition.even import even_stages
from autopar.search.problem import Problem
from autopar.search.research.stages import Cut, best_candidate, cuttable, dividing_counts, one_stage
from autopar.stages import cluster


@dataclass(frozen=True)
class GPipeStrategy:
    """Balanced slices on equal submeshes (GPipe, Huang et al., NeurIPS'19).

    The layers are cut into as many runs of about equal FLOPs as there are stages (GPipe, section 2.2: the variance of
    the cells' costs is kept small), each on the same number of devices. A number of stages or microbatches that is left
    open is the one with the least FLOPs on the way of a step, m + K - 1 times those of a slice; those that give the
    fastest plans are taken. The schedule is "gpipe" unless another is named.
    Inside a stage the integer program shards. A problem without a source, or with one stage, gets one stage.
    """

    cuts_stages: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        """The plan.

        Raises:
            InfeasiblePlanError: there are too few layers or devices for the stages, or a stage does not fit.
            MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
        """
        cut = cuttable(problem, "gpipe")
        return one_stage(problem, "gpipe") if cut is None else best_candidate(cut, "gpipe", "gpipe", _slices(cut))


def _slices(cut: Cut) -> Iterable[Candidate]:
    problem = cut.problem
    devices, asked = problem.cluster.num_devices, problem.job.num_stages
    for count in dividing_counts(cut):
        microbatching = cut.source.microbatches(count)
        layers = cluster(
            problem.graph, microbatching, min(max(devices, asked or 1), problem.policy.enumeration.most_layers)
        )
        most = len(layers.members)
        for stages in (s for s in range(2, most + 1) if devices % s == 0 and (asked is None or s == asked)):
            per = devices // stages
            # FLOPs of a device one behind the other: a stage's part of a microbatch, m + K - 1 times.
            estimate = sum(layers.flops) / stages / per / count * (count + stages - 1)
            placements = tuple((s * per, per) for s in range(stages))
            yield Candidate(count, even_stages(layers, stages), placements, estimate, layers.members)
