"""Techniques as the planner sees them: with which values a step, or a stage of one, may take each.

A function for each technique of `autopar.plan.form` answers an `Asked`. State that devices update, and what enters
segments, has its place chosen with the sharding: see `autopar.search.intra.host`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.cost.compute import as_flops, operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.ir.blockwise import find
from autopar.ir.layer_loops import segment_lengths
from autopar.ir.loops import runs_inside
from autopar.ir.phases import is_stage_loop
from autopar.plan import Plan, Stage
from autopar.recompute import LEVELS, Level
from autopar.schedule.offload import IN_TRANSFER
from autopar.search.problem import Problem
from autopar.sharding.padding import PaddedDim, PaddedDims, candidates, classes, named, operators_of, types_of


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Asked:
    """A step, or a stage of a pipeline, of which the search asks what it may take.

    Args:
        problem: its graph is that without the technique; its job, request and cluster are what is asked for.
        planned: the plan without the technique; None before there is one.
        named: whether a strategy names the plan, and what it recomputes.
        updates_by_layer: whether the update of its stacks may run a layer at a time.
        updates_in_backward: whether it may run inside of its backward loop.
        in_flight: most microbatches in flight, of a stage.
    """

    problem: Problem
    planned: Stage | None = None
    named: bool = False
    updates_by_layer: Callable[[], bool] = _never
    updates_in_backward: Callable[[], bool] = _never
    in_flight: int = 1

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage of a pipeline."""
        return any(map(is_stage_loop, self.problem.graph.operators))


def body_of(graph: Graph) -> Graph:
    """Graph of one microbatch of a stage of a pipeline; other graphs themselves."""
    return next((op.region("body") for op in graph.operators if is_stage_loop(op)), graph)


def block_scores(problem: Problem) -> int:
    """Scores of one head from which attention runs in blocks, where some of the step does; else 0."""
    if problem.request.attention == "plain":
        return 0
    least = 1 if problem.request.attention == "blocks" else problem.policy.attention.least_scores
    return least if _has_cores(problem.graph, least) else 0


def stage_block_scores(problem: Problem, one_stage: Plan | None) -> int:
    """Scores of one head from which attention of the stages of a pipeline runs in blocks; 0 where it does not.

    Where both forms may be taken it is that of one stage, or blocks where one stage has no plan: a pipeline is planned
    once. Slices of tokens take attention as it is written.

    Args:
        problem: the whole step.
        one_stage: its plan of one stage; None before there is one, or where none fits.
    """
    if problem.request.token_slices is not None:
        return 0
    plain = problem.request.attention == "auto" and one_stage is not None and not one_stage.stages[0].form.block_scores
    return 0 if plain else block_scores(problem)


def _has_cores(graph: Graph, least: int) -> bool:
    bodies = (region for op in graph.operators for _, region in op.regions)
    return bool(find(graph, least)) or any(_has_cores(body, least) for body in bodies)


def may_update_in_backward(asked: Asked) -> bool:
    """Whether updates may run inside of the backward loop over layers.

    Gradients that are kept are the step's to tell: `StepSource`. Microbatches of a stage and slices of tokens add
    gradients up, and what lies on hosts is updated in loops of its own.
    """
    request, job = asked.problem.request, asked.problem.job
    adds_up = request.token_slices is not None or (asked.is_stage and (job.num_microbatches or 1) > 1)
    return job.offload == "none" and not adds_up and asked.updates_in_backward()


def layered_updates(asked: Asked) -> tuple[bool, ...]:
    """Whether layers are updated one at a time, in a loop of their own, so that their state may lie on hosts.

    Values to try, the best first. Where whole layers have to be in host memory the technique is not left out.
    """
    if asked.problem.job.offload == "none" or not asked.updates_by_layer():
        return (False,)
    return (True,) if asked.problem.job.offload == "layers" else (False, True)


def may_update_on_hosts(asked: Asked) -> bool:
    """Whether hosts may update state that only the update reads: nobody names the plan or says where state lies."""
    return not asked.named and asked.problem.job.offload == "auto" and _has_host_links(asked)


def may_hold_activations_on_hosts(asked: Asked) -> bool:
    """Whether activations of microbatches may wait in host memory: so many are in flight that it helps."""
    in_flight = asked.in_flight - 1 > IN_TRANSFER  # no more than these move between devices and hosts
    return asked.problem.job.offload != "none" and in_flight and _has_host_links(asked)


def _has_host_links(asked: Asked) -> bool:
    return all(g.host_bandwidth is not None for g in asked.problem.cluster.groups)


