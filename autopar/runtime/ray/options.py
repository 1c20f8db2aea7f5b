"""`RunOptions`: how a pipeline is run on workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Transport: TypeAlias = Literal["auto", "sockets", "direct"]


@dataclass(frozen=True)
class RunOptions:
    """How a pipeline is run.

    Args:
        deadline_s: seconds that a step may take.
        start_s: seconds that processes may take to start.
        load_s: seconds that compiling and connecting may take.
        recover: whether lost workers are replaced and the step is run again.
        copy_every: with ``recover``, steps between two copies of what lies on the workers, in the driver's memory.
        attempts: how often one step may be begun.
        cache: folder in which workers keep compiled programs; empty for none.
        listen: address that workers and driver listen on.
        each_own: whether every worker listens on the address of its own machine instead.
        platform: kind of the workers' devices.
        transport: how arrays get from worker to worker: over sockets by way of the host, or "direct", pulled from
            device to device (`jax.experimental.transfer`). "auto" takes the second where devices are no CPUs.
    """

    deadline_s: float = 300.0
    start_s: float = 300.0
    load_s: float = 900.0
    recover: bool = False
    copy_every: int = 10
    attempts: int = 10
    cache: str = ""
    listen: str = "127.0.0.1"
    each_own: bool = False
    platform: str = "cpu"
    transport: Transport = "auto"

    @property
    def direct(self) -> bool:
        """Whether arrays are pulled from device to device."""
        return self.transport == "direct" or (self.transport == "auto" and self.platform != "cpu")
