"""`RemotePipeline`: one signature of a function on the workers of a cluster."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar._compat.dtypes import jax_dtype
from autopar.errors import AutoparError
from autopar.lower.pipeline.exported import export_maker
from autopar.runtime.ray.calls import StepOutcome, lost_array, run_step
from autopar.runtime.ray.deployment import Deployment, Replanner
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.ledger import Call
from autopar.runtime.ray.messages import Timed
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.values import RemoteArray, RemoteStack
from autopar.runtime.transport.tiles import HostKeys, host_copy
from autopar.schedule import Apply, Run, Send
from autopar.simulate import Event, Timeline


class RemotePipeline:
    """A pipeline on the workers of a cluster; its programs are there as long as this object is.

    Args:
        driver: of the cluster.
        deployment: what runs, and where.
        progress: told what is being done.
        replanner: what to do when machines are lost for good; without it that is an error.
    """

    def __init__(
        self,
        driver: Driver,
        deployment: Deployment,
        progress: Callable[[str], None] | None = None,
        replanner: Replanner | None = None,
    ) -> None:
        self.driver = driver
        self._replanner = replanner
        # What plans again knows the whole function, and with it this object: the driver must not keep it alive.
        self.function = driver.add(deployment, None if replanner is None else weakref.ref(replanner), progress)
        self._times: tuple[tuple[Timed, ...], ...] = ()
        self.orders: tuple[str, ...] = ()
        self._end = weakref.finalize(self, driver.drop, self.function.number)
        self._end.atexit = False

    @property
    def deployment(self) -> Deployment:
        """The running plan, and its places."""
        return self.function.deployment

    @property
    def source(self) -> Pipelined:
        """The lowered pipeline that runs now."""
        return self.function.source

    def load(self) -> None:
        """Compiles the programs on the workers, which are started where there are none; returns when all are ready."""
        self._check_open()
        self.driver.perform(self.function, lambda: None)

    def close(self) -> None:
        """Frees the programs; arrays stay on the workers. Workers end with the cluster."""
        self._end()

    def compiled(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program of each worker."""
        number, driver = self.function.number, self.driver
        calls = [(number,)] * self.source.num_workers
        answers = driver.perform(
            self.function, lambda: driver.session.of_workers("compiled", calls, driver.options.load_s, self.source)
        )
        return {f"{name} on worker {w}": text for w, texts in enumerate(answers) for name, text in texts[0].items()}

    def timeline(self) -> Timeline:
        """The last step that was timed. AutoparError where none was."""
        return measured_timeline(self.source, self._times)

    # -- arrays --------------------------------------------------------------------------------

    def put(self, values: Mapping[int, Any]) -> dict[int, RemoteArray]:
        """Puts inputs of the step where it reads them.

        Args:
            values: arrays by index of the input; inputs that are cut into microbatches stay with the driver.
        """
        self._check_open()
        dtypes = {index: value.dtype for index, value in values.items()}
        with self.driver.lock:  # other threads may give the same arrays; see `list_shards`
            host = {index: to_host(value) for index, value in sorted(values.items())}
            return self.driver.perform(self.function, lambda: self._put(host, dtypes))

    def _put(self, values: Mapping[int, Any], dtypes: Mapping[int, Any]) -> dict[int, RemoteArray]:
        driver, source = self.driver, self.source
        ids: dict[int, int] = {}
        given: list[dict[int, Any]] = [{} for _ in range(source.num_workers)]
        names: list[dict[int, str]] = [{} for _ in range(source.num_workers)]
        for index, host in values.items():
            held = {w: p.value for w, places in enumerate(source.places) for p in places if p.index == index}
            if not held or source.inputs[index].name in source.batch:
                continue
            ids[index] = driver.ledger.new_id()
            for w, name in held.items():
                given[w][ids[index]], names[w][ids[index]] = host, name
        calls = [(self.function.number, a, n) for a, n in zip(given, names, strict=True)]
        if ids:
            driver.session.of_workers("put", calls, driver.options.load_s, source)
        arrays: dict[int, RemoteArray] = {}
        for index, id in ids.items():
            driver.ledger.held_by([id], (w for w in range(source.num_workers) if id in names[w]))
            if driver.options.recover:
                driver.ledger.copies[id] = values[index]
            arrays[index] = driver.handle(id, source.inputs[index].type.shape, dtypes[index])
        return arrays

    def make(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        parts: Mapping[int, Callable[[Sequence[Any]], Any]],
    ) -> dict[int, RemoteArray]:
        """Inputs of the step, made on the workers that read them.

        Args:
            function: arrays -> arrays.
            arguments: what it is called with.
            parts: by index of the input: the results of ``function`` -> the input.

        Returns handles by index, without those that are cut into microbatches or that nobody reads.
        """
        self._check_open()
        return self.driver.perform(self.function, lambda: self._make(function, arguments, parts))

    def _make(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        parts: Mapping[int, Callable[[Sequence[Any]], Any]],
    ) -> dict[int, RemoteArray]:
        driver, source = self.driver, self.source
        placements = {r.name: r for p in self.function.exported for r in p.reads}
        axes = {r.name: p.axes for p in self.function.exported for r in p.reads}
        ids: dict[int, int] = {}
        calls: list[tuple[Any, ...]] = []
        held: dict[int, list[int]] = {}
        host = [to_host(a) for a in arguments]
        for worker, places in enumerate(source.places):
            places_of_worker = [p for p in places if p.index in parts and not p.microbatches and p.value in placements]
            code = b""
            if places_of_worker:
                code = export_maker(
                    lambda *a, here=places_of_worker: [parts[p.index](function(*a)) for p in here],
                    arguments,
                    [placements[p.value] for p in places_of_worker],
                    axes[places_of_worker[0].value],
                    driver.options.platform,
                )
            for p in places_of_worker:
                if p.index not in ids:
                    ids[p.index] = driver.ledger.new_id()
                held.setdefault(ids[p.index], []).append(worker)
            calls.append(
                (
                    self.function.number,
                    code,
                    host,
                    [ids[p.index] for p in places_of_worker],
                    [p.value for p in places_of_worker],
                )
            )
        driver.session.of_workers("make", calls, driver.options.load_s, source)
        for id, workers in held.items():
            driver.ledger.held_by([id], workers)
        driver.copy(ids.values())
        types = {index: source.inputs[index].type for index in ids}
        return {
            index: driver.handle(id, types[index].shape, jax_dtype(types[index].dtype)) for index, id in ids.items()
        }

    # -- steps ---------------------------------------------------------------------------------

    def step(self, values: Sequence[Any], *, timed: bool = False, orders: tuple[str, ...] = ()) -> list[RemoteArray]:
        """Runs a step.

        Args:
            values: the inputs: handles of this cluster, of whichever function, or arrays.
            timed: whether instructions are timed, for which workers wait for each program.
            orders: by worker that of AMPNet's passes; empty leaves it to what arrives.

        Returns a handle for each output.

        Raises:
            ClusterError: a handle is of another cluster, or the cluster was closed.
            WorkerLostError: a worker was lost, and ``recover`` is off or did not help.
        """
        driver, ledger = self.driver, self.driver.ledger
        with driver.lock:
            self._check_open()
            driver.copy_if_due()
            call = replace(self._call(values), orders=orders)
            forget = ledger.drop_stale()
            began_s = time.perf_counter()
            try:
                outcome = driver.perform(self.function, lambda: self._run(call, forget, timed), call.number)
            except BaseException:
                ledger.give_up(call, forget)
                raise
            driver.metrics.step_s.observe(time.perf_counter() - began_s)
            driver.metrics.sent_bytes.inc(outcome.sent_bytes)
            driver.metrics.queue_depth.set(outcome.queued)
            self.orders = outcome.orders
            if driver.options.recover:
                ledger.log.append(replace(call, orders=outcome.orders if self.source.amp else ()))
                ledger.position += 1
            if timed:
                self._times = outcome.times
            handles = []
            for id, r in zip(call.results, self.source.results, strict=True):
                handle = driver.handle(id, r.type.shape, r.dtype, r.placement)
                if id in outcome.small:
                    handle.tell(outcome.small[id])
                handles.append(handle)
            return handles

    def _call(self, values: Sequence[Any]) -> Call:
        """The step of these inputs."""
        ledger = self.driver.ledger
        given: dict[int, Any] = {}
        inputs = []
        for value in values:
            if isinstance(value, RemoteArray) and not isinstance(value, RemoteStack):
                self.driver.check(value)
                if ledger.can_be_had(value.id):
                    inputs.append(value.id)
                    continue
                if not value.is_on_driver:
                    raise lost_array()
                value = value.host
            id = ledger.new_id()
            given[id] = to_host(value)
            inputs.append(id)
        results = tuple(ledger.new_id() for _ in self.source.results)
        return Call(ledger.new_step(), self.function.number, tuple(inputs), given, results)

    def _run(self, call: Call, forget: tuple[int, ...], timed: bool) -> StepOutcome:
        driver = self.driver
        return run_step(driver.session, driver.ledger, self.function, call, driver.options, forget, timed)

    def _check_open(self) -> None:
        self.driver.check_open()
        if not self._end.alive:
            raise AutoparError("the function was closed", remedy="compile it again")


