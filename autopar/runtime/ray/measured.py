"""Workers and the links between them, measured through what pipelines run on: the same processes, calls and transport.

Repetitions go round all transfers, one at a time, so that none has to share a network but those that are to.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from autopar.cost.calibration import Sample
from autopar.cost.links import LinkSample
from autopar.errors import AutoparError, ClusterError
from autopar.runtime.measuring import Effort
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.deployment import ProcessLayout
from autopar.runtime.ray.messages import (
    Connect,
    DeviceFacts,
    Measure,
    MeasureResult,
    TransferRequest,
    TransferResult,
    decode,
    encode,
)
from autopar.runtime.ray.session import Session
from autopar.runtime.transport.exchange import even_bytes
from autopar.runtime.transport.process_groups import ProcessGroups

_T = TypeVar("_T")
#: Workers from which fans start, workers of a fan or a chain at most, and arrays of a chain.
_FANS, _MOST_WORKERS, _CHAIN = 4, 8, 4
#: All arrays of a fan or a chain together: a worker holds them at the same time.
_MOST_BYTES = 1 << 28
_CALLS = 20


@dataclass(frozen=True)
class MeasuredKind:
    """Workers with equal devices, of which the first was measured.

    Args:
        facts: what the devices are; memory is that of the worker that has least.
        workers: numbers of the workers.
        samples: of the devices of one.
    """

    facts: DeviceFacts
    workers: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class MeasuredWorkers:
    """Measurements of workers.

    Args:
        kinds: measurements of the devices of each kind, with the workers that have them.
        links: transfers between them.
        machines: on how many machines they are.
        call_s: seconds that a call of all workers by the driver takes.
        transport: way in which arrays went: "sockets", "direct" or "world".
    """

    kinds: tuple[MeasuredKind, ...]
    links: tuple[LinkSample, ...]
    machines: int
    call_s: float
    transport: str

    def links_of(self, kind: MeasuredKind) -> tuple[LinkSample, ...]:
        """Measured transfers from or to a worker of this kind; all transfers if none of them was a round trip."""
        links_of_kind = tuple(s for s in self.links if not set(kind.workers).isdisjoint(s.workers))
        return links_of_kind if any(s.how == "bounce" for s in links_of_kind) else self.links

    @property
    def text(self) -> str:
        """Number of workers and their links, for people."""
        count = sum(len(k.workers) for k in self.kinds)
        how = {"sockets": "over sockets", "direct": "pulled from device to device", "world": "by programs of both"}
        return f"{count} workers on {self.machines} machine{'s' * (self.machines > 1)}, {how[self.transport]}"


def measure_workers(cluster: RayCluster, effort: Effort, say: Callable[[str], None]) -> MeasuredWorkers:
    """Starts the workers of a cluster, measures them, and ends them.

    Args:
        cluster: of two workers or more.
        effort: sizes and repetitions.
        say: called with a line when a phase begins.

    Raises:
        ClusterError: there are too few workers, or they do not start.
        WorkerLostError: one was lost meanwhile.
        AutoparError: arrays did not arrive as they were sent, or a worker ran out of memory.
    """
    count = len(cluster.slots)
    if count < 2:
        raise ClusterError(
            f"links need two workers, and {cluster.name} has {count}",
            cause="the cluster has one machine with devices, or workers=1 was asked for",
            remedy="ask for workers=2; without Ray the devices of this process are measured alone",
        )
    options = cluster.run
    say(f"starting {count} workers")
    numbers = tuple(k for k, n in enumerate(cluster.nodes) for _ in range(n))
    layout = ProcessLayout(ProcessGroups((1,) * count), tuple(slot.devices for slot in cluster.slots), numbers)
    session = Session(layout, cluster.start, options)
    try:
        facts = [decode(a, DeviceFacts) for a in session.call("facts", [()] * count, options.load_s)]
        call_s = _call_s(session, options.deadline_s)
        connect = encode(Connect(session.addresses, options.direct, options.world))
        session.call("connect", [(connect,)] * count, options.load_s)
        cases = cases_of(session.machines, [f.devices for f in facts], effort)
        links = _exchanged(session, cases, effort, options.deadline_s, say)
        by_kind = kinds_of(facts)
        say(f"measuring the devices of worker {', '.join(str(members[0]) for _, members in by_kind)}")
        measure = encode(Measure(effort, tuple(members[0] for _, members in by_kind)))
        answers = session.call("measure", [(measure,)] * count, options.load_s)
    finally:
        session.close()
    kinds = tuple(
        MeasuredKind(f, members, decode(answers[members[0]], MeasureResult).samples) for f, members in by_kind
    )
    transport = "world" if options.world else "direct" if options.direct else "sockets"
    return MeasuredWorkers(kinds, links, len(set(session.machines)), call_s, transport)


def cases_of(machines: Sequence[str], devices: Sequence[int], effort: Effort) -> tuple[TransferRequest, ...]:
    """Transfers to time: between workers of different machines, one of each; on one machine between all.

    Args:
        machines: the machine of each worker.
        devices: number of devices of each.
        effort: sizes, and how many pairs at most.
    """
    ends = tuple(machines.index(m) for m in dict.fromkeys(machines))
    if len(ends) == 1:
        ends = tuple(range(len(machines)))
    lanes = min(devices[w] for w in ends)
    pairs = _spaced(tuple(itertools.combinations(ends, 2)), effort.pairs)
    cases = [
        TransferRequest("bounce", pair, _sizes(effort, 1, some), some)
        for pair in pairs
        for some in dict.fromkeys((1, lanes))
    ]
    if len(ends) > 2:
        for source in _spaced(ends, _FANS):
            targets = tuple(w for w in ends if w != source)[: _MOST_WORKERS - 1]
            cases.append(TransferRequest("fan", (source, *targets), _sizes(effort, len(targets), lanes), lanes))
    return (*cases, TransferRequest("chain", ends[:_MOST_WORKERS], _sizes(effort, _CHAIN, lanes), lanes, _CHAIN))


def kinds_of(facts: Sequence[DeviceFacts]) -> tuple[tuple[DeviceFacts, tuple[int, ...]], ...]:
    """Workers by what they are: facts with the least memory of them, and their numbers."""
    members: dict[tuple[str, str, int, str], list[int]] = {}
    for worker, f in enumerate(facts):
        members.setdefault((f.platform, f.device_kind, f.devices, f.name), []).append(worker)
    kinds = []
    for workers in members.values():
        least = min((facts[w] for w in workers), key=lambda f: f.memory_bytes or 0)
        kinds.append((least, tuple(workers)))
    return tuple(kinds)


def _sizes(effort: Effort, arrays: int, lanes: int) -> tuple[int, ...]:
    sizes = dict.fromkeys(even_bytes(s, lanes) for s in effort.transfers)
    return tuple(s for s in sizes if s * arrays <= _MOST_BYTES)


def _spaced(things: tuple[_T, ...], most: int) -> tuple[_T, ...]:
    """``most`` of the things at most, at even distances."""
    count = min(most, len(things))
    return tuple(things[n * len(things) // count] for n in range(count))


def _call_s(session: Session, limit_s: float) -> float:
    seconds = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        session.call("info", [()] * session.groups.num_processes, limit_s)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _exchanged(
    session: Session, cases: Sequence[TransferRequest], effort: Effort, limit_s: float, say: Callable[[str], None]
) -> tuple[LinkSample, ...]:
    seconds: dict[tuple[TransferRequest, int], list[float]] = {(c, size): [] for c in cases for size in c.sizes}
    for n in range(effort.repeats):
        say(f"measuring {len(cases)} links and paths, round {n + 1} of {effort.repeats}")
        for case in cases:
            message = encode(msgspec.structs.replace(case, deadline_s=limit_s))
            answers = session.call("exchange", [(message,)] * session.groups.num_processes, limit_s)
            results = [decode(answer[1], TransferResult) for answer in answers]
            if not all(f.equal for f in results):
                raise AutoparError(
                    f"arrays between workers {', '.join(map(str, case.workers))} did not arrive as they were sent",
                    cause="a network card or a device damages them, or autopar has a mistake",
                    remedy="measure again with other workers, and report it if it stays",
                )
            for size, took in zip(case.sizes, results[case.workers[0]].seconds, strict=True):
                seconds[case, size].append(took)
    return tuple(
        LinkSample(c.how, c.workers, size, c.lanes, c.count, tuple(took)) for (c, size), took in seconds.items()
    )