def padded_dims(asked: Asked) -> tuple[tuple[PaddedDim, ...], ...]:
    """Ways to pad, the best first; each has one dim of each part of a class that is padded.

    What lies on hosts has none, nor have layers that are updated one at a time, nor has the batch where microbatches
    of one stage split it: its padding would mix them. Microbatches of a stage of a pipeline are padded each by itself.
    Slices of tokens take dims as they are.
    """
    problem, stage = asked.problem, asked.planned
    request, offload = problem.request, problem.job.offload
    if not request.padding or problem.cluster.num_devices == 1 or request.token_slices is not None:
        return ()
    on_hosts = offload in ("layers", "update") or (stage is not None and stage.host_bytes)
    if on_hosts or (stage is not None and (stage.form.layered_update or stage.form.backward_update)):
        return ()
    mixes = not asked.is_stage and stage is not None and stage.form.microbatches > 1
    return tuple(dims for dims in paddings(problem) if not (mixes and _pads_batch(problem.graph, dims)))


def _pads_batch(graph: Graph, dims: Sequence[PaddedDim]) -> bool:
    """Whether some dim of an input of the batch is padded."""
    shapes = named(graph, dims).shapes
    return any(i.role == "batch" and shapes.get(i.name, i.type.shape) != i.type.shape for i in graph.inputs)


def paddings(problem: Problem) -> list[tuple[PaddedDim, ...]]:
    """Ways to pad a step: all classes of dims that are worth it together, then each alone; none where none is.

    Then the same with parts of classes, each padded alone: less padding, and fewer operators that are split. Each way
    is a plan of its own: of a step of hundreds of operators the largest class is tried alone, of a large one none.
    """
    policy, shards = problem.policy.padding, problem.cluster.num_devices
    sizes, operators = problem.policy.sizes, len(list(operators_of(problem.graph)))
    options: list[tuple[PaddedDim, ...]] = []
    for joined in (True, False):
        padded_classes = candidates(problem.graph, shards, policy.most_waste, joined=joined)
        if not padded_classes:
            continue
        shares = _shares(problem, padded_classes)
        least = problem.policy.effort.least_part
        worth = sorted((c for c in padded_classes if shares[c] >= least), key=lambda c: -shares[c])
        dims = [c.dims(problem.graph) for c in worth[: policy.most_classes]]
        most = len(dims) if operators < sizes.few_operators else int(operators < sizes.small_operators)
        options += [tuple(d for of_class in dims for d in of_class)] if dims else []
        options += dims[:most] if len(dims) > 1 else []
    return list(dict.fromkeys(options))


def padding_notes(graph: Graph, padded: Sequence[PaddedDim]) -> tuple[str, ...]:
    """A line on each class of dims that is padded: its dim with most padding, and how much of the work is waste."""
    lines, types, shapes = [], types_of(graph), named(graph, padded).shapes
    for places in classes(graph) if shapes else ():
        sizes = [(name, d, types[name].shape[d], shapes.get(name, types[name].shape)[d]) for name, d in places]
        name, d, plain, size = max(sizes, key=lambda s: (Fraction(s[3], s[2] or 1), s[0] in graph.types))
        if size != plain:
            lines.append(
                f"dim {d} of {name} ({plain}), and all that is split with it, is padded to {size} inside of the step: "
                f"{(size - plain) / size:.2%} of its elements are waste, counted in time and memory"
            )
    return tuple(lines)


def _shares(problem: Problem, padded_classes: Sequence[PaddedDims]) -> dict[PaddedDims, float]:
    """Share of the step's time, by FLOPs and bytes, of the operators that have the dims of each class."""
    graph = problem.graph
    runs = max((runs_inside(op) for op in graph.operators if is_stage_loop(op)), default=1.0)
    work: dict[tuple[str, str], float] = {}
    for prefix, inner, op in operators_of(graph):
        types = inner.operand_types(op)
        once = as_flops(operator_flops(op, types), operator_bytes(op, types))
        work[prefix, op.id] = once * (runs if prefix else 1.0)
    whole = math.fsum(work.values()) or 1.0
    shares = {}
    for c in padded_classes:
        names = {name for name, _ in c.places}
        shares[c] = (
            math.fsum(
                work[prefix, op.id]
                for prefix, _, op in operators_of(graph)
                if not names.isdisjoint(prefix + name for name in (*op.reads, *(v.name for v in op.results)))
            )
            / whole
        )
    return shares


def levels_of(remat: str) -> tuple[Level, ...]:
    """Levels of recomputation to try, that which keeps the most activations first.

    Args:
        remat: the level that is asked for, as "selective"; "auto" for all.
    """
    return LEVELS if remat == "auto" else tuple(level for level in LEVELS if level == remat)


def segments_of(asked: Asked) -> tuple[int, ...]:
    """Numbers of layers a segment that are worth a try, the best first.

    Nobody names what is recomputed, or moves whole layers. With host memory, what enters segments may lie there too:
    the backward pass of one stage fetches it one segment ahead, that of a stage of a pipeline one microbatch ahead.
    """
    job = asked.problem.job
    levels = ("auto",) if asked.is_stage else ("auto", "full")  # of stages the name of a level may be a strategy's
    if asked.named or job.offload not in ("none", "auto") or job.remat not in levels:
        return ()
    return segment_lengths(body_of(asked.problem.graph))
