"""`RunOptions`: how a pipeline is run on workers."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.ray_options import RayOptions
from autopar.runtime.ray.recovery import RetryPolicy


@dataclass(frozen=True)
class RunOptions(RayOptions):
    """Options of `autopar.Cluster.ray`, and of running a pipeline on the workers that were found.

    Args:
        silence_s: seconds without a heartbeat after which a process that is called counts as lost.
        growth_check_s: with ``recover``, seconds between two looks at whether lost nodes came back.
        own_cache: whether the folder ``cache`` is this cluster's alone: files in it that its workers did not write are
            removed.
        encrypted: whether connections between processes are.
        open_collectives: whether a stage may have processes on several machines, whose collectives are not encrypted.
        listen: address that workers and driver listen on.
        each_own: whether every worker listens on the address of its own machine instead.
        platform: kind of the workers' devices.
    """

    silence_s: float = 60.0
    growth_check_s: float = 5.0
    own_cache: bool = False
    encrypted: bool = False
    open_collectives: bool = False
    listen: str = "127.0.0.1"
    each_own: bool = False
    platform: str = "cpu"

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
