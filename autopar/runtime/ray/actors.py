"""Workers as plain Ray actors: one process each, never restarted by Ray, in placement groups.

`RayWorkerGroup` has an actor for each process. `Placement` is the room that Ray sets aside for all workers of a
pipeline at once, or not at all. What runs in an actor's process is `autopar.runtime.ray.host`.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.errors import ClusterError, WorkerLostError
from autopar.runtime.ray.cluster import Slot
from autopar.runtime.ray.machine import GROUP_MARK, end_process, machine, marked, on_sigterm
from autopar.runtime.ray.messages import Handshake, WorkerInfo, decode, encode
from autopar.runtime.ray.worker_group import Answer, WorkerGroup


class Placement:
    """Room for workers.

    Args:
        slots: of each worker.
        machines: how many machines there are: workers are on machines of their own where there are as many.
        timeout_s: seconds to wait for room.

    Raises:
        ClusterError: there is not enough room.
    """

    def __init__(self, slots: Sequence[Slot], machines: int, timeout_s: float) -> None:
        strategy = "STRICT_SPREAD" if len(slots) <= machines else "PACK"
        self._group: Any = placement_group([dict(s.bundle) for s in slots], strategy=strategy)
        if not self._group.wait(timeout_s):
            self.close()
            raise ClusterError(
                f"Ray has no room for {len(slots)} workers within {timeout_s:g} s",
                cause="machines were lost, or others use them",
                remedy="ask for fewer workers, or look at `ray status`",
            )

    def options(self, worker: int, slot: Slot) -> dict[str, Any]:
        """Arguments of ``actor.options`` of a worker.

        Args:
            worker: its number.
            slot: its slot.
        """
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=worker)
        return {**slot.resources, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Gives the room back; what runs there ends."""
        if ray.is_initialized():
            remove_placement_group(self._group)


class _Actor:
    """The actor class of Ray; it imports `WorkerHost` in its process, after the environment is set."""

    def __init__(self, handshake: bytes) -> None:
        from autopar.runtime.ray.host import WorkerHost, configure

        decoded = decode(handshake, Handshake)
        if not decoded.listen:
            decoded = msgspec.structs.replace(decoded, listen=str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        handshake = encode(decoded)
        configure(handshake)
        self._host = WorkerHost(handshake)
        on_sigterm(self._host.end_soon)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the `WorkerHost`."""
        return self._host.call(method, *args)


class RayWorkerGroup(WorkerGroup):
    """A Ray actor for each process.

    Args:
        handshakes: one for each process.
        environments: environment variables of each process.
        options: further options of each actor, as resources.
        timeout_s: seconds that starting may take.
        placement: room that was set aside for them; it ends with them.
        runtime_env: of all processes, as Ray takes it.

    Raises:
        ClusterError: workers did not start.
        WorkerLostError: one was killed while it started.
    """

    has_lines = True

    def __init__(
        self,
        handshakes: Sequence[Handshake],
        environments: Sequence[Mapping[str, str]],
        options: Sequence[Mapping[str, Any]],
        timeout_s: float = 300,
        placement: Placement | None = None,
        runtime_env: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.ended = False
        self._placement = placement
        actor: Any = ray.remote(_Actor)
        self._processes: list[int] = []
        self._mark = secrets.token_hex(8)
        common = {GROUP_MARK: self._mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        asked = runtime_env.get("env_vars", {})
        self._actors: list[Any] = [
            actor.options(
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,  # a checkpoint is written while a step runs, which may be given up
                runtime_env={**runtime_env, "env_vars": {**asked, **environment, **common}},
                **settings,
            ).remote(encode(handshake))
            for handshake, environment, settings in zip(handshakes, environments, options, strict=True)
        ]
        tickets = [self.call(w, "info") for w in range(len(handshakes))]
        done, unstarted = ray.wait(tickets, num_returns=len(tickets), timeout=timeout_s)
        answers = [_answer(t) for t in done]
        errors = [a.error for a in answers if a.error]
        if errors or unstarted:
            lost = next((w for w, t in enumerate(tickets) if t in done and _answer(t).lost), None)
            self.kill()
            if lost is not None:
                raise WorkerLostError(f"worker {lost} was lost while it started: {errors[0]}", worker=lost)
            raise ClusterError(
                f"{len(unstarted) + len(errors)} of {len(tickets)} workers did not start: {[*errors, 'no answer'][0]}",
                cause="the cluster has too few free resources, or autopar cannot be imported there",
                remedy="ask for fewer workers, or look at the logs of Ray",
            )
        here = [decode(ray.get(t), WorkerInfo) for t in tickets]
        self._processes = [h.process for h in here if h.machine == machine()]

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the workers on this machine."""
        return tuple(self._processes)

    def call(self, process: int, method: str, *args: Any) -> Any:
        """Begins a call of a method in a worker's process; returns a ticket for `wait`."""
        return self._actors[process].call.remote(method, *args)

    def wait(self, tickets: Sequence[Any], timeout_s: float) -> dict[int, Answer]:
        """Answers that have arrived, by position in ``tickets``; waits until all have, or ``timeout_s`` is over."""
        # All at once: that is one message of Ray's where all answer about the same time.
        done, _ = ray.wait(list(tickets), num_returns=len(tickets), timeout=max(0.0, timeout_s))
        there = {t: i for i, t in enumerate(tickets)}
        return {there[t]: _answer(t) for t in done}

    def kill(self) -> None:
        """Ends all processes at once, whatever they do. Returns when they are gone."""
        self.ended = True
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)
        if self._placement is not None:
            self._placement.close()
            self._placement = None
        for process in sorted({*self._processes, *marked(f"{GROUP_MARK}={self._mark}")}):
            end_process(process, 0.5)


def _answer(ticket: Any) -> Answer:
    try:
        return Answer(ray.get(ticket))
    except ray.exceptions.RayTaskError as error:
        return Answer(error=str(error.cause or error))
    except ray.exceptions.RayActorError:
        return Answer(error="its process ended", lost=True)
    except ray.exceptions.RayError as error:
        return Answer(error=f"{type(error).__name__}: {error}", lost=True)
