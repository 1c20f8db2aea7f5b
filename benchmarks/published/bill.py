"""What the devices of a plan run and send in a step: kernels by their sizes, collectives by theirs.

A bill is made once from the answer of the integer program. Its lines are priced by the functions of `autopar.cost` that
the integer program prices its strategies with, under any stack and constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Span
from autopar.cost import PRODUCTS, Core, Matrices
from autopar.search.intra.collectives import collectives
from autopar.search.intra.extract import copy_layouts, value_layouts
from autopar.search.intra.sharding_problem import ShardingProblem, SiteDraft
from autopar.search.intra.work import product_of
from autopar.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator on one device.

    Args:
        id: of the operator, with those of enclosing operators and regions before it.
        primitive: its primitive.
        phase: "forward", "backward" or "update".
        count: how often a step.
        seconds: busy seconds of one run, as the integer program counted them.
        product: sizes of a matrix product or convolution; None of others.
        bytes: that it reads and writes; 0 where it is part of a kernel that reads it.
        flops: FLOPs.
        dtype: jaxpr name of the dtype that it computes in.
        fused: it is part of the kernel that reads it.
        core: whether it is of the core of attention, see `autopar.cost.work`.
        shapes: of its operands and results, whole.
    """

    id: str
    primitive: str
    phase: str
    count: float
    seconds: float
    product: Matrices | None
    bytes: float
    flops: float
    dtype: str
    fused: bool
    core: Core
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BilledMessage:
    """A collective.

    Args:
        kind: one of `autopar.cost.KINDS`.
        consumer: operator that needs it.
        phase: of that operator.
        count: how often a step.
        seconds: of one, as the integer program counted them.
        bytes: of the full tensor as one group of devices sees it.
        axes: names of the mesh axes, joined by ``+``.
        span: where a group of devices lies.
    """

    kind: str
    consumer: str
    phase: str
    count: float
    seconds: float
    bytes: float
    axes: str
    span: Span | None


@dataclass(frozen=True, slots=True, eq=False)
class Bill:
    """The lines of a plan of one stage, in the order in which operators run. Two bills are equal if they are one."""

    kernels: tuple[Kernel, ...]
    messages: tuple[BilledMessage, ...]


def bill_of(problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int]) -> Bill:
    """The bill of a choice.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node of ``stated.problem``.
    """
    layouts = value_layouts(sharding_problem, choice)
    sent = collectives(problem, sharding_problem, choice, layouts, copy_layouts(sharding_problem, choice, layouts))
    messages = tuple(
        BilledMessage(
            c.kind,
            c.use.consumer,
            c.use.phase,
            c.weight,
            c.seconds / c.weight if c.weight else 0.0,
            c.bytes,
            c.axis,
            sharding_problem.mesh.link(tuple(c.axis.split("+"))).span,
        )
        for c in sent
    )
    return Bill(tuple(_kernel(s, sharding_problem, choice[s.node]) for s in sharding_problem.sites), messages)


def _kernel(site: SiteDraft, sharding_problem: ShardingProblem, k: int) -> Kernel:
    strategy, work = site.strategies[k], site.work
    product = None
    if site.op.primitive in PRODUCTS:
        product = product_of(site.op, site.types, strategy, sharding_problem.mesh.sizes)
    return Kernel(
        site.id,
        site.op.primitive,
        site.phase,
        site.weight,
        float(site.seconds[k]) / site.weight if site.weight else 0.0,
        product,
        work.bytes / strategy.split,
        work.flops / strategy.split,
        work.dtype,
        work.fused,
        work.core,
        (*(t.shape for t in site.types), *(v.type.shape for v in site.op.results)),
    )
