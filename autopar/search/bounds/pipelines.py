"""Seconds that no pipeline is below, over numbers of workers and of microbatches taken together.

With t(o, n) the least seconds of operator o on each of n devices that share it (`CostModel.least_s`), it runs m times,
on a part of the batch each time, on the k devices of one of W workers, which are D together:

    T >= sum over o of k m t(o, k m) / D,    k at least that of the smallest worker
    T >= sum over o of m t(o, k m) / W,      k at most that of the largest
    T >= sum over any chain of o that wait for each other of t(o, k m)

for n t(o, n) does not fall with n, and t(o, n) does not rise. The first two are means over workers of what each does,
by devices and by workers; in the last k is that of the largest. Operators of the update, and those that do not run in
every microbatch, run once; equal ones that may run on a stack of matrices are one. W and m may be free: the least over
all of them holds.

Communication that no pipeline avoids is that of a chain, of c seconds in a microbatch. Stages have one worker, or two
that share the microbatches (Chimera); one that has half of them is looked at. A worker that has p seconds of its chain
runs them m / 2 times, p <= 2 T / m, so that the chain is on m c / 2 T workers or more. Between two of them something is
sent that the next one waits for, in a latency l at least:

    T >= c + l (m c / 2 T - 1),    T >= ((c - l) + sqrt((c - l)^2 + 2 l m c)) / 2

It says more than the chain where many workers share short work.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache

from autopar.cost import CostModel, LeastWork
from autopar.ir import Graph
from autopar.search.bounds.workers import Workers
from autopar.search.critical_path import CriticalPath
from autopar.search.sure_work import SureWork


def microbatches_of(asked: int | None, size: int) -> Iterator[tuple[int, int]]:
    """(fewest, most) microbatches that are looked at together.

    Args:
        asked: their number where it is given.
        size: of the batch.
    """
    if asked is not None:
        yield asked, asked
        return
    fewest = 1
    while fewest <= size:
        yield fewest, min(size, 2 * fewest - 1)
        fewest *= 2


@dataclass(frozen=True)
class BoundedStep:
    """A step whose pipelines are bounded.

    Args:
        graph: the step.
        cost: what things cost on all devices.
        works: that are sure where operators may be on several stages.
        every: ids of operators that run in every microbatch.
    """

    graph: Graph
    cost: CostModel
    works: Sequence[SureWork]
    every: Set[str]


def least_of_all_s(
    step: BoundedStep,
    workers: Iterable[Workers],
    microbatches: Sequence[tuple[int, int]],
    *,
    is_synchronous: bool = False,
    latency_s: float = 0.0,
) -> float:
    """The least of all numbers of workers and microbatches; infinity where there are none.

    Args:
        step: what is bounded.
        workers: numbers of workers.
        microbatches: fewest and most of some numbers.
        is_synchronous: whether works of a microbatch wait for each other.
        latency_s: seconds that sending from one worker to another takes at least; 0 where a stage may be on any number.
    """
    graph, cost, works, every = step.graph, step.cost, step.works, step.every
    repeated: dict[LeastWork, float] = defaultdict(float)
    once: dict[LeastWork, float] = defaultdict(float)
    stacks = Counter((work.least, work.runs) for work in works if work.stacks)
    for (least, runs), count in stacks.items():
        once[least.times(count)] += runs
    for work in works:
        if work.stacks:
            continue
        repeats = work.phase != "update" and work.outermost in every
        (repeated if repeats else once)[work.least] += work.runs

    @cache
    def each_s(parts: int) -> float:
        return math.fsum(n * cost.least_s(least, parts) for least, n in repeated.items())

    @cache
    def once_s(devices: int) -> float:
        return math.fsum(n * cost.least_s(least, devices) for least, n in once.items())

    @cache
    def chain_s(parts: int) -> float:
        seconds = {work.id: cost.least_s(work.least, parts) for work in works}
        return CriticalPath(seconds).of_step(graph, every)

    def work_s(some: Workers, count: int) -> float:
        few, many = (count * each_s(k * count) + once_s(k) for k in (some.least_devices, some.most_devices))
        return max(some.least_devices * few / cost.cluster.num_devices, many / some.most)

    least_s, pairs = math.inf, [(some, *counts) for some in workers for counts in microbatches]
    worked = sorted((work_s(some, fewest), some.most_devices * most, fewest) for some, fewest, most in pairs)
    for worked_s, parts, fewest in worked:
        if worked_s >= least_s:
            break
        # A chain has no operator twice, but where loops carry something from trip to trip.
        may_be_longer = is_synchronous and with_sends_s(each_s(parts) + once_s(parts), fewest, latency_s) > worked_s
        least_s = min(least_s, max(worked_s, with_sends_s(chain_s(parts), fewest, latency_s) if may_be_longer else 0.0))
    return least_s


def with_sends_s(chain_s: float, count: int, latency_s: float) -> float:
    """Seconds of a chain with what is sent between the workers that it is on at least.

    Args:
        chain_s: of one microbatch.
        count: microbatches.
        latency_s: of sending.
    """
    rest_s = chain_s - latency_s
    return max(chain_s, (rest_s + math.sqrt(rest_s**2 + 2 * latency_s * count * chain_s)) / 2)
