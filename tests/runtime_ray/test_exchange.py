"""Measuring workers, as threads of this process: what is sent and counted, what is fitted, and what can go wrong."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster
from autopar.cost.links import LinkSample
from autopar.errors import AutoparError, ClusterError, WorkerLostError
from autopar.runtime.measuring import QUICK, Effort
from autopar.runtime.ray import host
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.measured import MeasuredKind, MeasuredWorkers, cases_of, kinds_of
from autopar.runtime.ray.messages import DeviceFacts
from autopar.runtime.transport import SocketLink, WorkerLink
from autopar.runtime.transport.direct import Transfers
from autopar.runtime.transport.exchange import TimedExchange, payload
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from tests.runtime_ray.pipelines import FragileWorkerGroup, thread_cluster

LEAST = replace(
    QUICK,
    products=(16, 64),
    copies=(1 << 12, 1 << 14),
    collectives=(1 << 10, 1 << 14),
    least_s=1e-5,
    repeats=2,
    first_touch=1 << 22,
    transfers=(1 << 10, 1 << 15),
    pairs=28,
)


class Recorded(WorkerLink):
    """A link that counts what a worker sends, and on how many devices, and may damage an array that comes in."""

    def __init__(self, link: WorkerLink, damaged: int | None = None) -> None:
        self._link = link
        self.sent: Counter[tuple[int, int]] = Counter()
        self.lanes: set[int] = set()
        self.damaged = damaged

    def send(self, to: int, tag: int, array: Any, name: str = "") -> None:
        self.sent[to, array.nbytes] += 1
        if isinstance(array, jax.Array):
            self.lanes.add(len(array.sharding.device_set))
        self._link.send(to, tag, array, name)

    def has_room(self, to: int) -> bool:
        return self._link.has_room(to)

    def ready(self, source: int) -> bool:
        return self._link.ready(source)

    def receive(self, source: int, tag: int, sharding: Any) -> Any:
        array = self._link.receive(source, tag, sharding)
        return array + 1 if array.nbytes == self.damaged else array


@pytest.fixture(params=["sockets", "direct"])
def links(request: pytest.FixtureRequest) -> Iterator[list[Recorded]]:
    made = [SocketLink(n, b"0123456789abcdef") for n in range(3)]
    for link in made:
        if request.param == "direct":
            link.transfers = Transfers("127.0.0.1")
        link.connect({n: k.address for n, k in enumerate(made)}, tuple(n for n in range(3) if made[n] is not link))
        link.begin(20)
    yield [Recorded(GroupLink(link, ProcessGroups((1, 1, 1)), {})) for link in made]
    for link in made:
        link.close()


def exchanged(
    links: list[Recorded], how: str, workers: tuple[int, ...], sizes: tuple[int, ...], lanes: int, count: int = 1
) -> list[tuple[tuple[float, ...], bool]]:
    """What comes of an exchange, by a clock that goes on by two seconds with every look at it."""

    def part(me: int) -> tuple[tuple[float, ...], bool]:
        clock = itertools.count(0.0, 2.0).__next__
        devices = jax.devices()[2 * me : 2 * me + 2]
        return TimedExchange(me, links[me], devices, clock).run(how, workers, sizes, lanes, count)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(part, range(len(links))))


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_array_goes_to_and_fro(links: list[Recorded], lanes: int) -> None:
    """Small ones sixteen times under one look at the clock, large ones once; each way is half."""
    found = exchanged(links, "bounce", (2, 0), (1 << 10, 1 << 18, 1 << 20), lanes)
    assert found == [((), True), ((), True), ((2 / 32, 2 / 8, 2 / 2), True)]
    assert links[2].sent == {(0, 1 << 10): 16, (0, 1 << 18): 4, (0, 1 << 20): 1}
    assert links[0].sent == {(2, 4): 1, (2, 1 << 10): 16, (2, 1 << 18): 4, (2, 1 << 20): 1}
    assert not links[1].sent
    assert links[0].lanes == links[2].lanes == {lanes}


def test_a_fan_reaches_all_at_once(links: list[Recorded]) -> None:
    found = exchanged(links, "fan", (1, 0, 2), (1 << 10, 1 << 16), 2)
    assert found == [((), True), ((2.0, 2.0), True), ((), True)]
    assert links[1].sent == {(to, size): 1 for to in (0, 2) for size in (1 << 10, 1 << 16)}
    assert links[0].sent == links[2].sent == {(1, 4): 3}  # ready, and an answer for each size


def test_a_chain_goes_from_worker_to_worker(links: list[Recorded]) -> None:
    found = exchanged(links, "chain", (0, 1, 2), (1 << 12,), 1, count=5)
    assert found == [((2.0,), True), ((), True), ((), True)]
    assert links[0].sent == {(1, 1 << 12): 5}
    assert links[1].sent == {(0, 4): 1, (2, 1 << 12): 5}
    assert links[2].sent == {(0, 4): 2}


@pytest.mark.parametrize(("how", "at"), [("bounce", 0), ("bounce", 1), ("fan", 2), ("chain", 1), ("chain", 2)])
def test_what_arrives_changed_is_seen(links: list[Recorded], how: str, at: int) -> None:
    links[at].damaged = 1 << 12
    workers = (0, 1) if how == "bounce" else (0, 1, 2)
    found = exchanged(links, how, workers, (1 << 10, 1 << 12), 1, count=2)
    assert not all(equal for _, equal in found)


def test_a_payload_can_be_split_evenly() -> None:
    assert payload(1000, 3).nbytes == 996 and payload(1, 4).nbytes == 16
    assert not np.array_equal(payload(1 << 10, 1), payload(1 << 12, 1)[: 1 << 8])


# -- which transfers ---------------------------------------------------------------------------


def test_on_one_machine_every_pair_is_measured() -> None:
    found = cases_of(["m"] * 4, [2] * 4, LEAST)
    pairs = [(c.workers, c.lanes) for c in found if c.how == "bounce"]
    assert sorted(pairs) == [(p, lanes) for p in itertools.combinations(range(4), 2) for lanes in (1, 2)]
    assert [(c.workers, c.lanes) for c in found if c.how == "fan"] == [
        ((0, 1, 2, 3), 2), ((1, 0, 2, 3), 2), ((2, 0, 1, 3), 2), ((3, 0, 1, 2), 2),
    ]  # fmt: skip
    assert [(c.workers, c.count) for c in found if c.how == "chain"] == [((0, 1, 2, 3), 4)]
    assert {c.sizes for c in found} == {(1 << 10, 1 << 15)}


def test_of_several_machines_one_worker_each_is_taken() -> None:
    found = cases_of(["a", "a", "b", "b", "c"], [1] * 5, LEAST)
    assert [c.workers for c in found if c.how == "bounce"] == [(0, 2), (0, 4), (2, 4)]
    assert [c.workers for c in found if c.how == "chain"] == [(0, 2, 4)]


def test_many_workers_do_not_take_forever() -> None:
    effort = Effort(transfers=(1 << 10, 1 << 26), pairs=10)
    found = cases_of([str(n) for n in range(64)], [8] * 64, effort)
    bounces = [c for c in found if c.how == "bounce"]
    assert len(bounces) == 20 and len({c.workers for c in bounces}) == 10
    assert all(len(c.workers) <= 8 for c in found)
    fan = next(c for c in found if c.how == "fan")
    assert fan.sizes == (1 << 10,)  # seven arrays of 64 MB are too much
    assert all(c.sizes == (1 << 10, 1 << 26) for c in bounces)


def test_workers_that_are_alike_are_measured_once() -> None:
    a, less, b = (
        DeviceFacts("gpu", kind, 8, memory, kind, "jax") for kind, memory in (("A", 80), ("A", 79), ("B", 40))
    )
    assert kinds_of([a, b, less]) == ((less, (0, 2)), (b, (1,)))


def test_a_kind_has_the_links_that_end_at_its_workers() -> None:
    facts = DeviceFacts("gpu", "A", 8, None, "A", "jax")
    links = tuple(LinkSample("bounce", pair, 1 << 10, 1, 1, (1.0,)) for pair in ((0, 1), (0, 2), (1, 2)))
    chain = LinkSample("chain", (0, 1, 2, 3), 1 << 10, 1, 1, (1.0,))
    found = MeasuredWorkers((), (*links, chain), 4, 1e-3, "sockets")
    assert found.links_of(MeasuredKind(facts, (2,), ())) == (*links[1:], chain)
    assert found.links_of(MeasuredKind(facts, (3,), ())) == found.links  # no pair with it was measured


# -- all of it ---------------------------------------------------------------------------------


def loss(w: Any, x: Any) -> Any:
    for layer in w:
        x = jnp.tanh(x @ layer)
    return jnp.mean(x**2)


def train_step(w: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, batch)
    return [a - 0.1 * g for a, g in zip(w, grads, strict=True)], value


@pytest.mark.few(1)
@pytest.mark.parametrize(("transport", "workers"), [("sockets", 3), ("direct", 2)])
def test_what_was_measured_is_planned_with(tmp_path: Path, transport: str, workers: int) -> None:
    said: list[str] = []
    cluster = thread_cluster(workers, 2, deadline_s=60, transport=transport)
    found = autopar.calibrate("mine", cluster=cluster, effort=LEAST, progress=said.append)
    pairs = set(itertools.combinations(range(workers), 2))
    for size in LEAST.transfers:
        for lanes in (1, 2):
            some = [s for s in found.links if (s.how, s.bytes, s.lanes) == ("bounce", size, lanes)]
            assert {s.workers for s in some} == pairs and len(some) == len(pairs)
    assert {s.how for s in found.links} == ({"bounce", "fan", "chain"} if workers > 2 else {"bounce", "chain"})
    assert all(len(s.seconds) == LEAST.repeats and min(s.seconds) > 0 for s in found.links)
    kinds = {"convolution", "reorder", "reduction", "function", "first touch"}
    assert {s.what for s in found.samples} == kinds | {"call", "chain", "product", "copy", "collective", "between"}
    worker_group = cluster.worker_groups[-1]
    assert isinstance(worker_group, FragileWorkerGroup)
    assert all((h._link.transfers is not None) == (transport == "direct") for h in worker_group._hosts)
    way = "over sockets" if transport == "sockets" else "pulled from device to device"
    assert f"{workers} workers on 1 machine, {way}" in found.text
    assert any("round 2 of 2" in text for text in said) and any("devices of worker 0" in text for text in said)

    found.save(str(tmp_path / "mine.toml"))
    read = Cluster.load(tmp_path / "mine.toml")
    (group,), (made,) = read.groups, found.groups
    assert (group.count, group.devices_per_node) == (workers, 2)
    assert made.network is not None and made.network.node_bandwidth is not None
    assert group.inter.bandwidth == pytest.approx(made.network.link.bandwidth, rel=1e-3)
    assert group.inter.latency_s == pytest.approx(made.network.link.latency_s, rel=1e-3, abs=1e-9)
    assert group.inter.node_bandwidth == pytest.approx(made.network.node_bandwidth, rel=1e-3)

    two = read.with_nodes(2)
    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2, jax.ShapeDtypeStruct((32, 64), "float32")
    plan = autopar.parallelize(train_step, cluster=two, num_stages=2, num_microbatches=2).plan(*shapes)
    sends = [c for c in plan.communication if c.kind == "send"]
    assert sends and [len(s.devices) for s in plan.stages] == [2, 2]
    rate = min(group.inter.bandwidth, group.inter.node_bandwidth / 2)
    for c in sends:
        once = group.inter.latency_s + c.bytes / 2 / rate
        assert c.seconds == pytest.approx(c.count * once, rel=1e-6)


def test_figures_are_those_of_the_workers_kind() -> None:
    """A device that the cluster's own file does not know has those of the file that does."""
    wrong = thread_cluster(2, 1, deadline_s=60)
    unlike = Cluster.load("dgx-a100").groups[0]
    wrong = type(wrong)("unlike", (unlike,), wrong.slots, wrong.run, wrong.launch, worker_groups=wrong.worker_groups)
    (made,) = autopar.calibrate(cluster=wrong, effort=LEAST).groups
    assert made.group.device.jax_kinds == ("cpu",)
    assert (made.group.count, made.group.devices_per_node) == (2, 1)
    # One device and two workers: nothing is sent at once.
    assert made.network is not None and made.network.node_bandwidth is None


