"""The time of a step whose collectives run in parallel with computation: list scheduling of operators and collectives.

Resources are the cores, which run one operator at a time, and each class of links (inside a node, between nodes), which
carry one collective at a time. Each takes what is ready first in the order of the program: an operator is ready when
its operands and their collectives are there, a collective when its value is. What runs inside of a loop is scheduled
by itself: an iteration begins when the one before it has ended.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import LogicalMesh
from autopar.ir import Operator
from autopar.search.intra.collectives import PricedCollective
from autopar.search.intra.sharding_problem import ShardingProblem


@dataclass(frozen=True, slots=True)
class TimedTask:
    """An operator that computes.

    Args:
        id: its name.
        seconds: busy seconds.
        needs: tasks whose results it takes.
    """

    id: str
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective.

    Args:
        producer: task that makes the value; "" for what is there at the start.
        consumer: task that needs it; "" for what must be there at the end.
        link: class of links that it takes.
        seconds: of the collective alone.
    """

    producer: str
    consumer: str
    link: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """A schedule of tasks and transfers.

    Args:
        seconds: from the first start to the last end.
        stall_s: by task the seconds that the cores wait before it; by "" those at the end.
        starts_s: by task when it starts; by "" the end.
        ends_s: by task when it ends; by "" the start.
        carried_s: when each transfer starts.
    """

    seconds: float
    stall_s: Mapping[str, float]
    starts_s: Mapping[str, float]
    ends_s: Mapping[str, float]
    carried_s: tuple[float, ...]


class _Schedule:
    """What is done, running and ready, as time goes on."""

    def __init__(self, tasks: Sequence[TimedTask], transfers: Sequence[Transfer]) -> None:
        self.tasks = (*tasks, TimedTask("", 0.0, tuple(t.id for t in tasks)))
        self.index = {t.id: n for n, t in enumerate(self.tasks)}
        self.transfers = transfers
        self.open = [len({n for n in t.needs if n in self.index}) for t in self.tasks]
        self.readers: dict[str, list[int]] = defaultdict(list)
        for n, t in enumerate(self.tasks):
            for need in {need for need in t.needs if need in self.index}:
                self.readers[need].append(n)
        # Of one value for one reader each is made of the one before it.
        self.chains: dict[tuple[str, str], list[int]] = defaultdict(list)
        for m, transfer in enumerate(transfers):
            self.chains[transfer.producer, transfer.consumer].append(m)
            self.open[self.index[transfer.consumer]] += 1
        self.consumers: dict[str, list[str]] = defaultdict(list)
        for producer, consumer in self.chains:
            self.consumers[producer].append(consumer)
        self.ready = [n for n, count in enumerate(self.open) if not count]
        self.queues: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.running: list[tuple[float, int, int]] = []  # (end, 0 for a task and 1 for a transfer, its number)
        self.busy: set[str] = set()
        self.starts: dict[str, float] = {}
        self.ends: dict[str, float] = {"": 0.0}
        self.carried = [0.0] * len(transfers)
        self.produced("")

    def produced(self, task: str) -> None:
        """The results of a task are there: the first of each chain of transfers may start."""
        for consumer in self.consumers.get(task, ()):
            self.queue(self.chains[task, consumer][0], consumer)

    def queue(self, transfer: int, consumer: str) -> None:
        """Puts a transfer before its link."""
        heapq.heappush(self.queues[self.transfers[transfer].link], (self.index[consumer], transfer))

    def needed_less(self, task: int) -> None:
        """One thing less is missing for a task."""
        self.open[task] -= 1
        if not self.open[task]:
            heapq.heappush(self.ready, task)

    def transferred(self, transfer: int) -> None:
        """A transfer is done: the next of its chain may start, and its reader needs one thing less."""
        done = self.transfers[transfer]
        self.busy.discard(done.link)
        chain = self.chains[done.producer, done.consumer]
        after = chain.index(transfer) + 1
        if after < len(chain):
            self.queue(chain[after], done.consumer)
        self.needed_less(self.index[done.consumer])

    def start_links(self, now: float) -> None:
        """Starts the first transfer of every idle link."""
        for link, queue in self.queues.items():
            if queue and link not in self.busy:
                _, transfer = heapq.heappop(queue)
                self.busy.add(link)
                self.carried[transfer] = now
                heapq.heappush(self.running, (now + self.transfers[transfer].seconds, 1, transfer))


