"""Chooses products that run in blocks, next to the messages of a gather before them or of a scatter after them.

Layouts are chosen before, as if no product did. A conversion is done so where it is one gather whose first reader is a
product, or one sum and scatter of a product that is read in no other way; and where the product in blocks
(`autopar.cost.collective_matmul_s`) takes less than the product and what it waits for the collective. Of two
conversions of one product the dearer one is. All of a step that pay by themselves are taken, if the step is shorter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import LogicalMesh
from autopar.cost import PRODUCTS, CostModel, collective_matmul_s, matrices_of
from autopar.ir import Layout, item_bytes
from autopar.ir.state_flow import StateFlow
from autopar.search.intra.collectives import MatmulBlock, PricedCollective, Thresholds, seconds_as_one
from autopar.search.intra.overlap import StepSchedules, producers_of
from autopar.search.intra.sharding_problem import ShardingProblem, SiteDraft, ValueDraft
from autopar.search.intra.work import dtype_of
from autopar.search.problem import Problem
from autopar.search.resharding import path_tables
from autopar.sharding.collective_matmul import OPERANDS, CollectiveMatmul, Travels, gathered_matmul, scattered_matmul
from autopar.sharding.reshard import ReshardStep


@dataclass(frozen=True)
class TimedCollectives:
    """The collectives of a choice with what they cost.

    Args:
        sent: as the stack of the cluster sends them.
        exposed_s: of each the seconds that nothing hides.
        listed: all collectives before the stack combines any.
        matmuls: by product that runs in blocks of which tensor they travel.
        longer_s: by such a product the seconds a step that it takes longer in blocks, if nothing waits.
        schedules: of ``listed``, whatever is sent as one; None where they do not overlap with computation.
    """

    sent: tuple[PricedCollective, ...]
    exposed_s: tuple[float, ...]
    listed: tuple[PricedCollective, ...]
    matmuls: Mapping[str, Travels] = field(default_factory=dict)
    longer_s: Mapping[str, float] = field(default_factory=dict)
    schedules: StepSchedules | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Exposed seconds of all collectives a step, and what products take longer as collective matmuls."""
        return sum(self.exposed_s) + sum(self.longer_s.values())


@dataclass(frozen=True)
class _BlockForm:
    """A collective that may become messages next to blocks of a product.

    Args:
        number: of the collective.
        site: the product.
        how: the form.
        blocks: how many there are.
        block_s: seconds a step of the product of one.
        message_s: seconds a step in which one travels by one place.
        gain_s: what is saved a step where nothing else hides the collective.
    """

    number: int
    site: SiteDraft
    how: CollectiveMatmul
    blocks: int
    block_s: float
    message_s: float
    gain_s: float


def timed_collectives(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    sent: Sequence[PricedCollective],
    thresholds: Thresholds | None = None,
) -> TimedCollectives:
    """The collectives of a choice; a collective matmul's are messages between the blocks of its product.

    Args:
        problem: what was planned; its request says which products may run in blocks.
        sharding_problem: from `build`.
        choice: strategy of each node.
        sent: from `collectives`.
        thresholds: up to how many bytes they are sent as one; None as the stack has it.
    """
    plain = _timed(problem, sharding_problem, choice, sent, thresholds)
    asked, cost = problem.request.collective_matmul, problem.cost_model
    if asked == "none" or (asked == "auto" and not cost.computes_while_sending):
        return plain
    candidates = _candidates(problem, sharding_problem, choice, sent, plain.exposed_s)
    taken: dict[str, _BlockForm] = {}
    for c in sorted(candidates, key=lambda c: (-c.gain_s, -sent[c.number].seconds, c.number)):
        if asked == "always" or c.gain_s > 0:
            taken.setdefault(c.site.id, c)
    if not taken:
        return plain
    listed = tuple(_listed(sent, {c.number: c for c in taken.values()}))
    in_blocks = replace(
        _timed(problem, sharding_problem, choice, listed, thresholds),
        matmuls={id: c.how.travels for id, c in taken.items()},
        longer_s={id: c.blocks * c.block_s - float(c.site.seconds[choice[c.site.node]]) for id, c in taken.items()},
    )
    return in_blocks if asked == "always" or in_blocks.seconds < plain.seconds else plain


