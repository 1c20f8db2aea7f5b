"""Bounds of plans: what no plan of a step beats, however it is sliced, sharded, scheduled and recomputed.

`bounded` and `bound_s` are the places to start. Seconds of operators are those of `autopar.search.sure_work`.

Critical path: works of stages run one after another where one takes what another makes, and the operators of one work
do in any case. So a step is no shorter than the longest chain of operators of one microbatch that wait for each other,
were it on other devices at every step. Left out are operators that do not depend on the batch and on what is trained:
some run once, before all microbatches, and plans count their seconds with the update, which stages do next to each
other.

Pipelines: with t(o, n) the least seconds of operator o on each of n devices that share it (`CostModel.least_s`), it
runs m times, on a part of the batch each time, on the k devices of one of W workers, which are D together:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from autopar.cluster import Cluster
from autopar.cost import CostModel, LeastWork, least_latency_s
from autopar.errors import MicrobatchError
from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents, unread_effects
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.microbatch import analyze, batch_size, even_counts
from autopar.plan import Plan
from autopar.search.pipeline.partition import submeshes
from autopar.search.problem import Problem
from autopar.search.sure_work import SureWork, sure_works
from autopar.search.techniques import block_scores


@dataclass(frozen=True)
class Freedom:
    """Over which plans a bound holds.

    Args:
        one_stage: whether plans of one stage are among them.
        most_stages: stages that others have at most, workers of them at most as many; 0 where there are none.
        block_scores: scores of one head from which attention may run in blocks; 0 where it does not.
        updates_on_hosts: whether hosts may compute the update.
        is_synchronous: whether, of several stages, those that take what others make wait for it in every step: for
            all of a microbatch at once, with nothing that steps before have left.
        microbatches: their number; None for any.
        sends: whether a stage is on one worker, or on two that share the microbatches, as by all schedules that may be
            tried where none is named; by tables of users it may be on any number.
    """

    one_stage: bool = True
    most_stages: int = 0
    block_scores: int = 0
    updates_on_hosts: bool = False
    is_synchronous: bool = True
    microbatches: int | None = None
    sends: bool = False

    @staticmethod
    def of(problem: Problem) -> Freedom:
        """The freedom that a problem leaves: `autopar.search.decision`."""
        job, devices, asked = problem.job, problem.cluster.num_devices, problem.job.num_stages
        on_one_mesh = job.mesh_shape is not None and math.prod(job.mesh_shape) == devices
        on_one_mesh = on_one_mesh and job.schedule in ("auto", "none") and not unread_effects(problem.graph)
        several = 0 if devices == 1 or on_one_mesh else devices
        count, size = job.num_microbatches, batch_size(problem.graph)
        return Freedom(
            one_stage=asked is None or asked == 1,
            most_stages=several if asked is None else asked if asked > 1 else 0,
            block_scores=block_scores(problem),
            updates_on_hosts=job.offload in ("auto", "update"),
            is_synchronous=not problem.names_pipeline,
            # The last batch of a data set may be smaller, and take another number.
            microbatches=count if count is not None and size and size % count == 0 else None,
            sends=job.schedule in ("auto", "none"),
        )


def bounded(plan: Plan, problem: Problem, freedom: Freedom) -> Plan:
    """A plan, of one stage or of several, where more than its sharding was free, with a bound over all of it.

    What the integer program proves of one stage is over shardings in one number of microbatches, with what one level
    of recomputation holds: it becomes ``sharding_bound``.

    Args:
        plan: its search has the bound of the integer program; None of several stages.
        problem: the step, in one microbatch, and all devices.
        freedom: over which plans the bound holds.
    """
    search = plan.content.search
    whole_s = min(bound_s(problem, freedom), plan.step_time)
    search = msgspec.structs.replace(search, lower_bound=whole_s, sharding_bound=search.lower_bound)
    return replace(plan, content=msgspec.structs.replace(plan.content, search=search))


def bound_s(problem: Problem, freedom: Freedom) -> float:
    """`work_bound_s` of a problem, computed once in a search.

    Args:
        problem: the step, in one microbatch, and all devices.
        freedom: over which plans it holds.
    """
    graph, cost = problem.graph, problem.cost_model
    key = problem.store.key("bound", graph, cost, freedom)
    return problem.store.once(key, lambda: work_bound_s(graph, cost, freedom))


def least_of(problem: Problem, *, several: bool) -> float:
    """Seconds that no plan of one stage is below, or of several."""
    freedom = Freedom.of(problem)
    return bound_s(problem, replace(freedom, one_stage=not several, most_stages=freedom.most_stages if several else 0))


def work_bound_s(graph: Graph, cost: CostModel, freedom: Freedom | None = None) -> float:
    """Seconds that no plan of a step is below, however it is sliced, sharded, scheduled and recomputed.

    One stage is one worker that has all D devices; stages are on W workers that have k each. Of all numbers of workers
    and of microbatches that are free the least holds (`autopar.search.bound` has the formulas). In one stage
    each device does a part of every operator, of a D-th at least, one after the other. What counts as an operator's
    work is sure in any plan (`sure_work`). Of one of m microbatches the operators of a chain run one after another, on
    whatever devices (`critical_path`): the bubble of few microbatches; with what they send from worker to worker.
    Where devices differ the best of any is taken for all. Other communication, recomputation and other waiting only add
    to it. Prices of other classes than `CostModel` may be anything: of them nothing is known.

    Args:
        graph: the whole step; loops count each trip, a ``while`` one.
        cost: what things cost on all devices.
        freedom: over which plans it holds.
    """
    if type(cost) is not CostModel:
        return 0.0
    devices = cost.cluster.num_devices
    freedom = freedom or Freedom(most_stages=devices)
    counts = list(microbatches_of(freedom.microbatches, batch_size(graph) or 1))
    works = [
        work
        for work in sure_works(graph, cost, freedom.block_scores, in_stages=freedom.most_stages > 0)
        if not (freedom.updates_on_hosts and work.phase == "update")
    ]
    bounds = [math.inf]
    if freedom.one_stage:
        fewest = counts[0][0]
        every = in_every_microbatch(graph, fewest) if fewest > 1 else frozenset[str]()
        bounds.append(
            least_of_all_s(BoundedStep(graph, cost, works, every), [Workers(1, devices, devices)], counts[:1])
        )
    if freedom.most_stages:
        every = in_every_microbatch(graph, counts[-1][1])
        some = workers_of(cost.cluster, min(devices, freedom.most_stages))
        latency_s = least_latency_s(cost.cluster) if freedom.sends else 0.0
        is_synchronous = freedom.is_synchronous
        step = BoundedStep(graph, cost, works, every)
        bounds.append(least_of_all_s(step, some, counts, is_synchronous=is_synchronous, latency_s=latency_s))
    least_s = min(bounds)
    return least_s if math.isfinite(least_s) else 0.0


#: Roles of inputs on both of which an operator of the chain depends.
_ROLES = ("batch", "parameter")


@dataclass(frozen=True)
class CriticalPath:
    """Chains of operators.

    Args:
        seconds: by id, after those of the loops that it is in, the least seconds of one run of an operator.
    """

    seconds: Mapping[str, float]

    def of_step(self, graph: Graph, in_loop: Set[str]) -> float:
        """Seconds of the longest chain of a step.

        Args:
            graph: a train step with roles.
            in_loop: ids of its operators that run in every microbatch.
        """
        of_role = ([i.name for i in graph.inputs if i.role == role] for role in _ROLES)
        of_batch, of_model = ({op.id for op in dependents(graph.operators, names)} for names in of_role)
        return max(self._lengths(graph, "", "update", of_batch & of_model & in_loop, {}).values(), default=0.0)

    def _lengths(
        self, graph: Graph, prefix: str, enclosing: str, on_chain: Set[str], begins: Mapping[str, float]
    ) -> dict[str, float]:
        """Seconds of the longest chain that ends in each value.

        Args:
            graph: a step or a body.
            prefix: ids of the loops around it.
            enclosing: phase of the operator whose body it is.
            on_chain: ids of operators that count.
            begins: values that chains begin in; where there are none they may begin anywhere.
        """
        lengths = dict(begins)
        for op in graph.operators:
            before = [lengths[o] for o in op.reads if o in lengths]
            if begins and not before:
                continue
            phase, own_s = phase_of(op, enclosing), 0.0
            if op.id in on_chain and phase != "update":
                loops = op.primitive == "scan" and op.regions
                own_s = self._of_scan(op, prefix, phase) if loops else self.seconds.get(prefix + op.id, 0.0)
            length = max(before, default=0.0) + own_s
            lengths.update((v.name, length) for v in op.results)
        return lengths

    def _of_scan(self, op: Operator, prefix: str, phase: str) -> float:
        """Seconds of the chain through all trips of a loop: of a value that is carried on, to itself."""
        scan = Scan.of(op)
        every, longest = {inner.id for inner in scan.body.operators}, 0.0
        for n in range(scan.num_carry):
            name, out = scan.body.inputs[scan.num_consts + n].name, scan.body.outputs[n].operand
            lengths = self._lengths(scan.body, f"{prefix}{op.id}/", phase, every, {name: 0.0})
            longest = max(longest, lengths.get(str(out), 0.0))
        return scan.length * longest


def in_every_microbatch(graph: Graph, most: int) -> frozenset[str]:
    """Ids of the operators of the forward and the backward pass that run in every microbatch, however many there are.

    Where a step cannot be cut those of the forward pass, which one microbatch has.

    Args:
        graph: a train step with roles.
        most: microbatches.
    """
    ids = frozenset(op.id for op in graph.operators if phase_of(op) != "update")
    if most == 1:
        return ids
    counts = [n for n in even_counts(graph) if 1 < n <= most]
    for count in {*counts[:1], *counts[-1:], most} - {1}:
        try:
            ids &= frozenset(analyze(graph, count).body)
        except MicrobatchError:
            ids &= frozenset(op.id for op in graph.operators if phase_of(op) == "forward")
    return ids


#: Workers up to which each number is looked at for itself; above they are taken together up to the next power of two.
_EACH = 16


@dataclass(frozen=True)
class Workers:
    """Numbers of workers, and of the devices that each may have.

    Args:
        most: workers.
        least_devices, most_devices: of any of them.
    """

    most: int
    least_devices: int
    most_devices: int


def workers_of(cluster: Cluster, most: int) -> Iterator[Workers]:
    """All ways to deal the devices out to between one worker and ``most``.

    A stage has one of the submeshes of `autopar.search.pipeline.partition`, or an even share of the devices. Large
    numbers of workers are taken together: what is said of them holds for each.

    Args:
        cluster: all devices.
        most: workers, no more than there are devices.
    """
    devices = cluster.num_devices
    sizes = sorted({m.size for m in submeshes(cluster)})
    sums = [1]  # by number of workers, the numbers of devices that they can have together, as bits
    for _ in range(min(most, _EACH)):
        together = 0
        for size in sizes:
            together |= sums[-1] << size
        sums.append(together & ((1 << (devices + 1)) - 1))
    number = 1
    while number <= most:
        if number <= _EACH:
            usable = {s for s in sizes if s <= devices and sums[number - 1] >> (devices - s) & 1}
            if devices % number == 0:
                usable.add(devices // number)
            if usable:
                yield Workers(number, min(usable), max(usable))
            number += 1
            continue
        last = min(most, 2 * number - 1)
        share = {devices // n for n in range(number, last + 1) if devices % n == 0}
        some = {s for s in sizes if s <= devices - number + 1} | share
        yield Workers(last, 1 if number < devices else min(some), max(some) if number < devices else 1)
        number = last + 1


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
