"""Operators of the forward pass clustered into layers: balanced FLOPs, least bytes cut (Alpa, OSDI'22, section 5.2).

Layers are runs of consecutive operators, in the order in which the user's function computes them. The dynamic program
is Alpa's: of all ways to cut the forward pass into a number of runs, each with at most (1 + imbalance) times the mean
FLOPs, the one whose cuts let the fewest bytes through. FLOPs are those of heavy operators, such as products, and each
run has one: bytes alone would make layers of casts and losses. What is fused into kernels goes with the product before
it where that costs no bytes, so that the derivative of an activation function lies next to the weights whose gradients
need it; where layers are recomputed it goes with the product after it, so that the one before need not run again. A
heavy operator alone may exceed its share, as the head of a language model does: the mean is then of the others. Where
the forward pass is a stack of equal blocks, blocks are the layers (`_of_blocks`): what is known of
one is then known of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from autopar.cost import total_flops
from autopar.errors import MicrobatchError, PlanMismatchError
from autopar.ir import Graph, Literal, Operator
from autopar.ir.analysis import dependents
from autopar.ir.fingerprint import structural_hash
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import is_fusible
from autopar.microbatch import Microbatching, analyze

#: Most layers that blocks make; of more blocks several are a layer.
MOST_BLOCKS = 160
#: Share of a block's FLOPs above which what is before or after the blocks is a layer of its own.
OWN_LAYER = 0.1
#: Share of the FLOPs of the heaviest operator above which one that is not fused into its readers is heavy.
HEAVY = 0.01
#: Runs of operators that are looked at together: 8 MB an array.
MOST_RUNS = 1_000_000


@dataclass(frozen=True)
class Layers:
    """The forward pass in runs.

    Args:
        members: by layer the ids of its operators, in running order.
        flops: by layer, of one microbatch and forward alone.
        cut_bytes: bytes of one microbatch that cross from layer i to i + 1 and beyond.
        isomorphic: for each layer the first whose operators are the same, wiring left aside; empty where that is not
            known.
        recomputed: the same operators by layer as layers are recomputed; empty where that is not known.
    """

    members: tuple[tuple[str, ...], ...]
    flops: tuple[float, ...]
    cut_bytes: tuple[int, ...]
    isomorphic: tuple[int, ...] = ()
    recomputed: tuple[tuple[str, ...], ...] = ()


def forward_operators(graph: Graph, microbatching: Microbatching) -> list[Operator]:
    """Operators of the loop that depend on the batch and are no part of the backward pass, in running order.

    What waits until examples have met counts as backward pass.
    """
    inside = set(microbatching.body)
    body = [op for op in graph.operators if op.id in inside]
    backward = {op.id for op in dependents(body, microbatching.met, also=lambda op: phase_of(op) == "backward")}
    return dependents([op for op in body if op.id not in backward], microbatching.batch)


def cluster(
    graph: Graph,
    microbatching: Microbatching,
    count: int,
    imbalance: float = 0.2,
    fewest: int | None = None,
    stages: int = 1,
) -> Layers:
    """The forward pass in at most ``count`` layers.

    Args:
        graph: a train step.
        microbatching: its microbatches.
        count: number of layers; fewer where there are fewer heavy operators, more where there are that many blocks.
        imbalance: share by which a layer may exceed the mean FLOPs.
        fewest: blocks are the layers if there are so many of them; None where they never are.
        stages: layers that there have to be, were they of operators that compute little.
    """
    operators = forward_operators(graph, microbatching)
    flops = np.array([total_flops(graph, op) for op in operators])
    cuts = _cut_bytes(graph, microbatching, operators)
    heavy = _heavy_flops(operators, flops, stages)
    count = max(1, min(count, int((heavy > 0).sum())))
    tokens = [_token(graph, op) for op in operators]
    blocks = None if fewest is None else _of_blocks(tokens, flops, cuts, fewest)
    ends = blocks or _best_ends(heavy, cuts, count, imbalance)
    starts = [0, *ends[:-1]]
    early = [*(_before_fused(heavy, cuts, a, b) for a, b in itertools.pairwise([0, *ends[:-1]])), ends[-1]]
    seen: dict[tuple[object, ...], int] = {}
    first_of_kind = tuple(
        seen.setdefault(tuple(tokens[a:b]), n) for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    )
    return Layers(
        tuple(tuple(op.id for op in operators[a:b]) for a, b in zip(starts, ends, strict=True)),
        tuple(float(flops[a:b].sum()) for a, b in zip(starts, ends, strict=True)),
        tuple(int(cuts[e - 1]) for e in ends[:-1]),
        first_of_kind,
        tuple(tuple(op.id for op in operators[a:b]) for a, b in itertools.pairwise([0, *early])),
    )


def _before_fused(heavy: np.ndarray, cuts: np.ndarray, start: int, end: int) -> int:
    """The first end after the last heavy operator of a run that lets no more bytes through than its own does."""
    last = max((start + int(n) for n in np.flatnonzero(heavy[start:end])), default=end - 1)
    return last + 1 + int(np.argmax(cuts[last:end] <= cuts[end - 1]))


def _of_blocks(
    tokens: Sequence[tuple[object, ...]], flops: np.ndarray, cuts: np.ndarray, fewest: int
) -> list[int] | None:
    """Ends of layers of whole blocks; None where there are no blocks, or not ``fewest`` of them.

    Up to `MOST_BLOCKS` blocks are a layer each, however few layers would do. What comes before the first block and
    after the last belongs to them, or is a layer of its own where it computes much.
    """
    repeats = find_repeats(tokens, flops)
    if repeats is None:
        return None
    repeats = repeats.phased(cuts)
    together = -(-repeats.count // MOST_BLOCKS)
    if repeats.count // together < fewest:
        return None
    sums = np.concatenate([[0.0], np.cumsum(flops)])
    ends = [repeats.start + repeats.period * k for k in range(together, repeats.count + 1, together)]
    block = float(sums[ends[0]] - sums[repeats.start])
    ends[-1] = repeats.start + repeats.period * repeats.count
    head = [repeats.start] if sums[repeats.start] > OWN_LAYER * block else []
    if sums[-1] - sums[ends[-1]] > OWN_LAYER * block:
        ends.append(len(tokens))
    else:
        ends[-1] = len(tokens)
    return [*head, *ends]


def _token(graph: Graph, op: Operator) -> tuple[object, ...]:
    """Facts by which operators of equal blocks compare."""
    types = tuple((o.text if isinstance(o, Literal) else None, graph.type_of(o)) for o in op.operands)
    inside = structural_hash(op, graph.operand_types(op)) if op.regions else ""
    return op.primitive, repr(op.attrs), types, tuple(v.type for v in op.results), inside


def _cut_bytes(graph: Graph, microbatching: Microbatching, operators: list[Operator]) -> np.ndarray:
    """Bytes of one microbatch alive between operator i and i + 1: made at or before i, read in forward after it."""
    last: dict[str, int] = {}
    produced_at: dict[str, int] = {}
    for i, op in enumerate(operators):
        for o in op.operands:
            if not isinstance(o, Literal) and o in produced_at:
                last[o] = i
        produced_at.update((v.name, i) for v in op.results)
    change = np.zeros(len(operators) + 1)
    for name, end in last.items():
        nbytes = graph.types[name].nbytes / microbatching.count
        change[produced_at[name]] += nbytes
        change[end] -= nbytes
    return np.cumsum(change)[: len(operators)]


@dataclass(frozen=True)
class ForwardCuts:
    """Places where the forward pass of all examples can be cut, in running order.

    Args:
        first: by place the least share of the FLOPs that is before it.
        last: by place the greatest share that is before it: a loop over layers can be cut after any of its trips.
        nbytes: by place the bytes that cross it.
    """

    first: np.ndarray
    last: np.ndarray
    nbytes: np.ndarray

    @staticmethod
    def of(graph: Graph) -> ForwardCuts:
        """The places of a train step; none where it has no batch, or computes nothing."""
        try:
            microbatching = analyze(graph, 1)
        except MicrobatchError:
            return ForwardCuts(*np.zeros((3, 0)))
        operators = forward_operators(graph, microbatching)
        flops = np.array([total_flops(graph, op) for op in operators])
        if not flops.sum():
            return ForwardCuts(*np.zeros((3, 0)))
        before = np.concatenate([[0.0], np.cumsum(flops) / flops.sum()])
        between = _cut_bytes(graph, microbatching, operators)
        places = [(share, share, nbytes) for share, nbytes in zip(before[1:-1], between[:-1], strict=True)]
        for n, op in enumerate(operators):
            if op.primitive == "scan" and Scan.of(op).length > 1:
                read = {o for later in operators[n + 1 :] for o in later.reads}
                passing = between[n] - sum(v.type.nbytes for v in op.results if v.name in read)
                places.append((before[n], before[n + 1], passing + _carried_bytes(graph, op, operators[:n], read)))
        return ForwardCuts(*np.array(places).reshape(-1, 3).T)

    def boundary_bytes(self, stages: int) -> tuple[float, ...]:
        """Bytes that cross each boundary of so many stages at least, which may be half a stage from even ones."""
        if not self.nbytes.size:
            return (0.0,) * (stages - 1)
        least = []
        for k in range(1, stages):
            distance = np.maximum(np.maximum(self.first - k / stages, k / stages - self.last), 0.0)
            near = distance <= max(0.5 / stages, float(distance.min()))
            least.append(float(self.nbytes[near].min()))
        return tuple(least)


def _carried_bytes(graph: Graph, loop: Operator, before: Sequence[Operator], later: Set[str]) -> int:
    """Bytes that the trips of a scan send on for themselves: carries, and values that each trip reads.

    Args:
        graph: of the loop.
        loop: the scan.
        before: operators before it, some of which make these values.
        later: values that operators after it read, which cross the loop in any case.
    """
    consts, carries, _ = Scan.of(loop).split(loop.operands)
    varying = {v.name for op in before for v in op.results}
    sent = dict.fromkeys(o for o in consts if not isinstance(o, Literal) and o in varying - later)
    return sum(graph.type_of(o).nbytes for o in (*carries, *sent))


def _heavy_flops(operators: Sequence[Operator], flops: np.ndarray, stages: int) -> np.ndarray:
    """FLOPs of the heavy operators, and 0 of others; lighter ones are heavy where there would be fewer than stages."""
    computes = flops > HEAVY * flops.max(initial=0.0)
    alone = computes & np.array([not is_fusible(op) for op in operators], np.bool_)
    heavy = next((some for some in (alone, computes) if some.sum() >= stages), flops > 0)
    return np.where(heavy, flops, 0.0)


def _share(flops: np.ndarray, count: int) -> float:
    """FLOPs of a layer on average, without operators that have more by themselves."""
    rest, layers = float(flops.sum()), count
    for most in sorted(flops.tolist(), reverse=True):
        if layers == 1 or most <= rest / layers:
            break
        rest, layers = rest - most, layers - 1
    return rest / layers


def _best_ends(flops: np.ndarray, cuts: np.ndarray, count: int, imbalance: float) -> list[int]:
    """Ends (exclusive) of the runs: least bytes cut with balanced FLOPs; the imbalance grows until there is a cut.

    Args:
        flops: of heavy operators; at least so many as runs are not 0.
        cuts: by operator the bytes that a cut after it lets through.
        count: of runs.
        imbalance: share by which a run may exceed the mean FLOPs.
    """
    n = len(flops)
    if count <= 1:
        return [n]
    prefix, share = np.concatenate([[0.0], np.cumsum(flops)]), _share(flops, count)
    while True:
        limit = (1 + imbalance) * share
        best = np.full((count + 1, n + 1), np.inf)
        back = np.zeros((count + 1, n + 1), np.int64)
        best[0, 0] = 0.0
        for runs in _runs_within(prefix, np.flatnonzero(flops), limit):
            cut = np.where(runs.firsts > 0, cuts[runs.firsts - 1], 0)
            # Of equal costs the one with the most even runs, and of these the last.
            even = np.abs(prefix[runs.ends_of] - prefix[runs.firsts] - share) / max(prefix[-1], 1.0)
            for k in range(1, count + 1):
                cost = best[k - 1, runs.firsts] + cut
                at = runs.argmin(cost * (1 + 1e-3 * even) + 1e-6 * even)
                best[k, runs.ends], back[k, runs.ends] = cost[at], runs.firsts[at]
        if np.isfinite(best[count, n]):
            ends = [n]
            for k in range(count, 1, -1):
                ends.append(int(back[k, ends[-1]]))
            return ends[::-1]
        imbalance = imbalance * 2 + 0.1


@dataclass(frozen=True)
class _Runs:
    """Runs of operators by their ends.

    Args:
        ends: exclusive, rising.
        begins: by end the number of its first run.
        firsts: of each run its first operator, rising for each end.
        ends_of: of each run its end.
    """

    ends: np.ndarray
    begins: np.ndarray
    firsts: np.ndarray
    ends_of: np.ndarray

    def argmin(self, values: np.ndarray) -> np.ndarray:
        """Number of the last run of the least value, by end."""
        least = np.repeat(np.minimum.reduceat(values, self.begins), np.diff([*self.begins, len(values)]))
        numbers: np.ndarray = np.where(values == least, np.arange(len(values)), -1)
        return np.maximum.reduceat(numbers, self.begins)


def _runs_within(prefix: np.ndarray, heavy: np.ndarray, limit: float) -> Iterator[_Runs]:
    """All runs that have a heavy operator, of at most ``limit`` FLOPs or with that one alone, some ends at a time.

    Args:
        prefix: FLOPs of the first so many operators.
        heavy: numbers of the heavy operators, rising.
        limit: FLOPs of a run.
    """
    ends = np.arange(1, len(prefix))
    before = np.searchsorted(heavy, ends)  # heavy operators before each end
    ends, before = ends[before > 0], before[before > 0]
    alone = np.concatenate([[0], heavy + 1])[before - 1]
    within = np.searchsorted(prefix, prefix[ends] - limit - 1e-9 * limit)
    firsts, lasts = np.minimum(within, alone), heavy[before - 1] + 1
    done = np.cumsum(lasts - firsts)
    for part in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(done // MOST_RUNS)) + 1):
        if not len(part):
            continue
        lengths = lasts[part] - firsts[part]
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        ends_of = np.repeat(ends[part], lengths)
        yield _Runs(ends[part], begins, np.arange(len(ends_of)) - np.repeat(begins - firsts[part], lengths), ends_of)


def members_of(forward: Sequence[str], cuts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Ids of the forward operators, by stage: runs of ``forward`` that end with each of ``cuts``.

    Raises:
        PlanMismatchError: a cut is not among them.
    """
    at = {id: n for n, id in enumerate(forward)}
    missing = [c for c in cuts if c not in at]
    if missing:
        raise PlanMismatchError(
            f"the plan cuts the step after {missing[0]}, which the step does not have",
            cause="the function, its shapes, or the version of a library changed since",
            remedy="plan again, and save the new plan",
        )
    ends = [at[c] + 1 for c in cuts]
    starts = [0, *ends]
    return tuple(tuple(forward[a:b]) for a, b in zip(starts, [*ends, len(forward)], strict=True))