# -- what can go wrong -------------------------------------------------------------------------


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(ClusterError, match=r"links need two workers, and threads has 1\n.*\n.*workers=2"):
        autopar.calibrate(cluster=thread_cluster(1, 2))
    with pytest.raises(ClusterError, match=r"local-cpu has no workers to measure\n.*\n.*give Cluster.ray\(\)"):
        autopar.calibrate(cluster=Cluster.load("local-cpu"))
    with pytest.raises(ClusterError, match="give one of them"):
        autopar.calibrate(devices=jax.devices(), cluster=thread_cluster(2, 2))
    empty = RayCluster("read", Cluster.load("local-cpu").groups, thread_cluster(2, 2).slots)
    with pytest.raises(ClusterError, match="it has no workers"):
        autopar.calibrate(cluster=empty)


@pytest.mark.parametrize(
    ("phase", "where"),
    [("round 2", "while transfers between workers were measured"), ("devices of worker", "while it measured")],
)
def test_a_worker_that_is_lost_is_named(phase: str, where: str) -> None:
    cluster = thread_cluster(3, 1, deadline_s=20)

    def lose(text: str) -> None:
        if phase in text:
            worker_group = cluster.worker_groups[-1]
            assert isinstance(worker_group, FragileWorkerGroup)
            worker_group.lose(1)

    with pytest.raises(WorkerLostError, match=rf"worker 1 was lost {where}(.|\n)*calibrate again") as caught:
        autopar.calibrate(cluster=cluster, effort=LEAST, progress=lose)
    assert (caught.value.worker, caught.value.stages) == (1, ())


