"""What passes that interpret a jaxpr share: to bind an equation as it stands, in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autopar.ir.phases import phase_of


def bind_equation(eqn: JaxprEqn, values: Sequence[Any], changed: Mapping[str, Any]) -> list[Any]:
    """Results of an equation.

    Args:
        eqn: the equation.
        values: its operands.
        changed: parameters that are other ones; those that it does not have are left out.
    """
    primitive: Any = eqn.primitive
    given = {**eqn.params, **{k: v for k, v in changed.items() if k in eqn.params}}
    results = primitive.bind(*values, **primitive.get_bind_params(given))
    return list(results) if primitive.multiple_results else [results]


def place_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The name stack and the source line of an equation, for what is bound inside."""
    stack: Any = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context: AbstractContextManager[Any] = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    return context


def holds_passes(eqn: JaxprEqn) -> bool:
    """Whether an unmarked loop or call has equations of the forward or backward pass inside."""
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if isinstance(jaxpr, Jaxpr) and any(
                phase_of(str(e.source_info.name_stack)) != "update" or holds_passes(e) for e in jaxpr.eqns
            ):
                return True
    return False
