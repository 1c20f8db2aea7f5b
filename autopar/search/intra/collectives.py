"""The collectives that a choice needs, value by value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Layout
from autopar.search.intra.draft import Use
from autopar.search.intra.edges import edges, there_already
from autopar.search.intra.sharding_problem import ShardingProblem
from autopar.search.problem import Problem
from autopar.search.resharding import path_tables
from autopar.sharding.routes import Routes


@dataclass(frozen=True, slots=True)
class MatmulBlock:
    """The message before one block of a product that runs in blocks, or after one.

    Args:
        product: id of the product.
        number: of the block, from 1: what the message brings is multiplied then; after a product the message takes the
            sums of the block before.
        blocks: of the product.
        seconds: of the product of one block, a step.
        scatters: whether it is of the result.
    """

    product: str
    number: int
    blocks: int
    seconds: float
    scatters: bool


@dataclass(frozen=True, slots=True)
class PricedCollective:
    """One collective of a choice: what it is, of which value, for which use, how often a step, and seconds a step.

    ``before`` and ``after`` are the layouts of the conversion that it is part of. ``block`` says between which blocks
    of a product a message is. ``wire`` is the format whose codes are sent.
    """

    kind: str
    value: str
    bytes: int
    axis: str
    use: Use
    weight: float
    seconds: float
    before: Layout | None = None
    after: Layout | None = None
    block: MatmulBlock | None = None
    wire: str = ""


def collectives(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    layouts: Mapping[str, Layout],
    copies: Mapping[str, Mapping[str, Layout]],
) -> Iterator[PricedCollective]:
    """Every collective that a choice needs, value by value and use by use in time.

    What one program made of a value is not there for another.

    Args:
        problem: what was planned.
        sharding_problem: from `build`.
        choice: strategy of each node.
        layouts: layout of every value, see `value_layouts`.
        copies: layout of shared copies by phase, see `copy_layouts`.
    """
    tables = path_tables(sharding_problem.mesh, problem.cost_model)
    for v in sharding_problem.values.values():
        if v.key not in layouts:
            continue
        by_program: dict[str, Routes] = {}
        for use in sorted(v.uses, key=lambda u: u.time):
            required = use.required[choice[use.node]]
            program = use.phase if problem.subproblem.separate_programs else ""
            if program not in by_program:
                shared = dict(copies.get(v.key, {}))
                by_program[program] = Routes(
                    tables.sending(v.wire), v.sent, layouts[v.key], shared, sharding_problem.memory_bound
                )
            routes = by_program[program]
            for n, ((_, before), (_, after)) in enumerate(pairs := routes.take(required, use.phase)):
                weight = v.weight if n < len(pairs) - 1 else use.weight
                for sent in routes.tables.communication(v.sent, before, after):
                    axes = "+".join(sent.axes)
                    seconds = weight * sent.seconds
                    yield PricedCollective(
                        sent.kind, v.key, sent.full_bytes, axes, use, weight, seconds, before, after, wire=sent.wire
                    )
    yield from _edges(problem, sharding_problem, choice)


def _edges(problem: Problem, sharding_problem: ShardingProblem, choice: Sequence[int]) -> Iterator[PricedCollective]:
    """Messages of operators to neighbours during their run."""
    for s in sharding_problem.sites:
        strategy = s.strategies[choice[s.node]]
        if not strategy.exchanges and not strategy.rings:
            continue
        prefix = s.id.removesuffix(s.op.id)
        there = there_already(sharding_problem.sites, s, choice)
        for e in edges(problem.cost_model, sharding_problem.mesh, strategy, s.op, s.types, there):
            value = f"{prefix}{s.op.operands[e.operand]}"
            use = Use(s.node, (), s.weight, s.time, s.id, s.phase, heavy=True)
            axes = "+".join(e.axes)
            yield PricedCollective("collective-permute", value, e.bytes, axes, use, s.weight, s.weight * e.seconds)
