"""Dims that the devices do not divide and that are worth a plan with padding, and the plan's notes on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.compute import operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.sharding.padding import PaddedDim, PaddedDims, candidates, named


def paddings_of(problem: Problem, plan: Plan) -> list[tuple[PaddedDim, ...]]:
    """`paddings` of a step that has a plan of one stage without padding.

    What lies on hosts has none, nor have layers that are updated one at a time, nor has the batch where microbatches
    split it: its padding would mix them.

    Args:
        problem: the step in one microbatch.
        plan: of it.
    """
    stage = plan.stages[0]
    by_layer = stage.form.layered_update or stage.form.backward_update
    if by_layer or stage.host_bytes or problem.job.offload in ("layers", "update"):
        return []
    classes = paddings(problem)
    return classes if plan.num_microbatches == 1 else [dims for dims in classes if not _pads_batch(problem.graph, dims)]


def _pads_batch(graph: Graph, dims: Sequence[PaddedDim]) -> bool:
    """Whether some dim of an input of the batch is padded."""
    shapes = named(graph, dims).shapes(graph)
    return any(i.role == "batch" and shapes.get(i.name, i.type.shape) != i.type.shape for i in graph.inputs)


def paddings(problem: Problem) -> list[tuple[PaddedDim, ...]]:
    """Ways to pad a step: all classes of dims that are worth it together, then each alone; none where none is.

    Each is a plan of its own: of a step of hundreds of operators the largest class is tried alone, of a large one none.
    """
    policy, shards = problem.policy.padding, problem.cluster.num_devices
    if not problem.request.padding or shards == 1:
        return []
    padded_classes = candidates(problem.graph, shards, policy.most_waste)
    if not padded_classes:
        return []
    shares = _shares(problem, padded_classes)
    worth = sorted((c for c in padded_classes if shares[c] >= policy.least_share), key=lambda c: -shares[c])
    dims = [c.representative(problem.graph) for c in worth[: policy.most_classes]]
    sizes, operators = problem.policy.sizes, len(problem.graph.operators)
    most = len(dims) if operators < sizes.few_operators else int(operators < sizes.small_operators)
    alone = [(d,) for d in dims[:most]] if len(dims) > 1 else []
    return [tuple(dims), *alone] if dims else []


def padding_notes(graph: Graph, padded: Sequence[PaddedDim]) -> tuple[str, ...]:
    """A line on each class of dims that is padded: its size, and how much of the work is waste."""
    lines = []
    for name, d, size in padded:
        plain = graph.types[name].shape[d]
        lines.append(
            f"dim {d} of {name} ({plain}), and all that is split with it, is padded to {size} inside of the step: "
            f"{(size - plain) / size:.2%} of its elements are waste, counted in time and memory"
        )
    return tuple(lines)


def _shares(problem: Problem, padded_classes: Sequence[PaddedDims]) -> dict[PaddedDims, float]:
    """Share of the step's time, by FLOPs and bytes, of the operators that have the dims of each class."""
    graph, flops_per_byte = problem.graph, problem.policy.algebra.flops_per_byte
    work = {}
    for op in graph.operators:
        types = graph.operand_types(op)
        work[op.id] = operator_flops(op, types) + flops_per_byte * operator_bytes(op, types)
    whole = math.fsum(work.values()) or 1.0
    shares = {}
    for c in padded_classes:
        names = {name for name, _ in c.places}
        of_class = (op for op in graph.operators if not names.isdisjoint((*op.reads, *(v.name for v in op.results))))
        shares[c] = math.fsum(work[op.id] for op in of_class) / whole
    return shares
