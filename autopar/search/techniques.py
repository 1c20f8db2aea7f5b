"""Techniques as the planner sees them: which a step or a stage may take, with which values, and the notes on them.

`TECHNIQUES` lists them in the order in which lowering applies them (`autopar.lower.techniques`); `PlannedTechnique` is
their interface, one class for each. State that devices update, and what enters segments, has its place chosen with the
sharding: see `autopar.search.intra.host`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, Protocol

from autopar.cost.compute import operator_bytes, operator_flops
from autopar.ir import Graph
from autopar.ir.blockwise import find
from autopar.ir.layer_loops import segment_lengths
from autopar.ir.loops import runs_inside
from autopar.ir.phases import is_stage_loop
from autopar.microbatch import batch_size
from autopar.plan import Plan, Stage
from autopar.plan.content import blocks_note
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


class PlannedTechnique(Protocol):
    """A technique that changes the step before it is sharded, as recomputation: when to try it, and notes on it."""

    @property
    def field(self) -> str:
        """The field of `StepForm` that has its value."""

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""

    def options(self, asked: Asked) -> tuple[Any, ...]:
        """Values of the field that are worth a try, the best first; empty where there is an obstacle."""

    def notes(self, graph: Graph, value: Any) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique.

        Args:
            graph: the step without the technique.
            value: of the technique's field in `StepForm`, as the level of recomputation.
        """


@dataclass(frozen=True)
class Switch(ABC):
    """A technique that is on or off, and of which the notes of a plan say nothing.

    Args:
        field: name of the field of `StepForm` that turns it on.
    """

    field: str

    @abstractmethod
    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""

    def options(self, asked: Asked) -> tuple[bool, ...]:
        """Values of the technique's field that are worth a try, the best first; empty where there is an obstacle."""
        return () if self.obstacle(asked) else (True,)

    def notes(self, graph: Graph, value: bool) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return ()


def body_of(graph: Graph) -> Graph:
    """Graph of one microbatch of a stage of a pipeline; other graphs themselves."""
    return next((op.region("body") for op in graph.operators if is_stage_loop(op)), graph)


def block_scores(problem: Problem) -> int:
    """Scores of one head from which attention runs in blocks, where some of the step does; else 0."""
    if problem.request.attention == "plain":
        return 0
    least = 1 if problem.request.attention == "blocks" else problem.policy.attention.least_scores
    return least if _has_cores(problem.graph, least) else 0


@dataclass(frozen=True)
class Blocks:
    """Attention in blocks; a value is the number of scores of one head from which on."""

    field: str = "block_scores"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if asked.problem.request.attention == "plain":
            return "attention='plain' takes it as it is written"
        return "" if block_scores(asked.problem) else "no attention has as many scores"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """Values of the technique's field that are worth a try, the best first; empty where there is an obstacle."""
        scores = block_scores(asked.problem)
        return (scores,) if scores else ()

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return blocks_note(value)


BLOCKS = Blocks()


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


@dataclass(frozen=True)
class BackwardUpdate(Switch):
    """Updates inside of the backward loop over layers. Gradients that are kept are the step's to tell: `StepSource`."""

    field: str = "backward_update"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        job = asked.problem.job
        if job.offload != "none":
            return f"offload={job.offload!r} updates layers in loops of their own"
        if asked.problem.request.token_slices is not None:
            return "slices of tokens add gradients up"
        if asked.is_stage and (job.num_microbatches or 1) > 1:
            return "microbatches add gradients up"
        return "" if asked.updates_in_backward() else "no backward loop makes gradients that their update alone reads"


@dataclass(frozen=True)
class LayeredUpdate(Switch):
    """Updates of layers one at a time, in a loop of their own, so that their state may lie on hosts."""

    field: str = "layered_update"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if asked.problem.job.offload == "none":
            return "offload='none' keeps state on devices"
        return "" if asked.updates_by_layer() else "no update treats stacked layers one by one"

    def options(self, asked: Asked) -> tuple[bool, ...]:
        """Values to try, the best first. Where whole layers have to be in host memory the technique is not left out."""
        if self.obstacle(asked):
            return ()
        return (True,) if asked.problem.job.offload == "layers" else (False, True)


BACKWARD_UPDATE, LAYERED_UPDATE = BackwardUpdate(), LayeredUpdate()


@dataclass(frozen=True)
class HostUpdate(Switch):
    """Updates by hosts, of state that only the update reads."""

    field: str = "host_update"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if asked.named:
            return "a strategy names the plan"
        offload = asked.problem.job.offload
        return _without_hosts(asked) if offload == "auto" else f"offload={offload!r} says where state lies"


@dataclass(frozen=True)
class ActivationsOnHost(Switch):
    """Activations of microbatches in flight in host memory, in stages where so many are in flight that it helps."""

    field: str = "activations_offloaded"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if asked.problem.job.offload == "none":
            return "offload='none' keeps activations on devices"
        if asked.in_flight - 1 <= IN_TRANSFER:
            return "no more microbatches are in flight than move between devices and hosts"
        return _without_hosts(asked)


