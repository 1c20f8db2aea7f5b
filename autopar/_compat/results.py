"""Results of compiled programs that are bound to no device, as those of `jax.jit` of arguments that are not."""

from __future__ import annotations

from typing import Any


def leave_uncommitted(compiled: Any) -> bool:
    """Makes a compiled program return uncommitted arrays; called before it runs. Returns whether this jax can.

    A program that has shardings returns committed arrays, though a jitted function without them does not.

    Args:
        compiled: what `jax.stages.Lowered.compile` made, for one device.
    """
    try:
        from jax._src.interpreters import pxla

        program = compiled._executable.unsafe_call
        before = program.out_handler
        program.out_handler = pxla.global_avals_to_results_handler(before.out_avals, before.out_shardings, False)
    except (ImportError, AttributeError, TypeError):
        return False
    return True