def _timed(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    sent: Sequence[PricedCollective],
    thresholds: Thresholds | None,
) -> TimedCollectives:
    """The collectives as the stack of the cluster sends them, and for each the seconds of it that nothing hides."""
    cost, listed = problem.cost_model, tuple(sent)
    if cost.overlaps:
        schedules = StepSchedules(cost, sharding_problem, choice, listed)
        return TimedCollectives(*schedules.timed(thresholds), listed, schedules=schedules)
    if not cost.knows_kernels:
        overlaps = cost.computes_while_sending
        exposed_s = (max(0.0, c.seconds - c.block.seconds) if c.block and overlaps else c.seconds for c in listed)
        return TimedCollectives(listed, tuple(exposed_s), listed)
    flow = problem.graph.fact(StateFlow.of)
    of_state = [c.use.phase == "update" or c.value in flow.parameters or c.value in flow.gradients for c in sent]
    together = _together(cost, sharding_problem.mesh, sent, of_state)
    exposed_s = (c.seconds * cost.exposed_share(of_state=of) for c, of in zip(together, of_state, strict=True))
    return TimedCollectives(together, tuple(exposed_s), listed)


def _together(
    cost: CostModel, mesh: LogicalMesh, sent: Sequence[PricedCollective], of_state: Sequence[bool]
) -> tuple[PricedCollective, ...]:
    """Collectives of parameters and gradients with their parts of the seconds of those that the stack sends as one.

    These are of one kind, group of devices and pass of one loop, up to as many bytes as the stack says.
    """
    together, groups = list(sent), dict[tuple[str, str, str, str, float], list[int]]()
    for n, c in enumerate(sent):
        if of_state[n]:
            key = (c.kind, c.axis, c.use.phase, c.value.rpartition("/body/")[0], c.weight)
            groups.setdefault(key, []).append(n)
    for (kind, *_), members in groups.items():
        limit = cost.stack.gather_bytes if kind == "all-gather" else cost.stack.combine_bytes
        some = [sent[n] for n in members]
        joined_s, all_bytes = seconds_as_one(cost, mesh, some, limit), sum(c.bytes for c in some)
        for n in members if joined_s < sum(c.seconds for c in some) else ():
            together[n] = replace(sent[n], seconds=joined_s * sent[n].bytes / all_bytes)
    return tuple(together)


