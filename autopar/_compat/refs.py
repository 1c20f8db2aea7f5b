"""Mutable references (`jax.new_ref`) in a jaxpr, and the same program without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

_EFFECTS = ("InternalMutableArrayEffect", "AccumEffect", "ReadEffect", "RefEffect", "WriteEffect")


def is_ref(value: Any) -> bool:
    """Whether a value is a mutable reference to an array, or stands for one while jax traces."""
    return isinstance(value, jax.Ref)


def uses_refs(closed: ClosedJaxpr) -> bool:
    """Whether a program makes, reads or writes mutable references."""
    return any(type(e).__name__ in _EFFECTS for e in closed.effects) or any(map(is_ref, closed.consts))


def reference_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Equations that make, read or write references, the inner ones before the loop or call that they are in."""
    for eqn in jaxpr.eqns:
        if any(type(e).__name__ in _EFFECTS for e in eqn.effects):
            for value in eqn.params.values():
                for body in value if isinstance(value, tuple | list) else (value,):
                    inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
                    if isinstance(inner, Jaxpr):
                        yield from reference_equations(inner)
            yield eqn


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without the references that it makes: loops carry their values, branches return them.

    Args:
        closed: a program none of whose arguments and constants is a reference.

    Raises:
        NotImplementedError: jax has no rule for an operator that holds reads or writes; the message names it.
    """
    from jax._src.state.discharge import discharge_state  # here: programs without references need no private name

    # As jit does: what a derivative leaves of a function whose value nobody takes may hold what has no rule.
    read, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    pure: ClosedJaxpr = discharge_state(ClosedJaxpr(read, closed.consts))
    return pure
