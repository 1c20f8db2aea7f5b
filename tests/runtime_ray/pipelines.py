"""Examples as pipelines, and what one device computes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np

from autopar import schedule
from autopar.cluster import Cluster, NodeGroup
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir import Layout
from autopar.lower.callbacks import Callbacks
from autopar.lower.pipeline.build import dataflow_of
from autopar.lower.pipeline.programs import stage_programs
from autopar.lower.pipeline.stage_graph import stage_graph
from autopar.lower.pipeline.stage_program import StageProgram
from autopar.lower.program import sharded
from autopar.lower.retrace import step_of
from autopar.microbatch import analyze
from autopar.runtime.ray import Deployment, Driver, Pipelined, RemoteArray, RemotePipeline, RunOptions
from autopar.runtime.ray.cluster import RayCluster, Slot
from autopar.runtime.ray.host import WorkerHost
from autopar.runtime.ray.messages import Handshake, encode
from autopar.runtime.ray.source import pipelined
from autopar.runtime.ray.worker_group import Answer, WorkerGroup
from autopar.search import Job, Problem
from autopar.search.alpa import alpa
from autopar.stages import assign, cluster, stage_parts


@dataclass(frozen=True)
class Example:
    """A step, its arguments, and its pipeline.

    ``leaves`` are the inputs of the pipeline; the first ``state`` of them are the state, of which the step returns the
    next as its first results.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    leaves: list[Any]
    state: int
    source: Pipelined


def example(
    name: str, devices: int, *, microbatches: int = 2, stages: int = 2, table: str = "1f1b", **sizes: Any
) -> Example:
    step, arguments = importlib.import_module(f"examples.{name}").build("tiny", **sizes)
    return example_of(step, arguments, devices, microbatches=microbatches, stages=stages, table=table)


def example_of(
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    devices: int,
    *,
    microbatches: int = 2,
    stages: int = 2,
    table: str = "1f1b",
) -> Example:
    signature, leaves = flatten_call(step, arguments, {}, SignatureOptions())
    traced = trace(step, signature)
    graph = traced.graph
    found = analyze(graph, microbatches)
    layers = cluster(graph, found, stages)
    rows = schedule.get(table).table(stages, microbatches)
    assigned = assign(graph, found, layers, list(range(1, len(layers.members) + 1)))
    programs: list[StageProgram] = []
    axes = []
    group = Cluster.load("local-cpu").groups[0]
    part = Cluster("part", (dataclasses.replace(group, devices_per_node=devices),))
    for parts in stage_parts(graph, assigned):
        cut = stage_graph(step_of(traced), assigned.microbatching, parts)
        plan = alpa(Problem(cut.graph, part, CostModel(part), job=Job(num_microbatches=microbatches)))
        inputs, outputs = (
            [Layout.parse(r.layout) for r in some] for some in (plan.content.inputs, plan.content.outputs)
        )
        programs += stage_programs(cut, sharded(plan, "cpu", Callbacks()), inputs, outputs, split=rows.splits_backward)
        axes.append(plan.stages[0].mesh_axes)
    kinds: dict[int, set[str]] = {}
    for row in rows.rows:
        for task in row:
            kinds.setdefault(task.stage, set()).add(task.kind)
    flow = dataflow_of(programs, [dict(a) for a in axes], {k: sorted(v) for k, v in kinds.items()})
    source = pipelined(
        schedule.build(rows, flow),
        tuple(programs),
        tuple(axes),
        graph.inputs,
        len(graph.outputs),
        assigned.microbatching.batch,
    )
    return Example(step, arguments, [*leaves, *traced.closed_over], len(jax.tree.leaves(arguments[0])), source)


def on_threads(made: Example, devices: int, **run: Any) -> RemotePipeline:
    """A pipeline whose workers are threads, each on the next ``devices`` devices of this process."""
    driver = Driver(launch_threads, RunOptions(**run))
    pipeline = RemotePipeline(driver, Deployment(made.source, (devices,) * made.source.num_workers))
    pipeline.load()
    return pipeline


def launch_threads(
    handshakes: Sequence[Handshake],
    devices: Sequence[int],
    kinds: Sequence[int] = (),
    group: type[FragileWorkerGroup] | None = None,
) -> FragileWorkerGroup:
    """Workers as threads, each on the next of this process's devices."""
    first, told = 0, []
    for handshake, count in zip(handshakes, devices, strict=True):
        told.append(msgspec.structs.replace(handshake, devices=count, first_device=first))
        first += count
    return (group or FragileWorkerGroup)(told)


def numbers(leaf: Any) -> np.ndarray:
    """A leaf as numpy; keys as what they are made of."""
    if isinstance(leaf, RemoteArray):
        leaf = leaf.to_jax()
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def trained_plain(made: Example, steps: int) -> list[np.ndarray]:
    """All results of the last of some steps on one device."""
    state, *rest = made.arguments
    step = jax.jit(made.step)
    for _ in range(steps):
        result = step(state, *rest)
        state = result[0]
    return [numbers(leaf) for leaf in jax.tree.leaves(result)]


def trained(made: Example, pipeline: Any, steps: int, between: Callable[[int], None] = lambda step: None) -> list[Any]:
    """The handles of all results of the last of some steps of a pipeline."""
    leaves = list(made.leaves)
    results: list[Any] = []
    for number in range(steps):
        between(number)
        results = pipeline.step(leaves)
        leaves = [*results[: made.state], *leaves[made.state :]]
    return results