#: Blocks are taken for layers only where there are so many of them, and they are most of the work.
FEWEST_BLOCKS, LEAST_SHARE = 3, 0.5
_GAPS = 64  # a block has at most so many operators that look like its heaviest


@dataclass(frozen=True)
class Repeats:
    """A stretch of a sequence that repeats: ``[start + i * period, start + (i + 1) * period)`` for ``count`` of i.

    The elements are equal one by one for every shift by a period, so a block may begin at any of them.

    Args:
        start: first element.
        period: elements of a block.
        count: whole blocks.
        extra: elements after the last whole block that go on like it.
    """

    start: int
    period: int
    count: int
    extra: int

    def phased(self, cost: np.ndarray) -> Repeats:
        """The same blocks begun later, where ``cost[i]``, of a cut after element i, is least; the first of equals.

        A block is given up for it only where the extra elements do not make one.
        """

        def of(shift: int) -> tuple[float, int]:
            ends = self.start + shift - 1 + self.period * np.arange(1, self.count)
            return float(cost[ends].max()), shift

        shift = min((of(k) for k in range(self.period)), default=(0.0, 0))[1]
        count = self.count - (shift > self.extra)
        return Repeats(self.start + shift, self.period, count, (self.extra - shift) % self.period)


def find_repeats(sequence: Sequence[Hashable], weights: np.ndarray) -> Repeats | None:
    """The blocks that make up most of ``sequence``; None where there are none.

    Args:
        sequence: what is compared.
        weights: of each element; blocks hold at least `LEAST_SHARE` of the sum. The shortest period that does is taken.
    """
    total = float(weights.sum())
    if len(sequence) < FEWEST_BLOCKS or total <= 0:
        return None
    ids: dict[Hashable, int] = {}
    coded = np.array([ids.setdefault(x, len(ids)) for x in sequence])
    sums, numbers = np.bincount(coded, weights=weights), np.bincount(coded)
    at = np.flatnonzero(coded == int(np.argmax(np.where(numbers >= FEWEST_BLOCKS, sums, 0.0))))
    gaps = [at[k:] - at[:-k] for k in range(1, min(_GAPS, len(at) - 1) + 1)]
    periods = sorted({int(np.bincount(g).argmax()) for g in gaps if g.size})
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    for period in periods:
        start, length = _longest(coded[:-period] == coded[period:])
        count = (length + period) // period
        if count < FEWEST_BLOCKS or length == 0:
            continue
        if sums[start + count * period] - sums[start] >= LEAST_SHARE * total:
            return Repeats(start, period, count, (length + period) % period)
    return None


def _longest(equal: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of true entries; the first of equals."""
    edges = np.diff(np.concatenate([[0], equal.astype(np.int8), [0]]))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not starts.size:
        return 0, 0
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best] - starts[best])
