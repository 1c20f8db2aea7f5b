"""Collectives between processes with CPU devices."""

from __future__ import annotations

from typing import Any


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