def furthest(got: list[Any], want: list[np.ndarray]) -> float:
    """The largest difference of a leaf, relative to its norm."""
    assert len(got) == len(want)
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        a, b = numbers(g), w
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        apart = float(np.linalg.norm((a.astype(float) - b.astype(float)).ravel()))
        worst = max(worst, apart / max(float(np.linalg.norm(b.astype(float).ravel())), 1e-30))
    return worst


def furthest_after_a_loss(cluster: Any, step: Any, compiled: Any, fn: Any, state: Any, batch: Any) -> float:
    """How far three steps on workers, of which one is killed after the first, are from those of one device."""
    mine, want = step.shard(state, batch)[0], state
    for n in range(3):
        if n == 1:  # what a worker that is lost had is made again
            os.kill(cluster.processes[0], signal.SIGKILL)
        mine, metrics = compiled(mine, batch)
        want, expected = jax.jit(fn)(want, batch)
    return furthest(jax.tree.leaves((mine, metrics)), [numbers(x) for x in jax.tree.leaves((want, expected))])


class _LostProcessError(Exception):
    pass


class ThreadWorkerGroup(WorkerGroup):
    """Workers as threads of this process, each on its own part of the process's devices.

    Args:
        handshakes: one for each worker.
    """

    def __init__(self, handshakes: Sequence[Handshake]) -> None:
        self._hosts = [WorkerHost(encode(h)) for h in handshakes]
        self._threads = [ThreadPoolExecutor(4, f"worker-{h.process}") for h in handshakes]

    def call(self, process: int, method: str, *args: Any) -> Future[Any]:
        """See `WorkerGroup.call`."""
        return self._threads[process].submit(self._hosts[process].call, method, *args)

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> dict[int, Answer]:
        """See `WorkerGroup.wait`."""
        done, _ = wait(tickets, timeout_s)
        return {i: _answer(t) for i, t in enumerate(tickets) if t in done}

    def kill(self) -> None:
        """Closes the connections, which ends what waits for them."""
        for host in self._hosts:
            host.close()
        for thread in self._threads:
            thread.shutdown(wait=True)


def _answer(future: Future[Any]) -> Answer:
    error = future.exception()
    return Answer(future.result()) if error is None else Answer(error=f"{type(error).__name__}: {error}")


class FragileWorkerGroup(ThreadWorkerGroup):
    """Workers as threads, of which some can be lost as processes are."""

    def __init__(self, handshakes: Sequence[Handshake]) -> None:
        super().__init__(handshakes)
        self.lost: set[int] = set()

    def lose(self, process: int) -> None:
        """From now on the process is gone."""
        self.lost.add(process)
        self._hosts[process].close()

    def call(self, process: int, method: str, *args: Any) -> Future[Any]:
        if process not in self.lost:
            return super().call(process, method, *args)
        gone: Future[Any] = Future()
        gone.set_exception(_LostProcessError())
        return gone

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> dict[int, Answer]:
        found = super().wait(tickets, timeout_s)
        lost = {i for i in found if isinstance(tickets[i].exception(), _LostProcessError)}
        return {i: Answer(error="its process ended", lost=True) if i in lost else a for i, a in found.items()}


class ThreadCluster(RayCluster):
    """Threads of one process are no session: a stage is one of them, however many nodes it has."""

    def hosts(self, devices: Sequence[int]) -> int:
        return 1


def thread_cluster(
    workers: int | Sequence[int],
    devices: int | Sequence[int],
    room: Callable[[], int | tuple[int, ...]] | None = None,
    *,
    group: type[FragileWorkerGroup] = FragileWorkerGroup,
    like: NodeGroup | None = None,
    **run: Any,
) -> RayCluster:
    """A cluster whose workers are threads of this process; ``worker_groups`` has all that were started.

    With ``like`` their devices are priced as those, so that a small model is worth stages.

    With several numbers it is mixed: so many workers of so many devices each, and so on.
    """
    counts = [workers] if isinstance(workers, int) else workers
    sizes = [devices] if isinstance(devices, int) else devices
    like = like or Cluster.load("local-cpu").groups[0]
    groups = [dataclasses.replace(like, count=n, devices_per_node=d) for n, d in zip(counts, sizes, strict=True)]
    worker_groups: list[WorkerGroup] = []

    def launch(handshakes: Sequence[Handshake], sizes: Sequence[int], kinds: Sequence[int] = ()) -> WorkerGroup:
        worker_groups.append(launch_threads(handshakes, sizes, kinds, group))
        return worker_groups[-1]

    def nodes() -> tuple[int, ...]:
        assert room is not None
        now = room()
        return (now,) if isinstance(now, int) else now

    slots, options = tuple(Slot(g.devices_per_node, "cpu") for g in groups for _ in range(g.count)), RunOptions(**run)
    driver = Driver(launch, options, None if room is None else nodes)
    return ThreadCluster("threads", tuple(groups), slots, options, launch, worker_groups=worker_groups, driver=driver)


def kept(pipeline: RemotePipeline) -> list[int]:
    """Number of arrays that each worker keeps."""
    driver = pipeline.driver
    calls = [((),)] * pipeline.source.num_workers
    answers = driver.perform(pipeline.function, lambda: driver.session.of_workers("forget", calls, 60.0))
    return [counts[0] for counts in answers]
