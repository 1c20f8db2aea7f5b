"""The processes of a `jax.distributed` world, its key-value store, and collectives between CPUs.

`world` is the one that this process has joined. `use_gloo` chooses the address on which collectives of CPU devices
listen; it is called before jax has devices. Joining a world is `autopar.runtime.hosts.join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

#: Whether gloo carries collectives where traced programs will run; None where that is this process.
_BY_GLOO: ContextVar[bool | None] = ContextVar("autopar_by_gloo", default=None)


class SilenceError(Exception):
    """The coordination service did not answer, or a key did not appear in time.

    Args:
        reason: what jax says.
        late: whether the service is there, and only the key is not.
    """

    def __init__(self, reason: str, late: bool = False) -> None:
        self.late = late
        super().__init__(reason)


@dataclass(frozen=True, eq=False)
class World:
    """Processes that jax joined.

    Args:
        process: number of this one.
        processes: how many there are.
        client: jax's client of the coordination service.
    """

    process: int
    processes: int
    client: Any

    def put(self, key: str, value: bytes) -> None:
        """Writes a value that all processes can read; an older one is replaced. SilenceError without the service."""
        try:
            self.client.key_value_set_bytes(key, value, allow_overwrite=True)
        except RuntimeError as error:
            raise SilenceError(str(error)) from error

    def get(self, key: str, limit_s: float) -> bytes:
        """The value of a key.

        Args:
            key: its name.
            limit_s: seconds to wait for it.

        Raises:
            SilenceError: it did not appear in time.
        """
        try:
            return bytes(self.client.blocking_key_value_get_bytes(key, max(1, int(1000 * limit_s))))
        except RuntimeError as error:
            raise SilenceError(str(error), "DEADLINE_EXCEEDED" in str(error)) from error

    def folder(self, prefix: str) -> dict[str, bytes]:
        """All values whose keys begin with ``prefix`` and a slash, by the rest. SilenceError without the service."""
        try:
            entries = self.client.key_value_dir_get_bytes(prefix)
        except RuntimeError as error:
            raise SilenceError(str(error)) from error
        return {k.removeprefix(f"{prefix}/"): bytes(v) for k, v in entries}

    def forget(self, prefix: str) -> None:
        """Deletes a key, and all keys below it. SilenceError without the service."""
        try:
            self.client.key_value_delete(prefix)
        except RuntimeError as error:
            raise SilenceError(str(error)) from error

    def count(self, key: str) -> int:
        """Adds one to a counter of all processes; returns what it is then. SilenceError without the service."""
        try:
            return int(self.client.key_value_increment(key, 1))
        except RuntimeError as error:
            raise SilenceError(str(error)) from error


def world() -> World | None:
    """The world that `jax.distributed.initialize` joined this process to; None where it is alone."""
    from jax._src import distributed  # here, so that the planner floors can be imported without jax

    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return None
    return World(int(state.process_id), int(state.num_processes), state.client)


@contextmanager
def lowered_for(*, gloo: bool) -> Iterator[None]:
    """Programs that are traced meanwhile run in other processes.

    Args:
        gloo: whether it carries collectives there.
    """
    token = _BY_GLOO.set(gloo)
    try:
        yield
    finally:
        _BY_GLOO.reset(token)


def gloo_sends() -> bool:
    """Whether gloo carries the collectives of what is traced: those of CPU devices in a world, of one process too."""
    elsewhere = _BY_GLOO.get()
    if elsewhere is not None:
        return elsewhere
    import jax  # here, so that the planner floors can be imported without jax
    from jax._src import distributed

    return distributed.global_state.client is not None and jax.default_backend() == "cpu"


def serve(address: str, processes: int, heartbeat_s: int) -> Any:
    """jax's coordination service, which ends with what is returned.

    Args:
        address: host and port where it listens.
        processes: how many will join.
        heartbeat_s: seconds after which it takes a silent one for lost.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=heartbeat_s)


def use_gloo(host: str) -> None:
    """CPU devices of several processes talk by gloo, which listens on ``host``; called before jax has devices.

    jax's own setting (``jax_cpu_collectives_implementation``) listens on whatever address the machine's name stands
    for, perhaps one that others reach. Where jax has other private names than these, that setting is used.

    Args:
        host: address of this process that the others of its world reach.
    """
    import jax  # here, so that the planner floors can be imported without jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        register, make = xla_bridge.register_backend_factory, xla_bridge.make_cpu_client
        gloo = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return

    def client() -> Any:
        world = distributed.global_state.client
        return make(None if world is None else gloo(distributed_client=world, hostname=host))

    register("cpu", client, priority=0, fail_quietly=False)