def test_a_worker_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TimedExchange.run

    def silent(self: TimedExchange, *arguments: Any) -> Any:
        return ((), True) if self._me == 1 else run(self, *arguments)

    monkeypatch.setattr(TimedExchange, "run", silent)
    with pytest.raises(WorkerLostError, match=r"worker 1 was lost while transfers(.|\n)*others waited for it"):
        autopar.calibrate(cluster=thread_cluster(2, 1, deadline_s=0.5), effort=LEAST)


def test_arrays_that_arrive_changed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaging(TimedExchange):
        def run(self, *arguments: Any) -> Any:
            return super().run(*arguments)[0], self._me != 1

    monkeypatch.setattr(host, "TimedExchange", Damaging)
    with pytest.raises(AutoparError, match=r"between workers 0, 1 did not arrive as they were sent\n.*network card"):
        autopar.calibrate(cluster=thread_cluster(2, 1, deadline_s=20), effort=LEAST)


def test_a_failure_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TimedExchange, *arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(TimedExchange, "run", full)
    with pytest.raises(AutoparError, match=r"MemoryError: no room\n.*more memory(.|\n)*smaller sizes in Effort"):
        autopar.calibrate(cluster=thread_cluster(2, 1, deadline_s=20), effort=LEAST)


def test_without_ray_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("connect", "actors", "placing"):
        monkeypatch.delitem(sys.modules, f"autopar.runtime.ray.{name}", raising=False)
    with pytest.raises(ClusterError, match=r"Ray cannot be imported(.|\n)*not installed(.|\n)*pip install ray"):
        Cluster.ray(workers=2)