HOST_UPDATE, ACTIVATIONS_ON_HOST = HostUpdate(), ActivationsOnHost()


def _without_hosts(asked: Asked) -> str:
    groups = asked.problem.cluster.groups
    return "the cluster gives no host_bandwidth" if any(g.host_bandwidth is None for g in groups) else ""


@dataclass(frozen=True)
class Microbatches:
    """Microbatches; a value is their number. Those of a stage are the schedule's: one number, which is given."""

    field: str = "microbatches"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if asked.problem.job.num_microbatches == 1:
            return "num_microbatches=1"
        return "" if self.options(asked) else "there is no batch of several examples"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """Values to try, the best first. One is among them where none is asked for."""
        count = asked.problem.job.num_microbatches
        if count is not None:
            return () if count == 1 else (count,)
        size = batch_size(asked.problem.graph) or 1
        return () if size == 1 else tuple(2**k for k in range(size.bit_length()))

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return ()


MICROBATCHES = Microbatches()


@dataclass(frozen=True)
class PaddingOfDims:
    """Padding; a value has one dim of each part of a class that is padded.

    What lies on hosts has none, nor have layers that are updated one at a time, nor has the batch where microbatches
    of one stage split it: its padding would mix them. Microbatches of a stage of a pipeline are padded each by itself.
    """

    field: str = "padded"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        return _padding_ruled_out(asked) or (
            "" if self.options(asked) else "the devices divide all dims that are worth it"
        )

    def options(self, asked: Asked) -> tuple[tuple[PaddedDim, ...], ...]:
        """Values of the technique's field that are worth a try, the best first; empty where there is an obstacle."""
        if _padding_ruled_out(asked):
            return ()
        problem, classes = asked.problem, paddings(asked.problem)
        mixes = not asked.is_stage and asked.planned is not None and asked.planned.form.microbatches > 1
        return tuple(dims for dims in classes if not (mixes and _pads_batch(problem.graph, dims)))

    def notes(self, graph: Graph, value: tuple[PaddedDim, ...]) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return padding_notes(graph, value)


PADDING = PaddingOfDims()


def _padding_ruled_out(asked: Asked) -> str:
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


@dataclass(frozen=True)
class Recomputation:
    """Recomputation in the backward pass; a value is the level of what is held."""

    field: str = "remat"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        return "" if self.options(asked) else "remat='none' holds all that the backward pass reads"

    def options(self, asked: Asked) -> tuple[Level, ...]:
        """Levels of recomputation to try, that which keeps the most activations first."""
        levels = levels_of(asked.problem.job.remat)
        return () if levels == ("none",) else levels

    def notes(self, graph: Graph, value: Level) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return ()


RECOMPUTATION = Recomputation()


def levels_of(remat: str) -> tuple[Level, ...]:
    """Levels of recomputation to try, that which keeps the most activations first.

    Args:
        remat: the level that is asked for, as "selective"; "auto" for all.
    """
    return LEVELS if remat == "auto" else tuple(level for level in LEVELS if level == remat)


@dataclass(frozen=True)
class Segments:
    """Segments of layers; a value is a number of layers.

    With host memory, what enters segments may lie there too: the backward pass of one stage fetches it
    one segment ahead, that of a stage of a pipeline one microbatch ahead.
    """

    field: str = "segment_layers"

    def obstacle(self, asked: Asked) -> str:
        """Reason for which the technique is not tried; "" where `options` has values."""
        if (reason := _segments_ruled_out(asked)) or segment_lengths(body_of(asked.problem.graph)):
            return reason
        return "no pair of loops over layers keeps less in segments"

    def options(self, asked: Asked) -> tuple[int, ...]:
        """Values of the technique's field that are worth a try, the best first; empty where there is an obstacle."""
        return () if _segments_ruled_out(asked) else segment_lengths(body_of(asked.problem.graph))

    def notes(self, graph: Graph, value: int) -> tuple[str, ...]:
        """Sentences for the notes of a plan that uses the technique with this value of its field."""
        return ()


def _segments_ruled_out(asked: Asked) -> str:
    job = asked.problem.job
    if asked.named:
        return "a strategy names what is recomputed"
    if job.offload not in ("none", "auto"):
        return f"offload={job.offload!r} moves whole layers"
    # Of stages the name of a level may be a strategy's.
    if job.remat not in (("auto",) if asked.is_stage else ("auto", "full")):
        return f"remat={job.remat!r} names what is recomputed"
    return ""


SEGMENTS = Segments()


_IN_ORDER: tuple[PlannedTechnique, ...] = (
    PADDING,
    RECOMPUTATION,
    BACKWARD_UPDATE,
    SEGMENTS,
    LAYERED_UPDATE,
    MICROBATCHES,
    BLOCKS,
    HOST_UPDATE,
    ACTIVATIONS_ON_HOST,
)
#: By field of `StepForm`, in the order in which they are applied; those of hosts change no graph.
TECHNIQUES: Final = MappingProxyType({t.field: t for t in _IN_ORDER})
