"""The time of a step whose collectives run in parallel with computation: list scheduling of operators and collectives.

Resources are the cores, which run one operator at a time, and each class of links (inside a node, between nodes), which
carry one collective at a time. Each takes what is ready first in the order of the program: an operator is ready when
its operands and their collectives are there, a collective when its value is. What runs inside of a loop is scheduled
by itself: an iteration begins when the one before it has ended. Collectives that the compiler joins (`combined`) start
when the values of all are there, and take what one collective of all their bytes takes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Operator
from autopar.search.intra.collectives import (
    Ends,
    MatmulBlock,
    PricedCollective,
    Thresholds,
    combined,
    seconds_as_one,
)
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
    """Done, running and ready items, as time goes on."""

    def __init__(
        self, tasks: Sequence[TimedTask], transfers: Sequence[Transfer], groups: Sequence[Sequence[int]]
    ) -> None:
        self.tasks = (*tasks, TimedTask("", 0.0, tuple(t.id for t in tasks)))
        self.index = {t.id: n for n, t in enumerate(self.tasks)}
        self.transfers = transfers
        self.group_of = {m: tuple(group) for group in groups for m in group}
        self.missing = {tuple(group): len(group) for group in groups}
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
        """Puts a transfer before its link; of a group the first stands for all, once the values of all are there."""
        first, place = transfer, self.index[consumer]
        if group := self.group_of.get(transfer):
            self.missing[group] -= 1
            if self.missing[group]:
                return
            first, place = group[0], min(self.index[self.transfers[m].consumer] for m in group)
        heapq.heappush(self.queues[self.transfers[first].link], (place, first))

    def needed_less(self, task: int) -> None:
        """One thing less is missing for a task."""
        self.open[task] -= 1
        if not self.open[task]:
            heapq.heappush(self.ready, task)

    def transferred(self, transfer: int) -> None:
        """A transfer is done, with its group: the next of its chain may start, its readers need one thing less."""
        self.busy.discard(self.transfers[transfer].link)
        for member in self.group_of.get(transfer, (transfer,)):
            self.arrived(member)

    def arrived(self, transfer: int) -> None:
        """Marks the value of a transfer as present."""
        done = self.transfers[transfer]
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
                end = now
                for member in self.group_of.get(transfer, (transfer,)):
                    self.carried[member] = end
                    end += self.transfers[member].seconds
                heapq.heappush(self.running, (end, 1, transfer))


def list_schedule(
    tasks: Sequence[TimedTask], transfers: Sequence[Transfer], groups: Sequence[Sequence[int]] = ()
) -> Timing:
    """List scheduling: tasks run in program order, transfers next to them once their values and links are free.

    Args:
        tasks: in program order.
        transfers: collectives; of several that convert one value for one reader each takes the result of the one
            before.
        groups: indices of transfers that are sent as one message: on one link, none of them on the result of another.
    """
    state, is_in_flight, now, idle_since, computing = _Schedule(tasks, transfers, groups), {}, 0.0, 0.0, False
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
        transfers: collectives; what is joined takes its part of the seconds of the whole.
        sent: their numbers among all of the choice.
        timing: when they run, seconds of a whole step.
        groups: places in ``transfers`` of those that are sent as one.
    """

    transfers: tuple[Transfer, ...]
    sent: tuple[int, ...]
    timing: Timing
    groups: tuple[tuple[int, ...], ...] = ()

    def expected_by(self, consumer: str) -> tuple[int, ...]:
        """Numbers, among all, of the collectives that an operator needs: its own, and what is sent with them."""
        direct = {m for m, t in enumerate(self.transfers) if t.consumer == consumer}
        together = {m for group in self.groups if direct & set(group) for m in group}
        return tuple(self.sent[m] for m in sorted(direct | together))


