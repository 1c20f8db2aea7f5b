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
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
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


def least_of_all_s(
    graph: Graph,
    cost: CostModel,
    works: Sequence[SureWork],
    every: Set[str],
    workers: Iterable[Workers],
    microbatches: Sequence[tuple[int, int]],
    *,
    is_synchronous: bool = False,
) -> float:
    """The least of all numbers of workers and microbatches; infinity where there are none.

    Args:
        graph: the step.
        cost: what things cost on all devices.
        works: that are sure where operators may be on several stages.
        every: ids of operators that run in every microbatch.
        workers: numbers of workers.
        microbatches: fewest and most of some numbers.
        is_synchronous: whether works of a microbatch wait for each other.
    """
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
    for worked_s, parts in sorted((work_s(some, fewest), some.most_devices * most) for some, fewest, most in pairs):
        if worked_s >= least_s:
            break
        # A chain has no operator twice, but where loops carry something from trip to trip.
        may_be_longer = is_synchronous and each_s(parts) + once_s(parts) > worked_s
        least_s = min(least_s, max(worked_s, chain_s(parts) if may_be_longer else 0.0))
    return least_s
