"""The cut of a step whose state lies on the stages of another plan: each operator runs where its parameters are."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import InfeasiblePlanError, MicrobatchError
from autopar.ir import Graph
from autopar.microbatch import Microbatching
from autopar.schedule import get
from autopar.search.constraints import SharedStages
from autopar.search.enumeration.candidates import Candidate, trains
from autopar.search.problem import Problem
from autopar.search.source import StageSource
from autopar.stages.layers import forward_operators


def shared_candidates(problem: Problem, source: StageSource, shared: SharedStages) -> Iterator[Candidate]:
    """The cut in the other plan's number of microbatches, then in half as many and so on down to one.

    Args:
        problem: what is planned. Its schedule, where free, has forwards alone if the step has no backward pass.
        source: cuts its step.
        shared: the stages.

    Raises:
        InfeasiblePlanError: the forward pass reads the state of fewer than two stages.
        MicrobatchError: the step cannot be cut into the number of microbatches that was asked for.
    """
    job = problem.job
    schedule = get("inference") if job.schedule == "auto" and not trains(problem) else None
    count, most = job.num_microbatches or shared.num_microbatches, 0
    while True:
        try:
            by_stage = _members(problem.graph, source.microbatches(count), shared)
        except MicrobatchError:
            if job.num_microbatches is not None or count == 1:
                raise
            by_stage = {}
        stages = sorted(by_stage)
        most = max(most, len(stages))
        if len(stages) > 1:
            yield Candidate(
                count,
                tuple(tuple(by_stage[s]) for s in stages),
                tuple(shared.devices[s] for s in stages),
                0.0,
                meshes=tuple(shared.meshes[s] for s in stages),
                schedule=schedule,
            )
        if job.num_microbatches is not None or count == 1:
            break
        count //= 2
    if most < 2:
        raise InfeasiblePlanError(
            f"the forward pass of {problem.graph.name} reads parameters of {most} of the {len(shared.devices)} stages "
            "that its state lies on",
            cause="a pipeline runs where its parameters are, on two stages or more",
            remedy="leave out like=, which moves what is read at every call",
        )


def _members(graph: Graph, microbatching: Microbatching, shared: SharedStages) -> dict[int, list[str]]:
    """Operators of the forward pass, by stage: each is on the last stage whose state was read so far."""
    forward = {op.id for op in forward_operators(graph, microbatching)}
    needed: dict[str, int] = dict(shared.inputs)
    members: dict[int, list[str]] = {}
    last = min(needed.values(), default=0)
    for op in graph.operators:
        stage = max((needed[n] for n in op.reads if n in needed), default=-1)
        if op.id in forward:
            last = max(last, stage)
            members.setdefault(last, []).append(op.id)
        elif stage >= 0:  # what is made of parameters alone, as a cast
            needed.update((v.name, stage) for v in op.results)
    return members