@dataclass(frozen=True)
class _Region:
    """Tasks and collectives of a region, whatever is sent as one.

    Args:
        tasks: in running order, inner loops without their seconds.
        transfers: collectives, each alone.
        numbers: of these among all of the choice.
        ends: by number the places of the tasks that make and take what is sent.
        needs: for each task the places of earlier ones whose results it reads.
        scheduled: schedules, by the groups that are sent as one and the seconds of inner loops.
    """

    tasks: tuple[TimedTask, ...]
    transfers: tuple[Transfer, ...]
    numbers: tuple[int, ...]
    ends: Mapping[int, Ends]
    needs: tuple[tuple[int, ...], ...]
    scheduled: dict[tuple[object, ...], RegionSchedule] = field(default_factory=dict)


class StepSchedules:
    """Schedules of one choice; what does not depend on thresholds is made once.

    Args:
        cost: says what collectives take that are sent as one.
        sharding_problem: from `build`.
        choice: strategy of each node.
        sent: all collectives of the choice, value by value.
    """

    def __init__(
        self,
        cost: CostModel,
        sharding_problem: ShardingProblem,
        choice: Sequence[int],
        sent: Sequence[PricedCollective],
    ) -> None:
        self.cost, self.mesh, self.sent = cost, sharding_problem.mesh, tuple(sent)
        regions, producers = {r.id for r in sharding_problem.region_sites}, producers_of(sharding_problem)
        in_blocks = {c.block.product: c.block for c in sent if c.block is not None}
        inside: dict[str, list[tuple[int, TimedTask]]] = defaultdict(list)
        for s in sharding_problem.sites:
            task = TimedTask(s.id, float(s.seconds[choice[s.node]]), _needs(s.id, s.op, producers))
            tasks_of = [task] if s.id not in in_blocks else _blocks(task, in_blocks[s.id])
            inside[region_of(s.id, regions)] += [(s.time, t) for t in tasks_of]
        for r in sharding_problem.region_sites:
            inside[region_of(r.id, regions)].append((r.time, TimedTask(r.id, 0.0, _needs(r.id, r.op, producers))))
        of_region: dict[str, list[int]] = defaultdict(list)
        for n, c in enumerate(self.sent):
            of_region[region_of(c.value, regions)].append(n)
        # Inner loops first: each is one task of the region that it is in.
        self.regions = {
            region: self._region(
                [task for _, task in sorted(inside[region], key=_in_turn)], of_region[region], producers
            )
            for region in sorted({*regions, ""}, key=lambda r: (-r.count("/"), -len(r), r))
        }

    def _region(self, tasks: Sequence[TimedTask], numbers: Sequence[int], producers: Mapping[str, str]) -> _Region:
        place = {t.id: n for n, t in enumerate(tasks)}
        transfers = tuple(
            Transfer(*_ends(c, producers, place), link_class(self.mesh, c.axis), c.seconds)
            for c in (self.sent[n] for n in numbers)
        )
        ends = {
            n: Ends(place.get(t.producer, -1), place.get(t.consumer, len(tasks)))
            for n, t in zip(numbers, transfers, strict=True)
        }
        needs = tuple(tuple(p for need in t.needs if (p := place.get(need, n)) < n) for n, t in enumerate(tasks))
        return _Region(tuple(tasks), transfers, tuple(numbers), ends, needs)

    def of(self, thresholds: Thresholds | None = None) -> dict[str, RegionSchedule]:
        """The schedule of each region, innermost first; "" is the step.

        Args:
            thresholds: up to how many bytes collectives are sent as one; None as the stack has it.
        """
        thresholds = thresholds or Thresholds.of(self.cost.stack)
        by_region: dict[str, RegionSchedule] = {}
        for name, region in self.regions.items():
            index = {n: m for m, n in enumerate(region.numbers)}
            joined = combined(thresholds, self.sent, region.ends, region.needs)
            groups = tuple(tuple(index[n] for n in group) for group in joined)
            loops_s = tuple(by_region[t.id].timing.seconds for t in region.tasks if t.id in by_region)
            schedule = region.scheduled.get((groups, loops_s))
            if schedule is None:
                schedule = region.scheduled[groups, loops_s] = self._scheduled(region, groups, by_region)
            by_region[name] = schedule
        return by_region

    def _scheduled(
        self, region: _Region, groups: tuple[tuple[int, ...], ...], inner: Mapping[str, RegionSchedule]
    ) -> RegionSchedule:
        tasks = [replace(t, seconds=inner[t.id].timing.seconds) if t.id in inner else t for t in region.tasks]
        sent = [self.sent[n] for n in region.numbers]
        transfers = _joined(self.cost, self.mesh, region.transfers, sent, groups)
        return RegionSchedule(transfers, region.numbers, list_schedule(tasks, transfers, groups), groups)

    def timed(self, thresholds: Thresholds | None = None) -> tuple[tuple[PricedCollective, ...], tuple[float, ...]]:
        """The collectives as they are sent, and of each the seconds that no operator hides.

        These seconds add up to the time in which devices wait.

        Args:
            thresholds: bytes up to which they are sent as one; None for those of the stack.
        """
        as_sent, shares = list(self.sent), [0.0] * len(self.sent)
        for of in self.of(thresholds).values():
            for n, transfer in zip(of.sent, of.transfers, strict=True):
                as_sent[n] = replace(as_sent[n], seconds=transfer.seconds)
            for consumer, wait_s in of.timing.stall_s.items():
                needed = of.expected_by(consumer)
                total = sum(as_sent[n].seconds for n in needed)
                for n in needed:
                    shares[n] += wait_s * (as_sent[n].seconds / total if total else 1 / len(needed))
        return tuple(as_sent), tuple(shares)