def _listed(sent: Sequence[PricedCollective], taken: Mapping[int, _BlockForm]) -> Iterator[PricedCollective]:
    """The collectives, with messages in the place of those that are taken apart."""
    for n, c in enumerate(sent):
        if n not in taken:
            yield c
            continue
        t = taken[n]
        for number in range(1, t.blocks):
            block = MatmulBlock(t.site.id, number, t.blocks, t.block_s, t.how.travels == "result")
            yield replace(c, kind="collective-permute", bytes=c.bytes // t.blocks, seconds=t.message_s, block=block)


def _candidates(
    problem: Problem,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    sent: Sequence[PricedCollective],
    exposed_s: Sequence[float],
) -> Iterator[_BlockForm]:
    """Collectives that may become messages."""
    cost, mesh = problem.cost_model, sharding_problem.mesh
    sites = {s.id: s for s in sharding_problem.sites if s.op.primitive == "dot_general" and not s.work.core}
    producers, reads = producers_of(sharding_problem), _reads_as_made(sharding_problem, choice, sent)
    for n, c in enumerate(sent):
        value = sharding_problem.values[c.value]
        step = _only_step(problem, sharding_problem, value, c)
        if step is None or not 1 < (blocks := mesh.group_size(step.axes)) <= problem.cost_model.starts.most_blocks:
            continue
        site = sites.get(c.use.consumer if step.kind == "all-gather" else producers.get(c.value, ""))
        how = None if site is None else _how(sharding_problem, choice, site, c, step, reads[c.value])
        if site is None or how is None or site.weight != c.weight:
            continue
        block_s = site.weight * _block_s(cost, sharding_problem, choice, site, how, blocks)
        message_s = c.weight * cost.collective_s("collective-permute", c.bytes // blocks, step.axes, mesh)
        whole_s = float(site.seconds[choice[site.node]])
        overlaps = cost.computes_while_sending
        gain_s = whole_s + exposed_s[n] - collective_matmul_s(blocks, block_s, message_s, overlaps=overlaps)
        yield _BlockForm(n, site, how, blocks, block_s, message_s, gain_s)


def _only_step(
    problem: Problem, sharding_problem: ShardingProblem, value: ValueDraft, c: PricedCollective
) -> ReshardStep | None:
    """The step of a conversion that is a gather, or a sum that is scattered, and nothing else."""
    if c.before is None or c.after is None or c.kind not in ("all-gather", "reduce-scatter") or value.wire:
        return None
    steps = path_tables(sharding_problem.mesh, problem.cost_model).path(value.sent, c.before, c.after)
    return steps[0] if len(steps) == 1 else None


def _reads_as_made(
    sharding_problem: ShardingProblem, choice: Sequence[int], sent: Sequence[PricedCollective]
) -> Counter[str]:
    """Number of reads of each value in the layout that it is made in, by readers and by conversions."""
    conversions: dict[str, set[tuple[int, Layout]]] = defaultdict(set)
    reads: Counter[str] = Counter()
    for c in sent:
        v = sharding_problem.values[c.value]
        if v.node is not None and c.after is not None and c.before == v.layouts[choice[v.node]]:
            conversions[c.value].add((c.use.time, c.after))
    for key in conversions:
        v = sharding_problem.values[key]
        assert v.node is not None
        as_made = (u.required[choice[u.node]] == v.layouts[choice[v.node]] for u in v.uses)
        reads[key] = len(conversions[key]) + sum(as_made)
    return reads


def _how(
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    site: SiteDraft,
    c: PricedCollective,
    step: ReshardStep,
    reads: int,
) -> CollectiveMatmul | None:
    """The form of a product in blocks."""
    ranks, names = [t.rank for t in site.types], sharding_problem.mesh.names
    prefix = site.id.removesuffix(site.op.id)
    if step.kind == "reduce-scatter":
        v = sharding_problem.values[c.value]
        as_made = v.node is not None and c.before == v.layouts[choice[v.node]]
        return scattered_matmul(site.op, ranks, step, names) if as_made and reads == 1 else None
    operands = [n for n, o in enumerate(site.op.operands) if isinstance(o, str) and prefix + o == c.value]
    layouts = site.strategies[choice[site.node]].operand_layouts
    if len(operands) != 1 or layouts[operands[0]] != c.after:
        return None
    return gathered_matmul(site.op, ranks, operands[0], step, names)


def _block_s(
    cost: CostModel,
    sharding_problem: ShardingProblem,
    choice: Sequence[int],
    site: SiteDraft,
    how: CollectiveMatmul,
    blocks: int,
) -> float:
    """Seconds of one run of the product of one block; where products of blocks are added the sum is read once more."""
    strategy, sizes = site.strategies[choice[site.node]], sharding_problem.mesh.sizes
    result_type, result_layout = site.op.results[0].type, strategy.result_layouts[0]
    added_s = 0.0
    if how.result_dim < 0:
        added_s = float(cost.moved_s(float(result_layout.local_bytes(result_type, sizes)), 0.0))
    if not cost.knows_kernels or site.op.primitive not in PRODUCTS:
        return float(cost.work_s(site.work, strategy.split * blocks)) + added_s
    pairs = zip(strategy.operand_layouts, site.types, strict=True)
    shapes = [list(k.local_shape(t.shape, sizes)) for k, t in pairs]
    result = list(result_layout.local_shape(result_type.shape, sizes))
    cut = list(how.sliced) if how.travels == "result" else [(OPERANDS.index(how.travels), how.dim), *how.sliced]
    for operand, dim in cut:
        shapes[operand][dim] //= blocks
    if how.result_dim >= 0:
        result[how.result_dim] //= blocks
    product = matrices_of(site.op, shapes, result, item_bytes(site.types[0].dtype))
    assert product is not None
    return float(cost.product_s(product, dtype_of(site.op, site.types), backward=site.work.backward)) + added_s