def list_schedule(tasks: Sequence[TimedTask], transfers: Sequence[Transfer]) -> Timing:
    """The schedule of tasks with transfers next to them.

    Args:
        tasks: in program order.
        transfers: those of one value and consumer in the order in which they are made of each other.
    """
    state, is_in_flight, now, idle_since, computing = _Schedule(tasks, transfers), {}, 0.0, 0.0, False
    while True:
        state.start_links(now)
        if state.ready and not computing:
            n = heapq.heappop(state.ready)
            task = state.tasks[n]
            if now > idle_since:
                is_in_flight[task.id] = now - idle_since
            state.starts[task.id] = now
            if not task.id:
                return Timing(now, is_in_flight, state.starts, state.ends, tuple(state.carried))
            computing = True
            heapq.heappush(state.running, (now + task.seconds, 0, n))
            continue
        now, kind, n = heapq.heappop(state.running)
        if kind:
            state.transferred(n)
            continue
        computing, idle_since = False, now
        state.ends[state.tasks[n].id] = now
        state.produced(state.tasks[n].id)
        for reader in state.readers[state.tasks[n].id]:
            state.needed_less(reader)


@dataclass(frozen=True)
class RegionSchedule:
    """The schedule of the operators of one region, inner loops as tasks of it.

    Args:
        transfers: collectives.
        sent: their numbers among all of the choice.
        timing: when they run, seconds of a whole step.
    """

    transfers: tuple[Transfer, ...]
    sent: tuple[int, ...]
    timing: Timing


def schedules(
    sharding_problem: ShardingProblem, choice: Sequence[int], sent: Sequence[PricedCollective]
) -> dict[str, RegionSchedule]:
    """The schedule of each region, innermost first; "" is the step.

    Args:
        sharding_problem: from `build`.
        choice: strategy of each node.
        sent: all collectives of the choice, value by value.
    """
    regions, producers = {r.id for r in sharding_problem.region_sites}, producers_of(sharding_problem)
    inner: dict[str, list[tuple[int, TimedTask]]] = defaultdict(list)
    for s in sharding_problem.sites:
        task = TimedTask(s.id, float(s.seconds[choice[s.node]]), _needs(s.id, s.op, producers))
        inner[region_of(s.id, regions)].append((s.time, task))
    of_region: dict[str, list[int]] = defaultdict(list)
    for n, c in enumerate(sent):
        of_region[region_of(c.value, regions)].append(n)
    by_region: dict[str, RegionSchedule] = {}
    # Inner loops first: each is one task of the region that it is in.
    for region in sorted({*regions, ""}, key=lambda r: (-r.count("/"), -len(r), r)):
        loops = [
            (r.time, TimedTask(r.id, by_region[r.id].timing.seconds, _needs(r.id, r.op, producers)))
            for r in sharding_problem.region_sites
            if region_of(r.id, regions) == region
        ]
        tasks = [task for _, task in sorted([*inner[region], *loops], key=lambda entry: (entry[0], entry[1].id))]
        known = {t.id for t in tasks}
        transfers = tuple(
            Transfer(
                producers.get(c.value, ""),
                c.use.consumer if c.use.consumer in known else "",
                link_class(sharding_problem.mesh, c.axis),
                c.seconds,
            )
            for c in (sent[n] for n in of_region[region])
        )
        by_region[region] = RegionSchedule(transfers, tuple(of_region[region]), list_schedule(tasks, transfers))
    return by_region


def exposed_s(
    sharding_problem: ShardingProblem, choice: Sequence[int], sent: Sequence[PricedCollective]
) -> tuple[float, ...]:
    """For each collective the seconds of it that no operator hides; arguments are those of `schedules`."""
    shares = [0.0] * len(sent)
    for of in schedules(sharding_problem, choice, sent).values():
        for consumer, wait_s in of.timing.stall_s.items():
            waited = [n for n, t in zip(of.sent, of.transfers, strict=True) if t.consumer == consumer]
            total = sum(sent[n].seconds for n in waited)
            for n in waited:
                shares[n] = min(1.0, wait_s / total) * sent[n].seconds if total else 0.0
    return tuple(shares)


def producers_of(sharding_problem: ShardingProblem) -> dict[str, str]:
    """By key of a value the operator that makes it."""
    producers = {_prefix(s.id, s.op.id) + v.name: s.id for s in sharding_problem.sites for v in s.op.results}
    return producers | {
        _prefix(r.id, r.op.id) + v.name: r.id for r in sharding_problem.region_sites for v in r.op.results
    }


def link_class(mesh: LogicalMesh, axes: str) -> str:
    """The class of links of collectives over mesh axes joined by ``+``: "inter" where they leave a node."""
    span = mesh.link(tuple(axes.split("+"))).span
    return "inter" if span is not None and span.nodes > 1 else "intra"


def _needs(id: str, op: Operator, producers: Mapping[str, str]) -> tuple[str, ...]:
    """The operators that make what an operator takes."""
    prefix = _prefix(id, op.id)
    return tuple(dict.fromkeys(producers[prefix + o] for o in op.reads if prefix + o in producers))


def _prefix(id: str, name: str) -> str:
    return id.removesuffix(name)


def region_of(key: str, regions: set[str]) -> str:
    """The innermost operator with regions that a value or an operator is inside of; "" outside of all."""
    at = key.rfind("/")
    while at > 0:
        if key[:at] in regions:
            return key[:at]
        at = key.rfind("/", 0, at)
    return ""