def to_host(value: Any) -> Any:
    """An array of the user on the host: numpy, or `HostKeys`."""
    if isinstance(value, HostKeys):
        return value
    return host_copy(value) if isinstance(value, jax.Array) else np.asarray(value)


def measured_timeline(source: Pipelined, times: Sequence[Sequence[Timed]]) -> Timeline:
    """The timeline of a step: programs on the compute lanes, sends next to them.

    Args:
        source: the pipeline.
        times: for each worker when its instructions ran, by clocks that agree (those of one machine do).

    Raises:
        AutoparError: nothing was measured.
    """
    if not any(times):
        raise AutoparError("no step was timed", remedy="run one with timed=True")
    zero = min(t.start_s for line in times for t in line)
    bytes_of = {v.name: v.bytes for v in source.program.dataflow.values}
    events = []
    for worker, line in enumerate(times):
        for t in line:
            instruction = source.instruction(worker, t.index)
            start, end = t.start_s - zero, t.end_s - zero
            if isinstance(instruction, Run):
                work = instruction.work
                events.append(Event(start, end, worker, work.kind, work.stage, instruction.microbatch, str(work)))
            elif isinstance(instruction, Apply):
                work = instruction.work
                events.append(Event(start, end, worker, work.kind, work.stage, name=str(work)))
            elif isinstance(instruction, Send):
                value, to = instruction.value, instruction.to
                size = bytes_of.get(value.value, 0)
                events.append(Event(start, end, worker, "send", name=str(value), target=to, bytes=size))
    return Timeline.measured(len(times), events)