def _in_turn(entry: tuple[int, TimedTask]) -> tuple[int, str, float]:
    """The order of tasks: by time, blocks of a product by number, the last of which has its name."""
    name, _, block = entry[1].id.partition("#")
    return entry[0], name, float(block or "inf")


def _blocks(product: TimedTask, block: MatmulBlock) -> list[TimedTask]:
    """The tasks of a product in blocks, one after the other."""
    ids = [_block_id(product.id, n, block.blocks) for n in range(block.blocks)]
    return [TimedTask(id, block.seconds, (*product.needs, *ids[:n][-1:])) for n, id in enumerate(ids)]


def _block_id(product: str, number: int, blocks: int) -> str:
    return product if number == blocks - 1 else f"{product}#{number}"


def _ends(c: PricedCollective, producers: Mapping[str, str], known: Collection[str]) -> tuple[str, str]:
    """The tasks from and to which a collective goes; a message of a product in blocks to or from one of them."""
    producer, consumer = producers.get(c.value, ""), c.use.consumer if c.use.consumer in known else ""
    b = c.block
    if b is None:
        return producer, consumer
    if b.scatters:
        return _block_id(b.product, b.number - 1, b.blocks), consumer
    return producer, _block_id(b.product, b.number, b.blocks)


def _joined(
    cost: CostModel,
    mesh: LogicalMesh,
    transfers: tuple[Transfer, ...],
    sent: Sequence[PricedCollective],
    groups: Sequence[Sequence[int]],
) -> tuple[Transfer, ...]:
    """The transfers, of ``sent``, with the seconds of what is sent as one shared out over those of a group."""
    joined = list(transfers)
    for group in groups:
        separate_s = sum(joined[m].seconds for m in group)
        joined_s = min(separate_s, seconds_as_one(cost, mesh, [sent[m] for m in group]))
        for m in group:
            joined[m] = replace(joined[m], seconds=joined[m].seconds * (joined_s / separate_s if separate_s else 1.0))
    return tuple(joined)


def producers_of(sharding_problem: ShardingProblem) -> dict[str, str]:
    """Operator that makes each value, by key."""
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
