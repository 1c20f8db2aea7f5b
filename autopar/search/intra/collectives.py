"""The collectives that a choice needs, value by value, and which of them a compiler sends as one.

XLA joins all-gathers, all-reduces and reduce-scatters of a computation that do not depend on each other, in the order
of the program, until their bytes reach a threshold (another one for all-gathers): that of the stack, or of the plan.
Joined are those of a kind and of the same groups of devices. What is joined begins when the last of its values is
there, and ends for all who take them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.cost.constants import Stack
from autopar.ir import Layout
from autopar.search.intra.edges import edges, there_already
from autopar.search.intra.sharding_problem import ShardingProblem, Use
from autopar.search.problem import Problem
from autopar.search.resharding import path_tables
from autopar.sharding.routes import Routes


@dataclass(frozen=True, slots=True)
class MatmulBlock:
    """A message of a collective matmul, before or after the product of one block.

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
    of a product a message is. ``wire`` is the format whose codes are sent. ``lost_s`` are those of the seconds that
    devices lose by waiting for each other (`CostModel.refill_s`), once for what is sent as one.
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
    lost_s: float = 0.0


def seconds_as_one(
    cost: CostModel, mesh: LogicalMesh, some: Sequence[PricedCollective], most_bytes: float = math.inf
) -> float:
    """Seconds of collectives of one kind and of the same groups of devices, a step, that are sent as one.

    What waiting loses they lose once a message.

    Args:
        cost: prices a message.
        mesh: the logical mesh.
        some: the collectives, in the order in which they are ready.
        most_bytes: bytes up to which they are sent as one.
    """
    first, lost_s = some[0], max(c.lost_s for c in some)
    axes = tuple(first.axis.split("+"))
    messages = cost.combined([float(c.bytes) for c in some], most_bytes)
    return sum(lost_s + first.weight * cost.collective_s(first.kind, bytes, axes, mesh) for bytes in messages)


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
                held_bytes = before.local_bytes(v.sent, sharding_problem.mesh.sizes)
                refill_s = weight * float(problem.cost_model.refill_s(held_bytes))
                for m, sent in enumerate(routes.tables.communication(v.sent, before, after)):
                    axes, lost_s = "+".join(sent.axes), refill_s if m == 0 else 0.0
                    yield PricedCollective(
                        sent.kind, v.key, sent.full_bytes, axes, use, weight, weight * sent.seconds + lost_s,
                        before, after, wire=sent.wire, lost_s=lost_s,
                    )  # fmt: skip
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


#: Kinds of collectives that compilers send as one, in the order of XLA's passes on GPUs.
JOINED = ("all-gather", "all-reduce", "reduce-scatter")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bytes up to which a compiler sends collectives as one; 0 sends each alone.

    Args:
        combine_bytes: of all-reduces and reduce-scatters.
        gather_bytes: of all-gathers.
    """

    combine_bytes: float
    gather_bytes: float

    @staticmethod
    def of(stack: Stack) -> Thresholds:
        """Thresholds of a training program, unless a plan sets others."""
        return Thresholds(stack.combine_bytes, stack.gather_bytes)


@dataclass(frozen=True, slots=True)
class Ends:
    """Maker and reader of a collective's value, as places in the order of the program.

    Args:
        producer: place of the task that makes it; -1 for what is there at the start.
        consumer: place of the task that takes it.
    """

    producer: int
    consumer: int


def combined(
    thresholds: Thresholds, sent: Sequence[PricedCollective], ends: Mapping[int, Ends], needs: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Groups of two or more collectives of one region that are sent as one message, as XLA's combiners do.

    A group ends before the first collective of its kind and axes that needs a member, or that a member needs. Members
    start together: what needs one of them needs from then on all that any of them needs, so later groups never wait
    for each other. The order of kinds is assumed to be that of XLA on GPUs, see `JOINED`.

    Collectives between the same two tasks are a chain: each reads the result of the one before. No two of a chain are
    in one group.

    Args:
        thresholds: bytes of a message up to which gathers, and other collectives, are combined.
        sent: all collectives; a group has indices of it.
        ends: by index of each collective of the region the tasks that make and take its value, by place in ``needs``.
        needs: for each task of the region, in running order, the places of earlier tasks whose results it reads.
    """
    joinable = [n for n in ends if sent[n].kind in JOINED]
    if len({_key(sent[n]) for n in joinable}) == len(joinable):
        return ()
    joinable.sort(key=lambda n: (JOINED.index(sent[n].kind), ends[n].producer, n))
    queues: dict[tuple[str, str, float], deque[int]] = defaultdict(deque)
    for n in joinable:
        queues[_key(sent[n])].append(n)
    needed = _needed(ends, needs)
    groups: list[tuple[int, ...]] = []
    for n in joinable:
        queue = queues[_key(sent[n])]
        if not queue or queue[0] != n:
            continue
        limit = thresholds.gather_bytes if sent[n].kind == "all-gather" else thresholds.combine_bytes
        group, members, together, bytes = [queue.popleft()], 1 << n, needed[n], sent[n].bytes
        while queue and bytes + sent[m := queue[0]].bytes <= limit and not (needed[m] & members or together >> m & 1):
            members |= 1 << m
            together |= needed[m]
            bytes += sent[m].bytes
            group.append(queue.popleft())
        if len(group) > 1:
            groups.append(tuple(group))
            for other in (m for rest in queues.values() for m in rest):
                if needed[other] & members:
                    needed[other] |= members | together
    return tuple(sorted(groups))


def _key(c: PricedCollective) -> tuple[str, str, float]:
    return c.kind, c.axis, c.weight


def _needed(ends: Mapping[int, Ends], needs: Sequence[Sequence[int]]) -> dict[int, int]:
    """Collectives that each collective needs, directly or not, as bits."""
    of_producer, of_consumer = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n in sorted(ends):
        of_producer[ends[n].producer].append(n)
        of_consumer[ends[n].consumer].append(n)
    needed: dict[int, int] = {}
    of_tasks: list[int] = []
    for place in range(-1, len(needs)):
        bits = 0
        if place >= 0:
            for task in needs[place]:
                bits |= of_tasks[task]
            for n in of_consumer[place]:
                bits |= needed[n] | 1 << n
            of_tasks.append(bits)
        chains: dict[int, int] = {}
        for n in of_producer[place]:
            needed[n] = chains.get(ends[n].consumer, bits)
            chains[ends[n].consumer] = needed[n] | 1 << n
    return needed
