"""`RunOptions`: how a pipeline is run on workers."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.ray_options import Transport
from autopar.runtime.ray.recovery import RetryPolicy


@dataclass(frozen=True)
class RunOptions:
    """Options of running a pipeline.

    Args:
        deadline_s: seconds that a step may take.
        start_s: seconds that processes may take to start.
        load_s: seconds that compiling and connecting may take.
        recover: whether lost workers are replaced and the step is run again.
        copy_every: with ``recover``, steps between two copies of what lies on the workers, in the driver's memory.
        attempts: how often one operation (a step, ``init``, loading) may be begun.
        repeats: how often in a row an operation may be lost at one instruction.
        backoff_s: seconds to wait before the third attempt; doubled with each that follows.
        silence_s: seconds without a heartbeat after which a process that is called counts as lost.
        growth_check_s: with ``recover``, seconds between two looks at whether lost nodes came back.
        cache: folder in which workers keep compiled programs; empty for none.
        own_cache: whether that folder is this cluster's alone: files in it that its workers did not write are removed.
        encrypted: whether connections between processes are.
        open_collectives: whether a stage may have processes on several machines, whose collectives are not encrypted.
        listen: address that workers and driver listen on.
        each_own: whether every worker listens on the address of its own machine instead.
        platform: kind of the workers' devices.
        transport: how arrays get from worker to worker: over sockets by way of the host; "direct", pulled from
            device to device (`jax.experimental.transfer`), which is not encrypted; or "world", by programs that sender
            and receiver start (`autopar.runtime.transport.world`), not encrypted either. "auto" takes "direct" where
            devices are no CPUs and connections need not be encrypted, else sockets.
    """

    deadline_s: float = 300.0
    start_s: float = 300.0
    load_s: float = 900.0
    recover: bool = False
    copy_every: int = 10
    attempts: int = 10
    repeats: int = 3
    backoff_s: float = 0.5
    silence_s: float = 60.0
    growth_check_s: float = 5.0
    cache: str = ""
    own_cache: bool = False
    encrypted: bool = False
    open_collectives: bool = False
    listen: str = "127.0.0.1"
    each_own: bool = False
    platform: str = "cpu"
    transport: Transport = "auto"

    @property
    def retry(self) -> RetryPolicy:
        """The policy of retries."""
        return RetryPolicy(self.recover, self.attempts, self.repeats, self.backoff_s)

    @property
    def world(self) -> bool:
        """Whether all processes form one world of `jax.distributed`, whose workers send by programs."""
        return self.transport == "world"

    @property
    def direct(self) -> bool:
        """Whether arrays are pulled from device to device."""
        return self.transport == "direct" or (
            self.transport == "auto" and self.platform != "cpu" and not self.encrypted
        )
