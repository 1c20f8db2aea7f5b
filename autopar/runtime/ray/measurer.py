"""`Measurer`: what a worker's process measures, without a pipeline: its devices, and links to others."""

from __future__ import annotations

from collections.abc import Callable

import jax

from autopar._compat.devices import machine_name
from autopar.runtime.measuring import measure_devices
from autopar.runtime.ray.messages import (
    Connect,
    DeviceFacts,
    Failure,
    Measure,
    MeasureResult,
    StepResult,
    TransferRequest,
    TransferResult,
    decode,
    encode,
)
from autopar.runtime.transport import SocketLink, WorkerLink
from autopar.runtime.transport.direct import Transfers
from autopar.runtime.transport.exchange import TimedExchange
from autopar.runtime.transport.permutes import MovePrograms
from autopar.runtime.transport.process_groups import GroupLink, ProcessGroups
from autopar.runtime.transport.world import WorldLink


class Measurer:
    """Measurements of one process.

    Args:
        process: its number.
        link: its connections.
        devices_of: number of another process of its world -> the devices there.
        devices: its devices, which are looked for when they are first asked for.
        failure: what an error is told as.
    """

    def __init__(
        self,
        process: int,
        link: SocketLink,
        devices_of: Callable[[int], list[jax.Device]],
        devices: Callable[[], list[jax.Device]],
        failure: Callable[[int, Exception], Failure],
    ) -> None:
        self._process = process
        self._link = link
        self._group_link: WorkerLink | None = None
        self._devices_of = devices_of
        self._devices = devices
        self._failure = failure

    def facts(self) -> bytes:
        """The devices, as `DeviceFacts`."""
        devices = self._devices()
        memory = None if devices[0].platform == "cpu" else (devices[0].memory_stats() or {}).get("bytes_limit")
        name, versions = machine_name(devices[0].platform, devices[0].device_kind), f"jax {jax.__version__}"
        return encode(DeviceFacts(devices[0].platform, devices[0].device_kind, len(devices), memory, name, versions))

    def measure(self, message: bytes) -> bytes:
        """Measures the devices if a `Measure` says so; returns a `MeasureResult`."""
        request = decode(message, Measure)
        measures_here = self._process in request.processes
        return encode(MeasureResult(measure_devices(self._devices(), request.effort) if measures_here else ()))

    def connect(self, message: bytes) -> tuple[bytes]:
        """Connects to the processes of a `Connect`. Returns a `StepResult`."""
        request = decode(message, Connect)
        try:
            if request.direct and self._link.transfers is None:
                self._link.transfers = Transfers(self._link.address[0])
            sockets = GroupLink(self._link, ProcessGroups((1,) * len(request.addresses)), {})
            self._group_link = sockets
            if request.world:
                self._group_link = WorldLink(sockets, self._process, self._devices_of, {}, MovePrograms())
            self._link.connect(request.addresses, tuple(p for p in request.addresses if p != self._process))
        except Exception as error:
            return (encode(StepResult(self._failure(-1, error))),)
        return (encode(StepResult(None)),)

    def exchange(self, message: bytes) -> tuple[bytes, bytes]:
        """Takes part in a `TransferRequest`. Returns a `StepResult` and a `TransferResult`."""
        request = decode(message, TransferRequest)
        self._link.begin(request.deadline_s)
        part = TimedExchange(self._process, self._group_link or self._link, self._devices())
        try:
            seconds, equal = part.run(request.how, request.workers, request.sizes, request.lanes, request.count)
        except Exception as error:
            return encode(StepResult(self._failure(-1, error))), encode(TransferResult())
        return encode(StepResult(None)), encode(TransferResult(seconds, equal))
