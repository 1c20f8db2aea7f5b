"""Dims that the devices do not divide and that are worth a plan with padding, and the plan's notes on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.cost.compute import operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.ir.loops import runs_inside
from autopar.ir.phases import is_stage_loop
from autopar.search.problem import Problem
from autopar.search.techniques.base import Asked
from autopar.sharding.padding import PaddedDim, PaddedDims, candidates, classes, named, operators_of, types_of


@dataclass(frozen=True)
class PaddingOfDims:
    """Padding; a value has one dim of each part of a class that is padded.

    What lies on hosts has none, nor have layers that are updated one at a time, nor has the batch where microbatches
    of one stage split it: its padding would mix them. Microbatches of a stage of a pipeline are padded each by itself.
    """

    field: str = "padded"

    def obstacle(self, asked: Asked) -> str:
        """See `PlannedTechnique`."""
        return _ruled_out(asked) or ("" if self.options(asked) else "the devices divide all dims that are worth it")

    def options(self, asked: Asked) -> tuple[tuple[PaddedDim, ...], ...]:
        """See `PlannedTechnique`."""
        if _ruled_out(asked):
            return ()
        problem, classes = asked.problem, paddings(asked.problem)
        mixes = not asked.is_stage and asked.planned is not None and asked.planned.form.microbatches > 1
        return tuple(dims for dims in classes if not (mixes and _pads_batch(problem.graph, dims)))

    def notes(self, graph: Graph, value: tuple[PaddedDim, ...]) -> tuple[str, ...]:
        """See `PlannedTechnique`."""
        return padding_notes(graph, value)


PADDING = PaddingOfDims()


def _ruled_out(asked: Asked) -> str:
    request, stage = asked.problem.request, asked.planned
    if not request.padding or asked.problem.cluster.num_devices == 1:
        return "one device divides all dims" if request.padding else "padding=False"
    if request.token_slices is not None:
        return "slices of tokens take dims as they are"
    if asked.problem.job.offload in ("layers", "update") or (stage is not None and stage.host_bytes):
        return "what lies on hosts has no padding"
    if stage is not None and (stage.form.layered_update or stage.form.backward_update):
        return "layers are updated one at a time"
    return ""


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
        worth = sorted((c for c in padded_classes if shares[c] >= policy.least_share), key=lambda c: -shares[c])
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
    graph, flops_per_byte = problem.graph, problem.policy.algebra.flops_per_byte
    runs = max((runs_inside(op) for op in graph.operators if is_stage_loop(op)), default=1.0)
    work: dict[tuple[str, str], float] = {}
    for prefix, inner, op in operators_of(graph):
        types = inner.operand_types(op)
        once = operator_flops(op, types) + flops_per_byte * operator_bytes(op, types)
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
