"""Parts shared by passes that interpret a jaxpr: the walk, and binding an equation unchanged in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.primitives import bind
from autopar._compat.source import is_computed_again, pass_of
from autopar.ir.phases import RECOMPUTED, phase_of_marks

_V = TypeVar("_V")


def interpreted(
    jaxpr: Jaxpr,
    values: Sequence[_V],
    scope: str,
    equation: Callable[[JaxprEqn, list[_V], str], Sequence[_V]],
    literal: Callable[[Any], _V],
) -> list[_V]:
    """Results of a jaxpr whose values are a pass's own.

    Args:
        jaxpr: the program.
        values: its constants, then its arguments.
        scope: name stack around it.
        equation: results of an equation from its operands and its name stack.
        literal: the value of a number that is written into the program.
    """
    env: dict[Any, _V] = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(atom: Any) -> _V:
        return literal(atom.val) if isinstance(atom, JaxLiteral) else env[atom]

    for eqn in jaxpr.eqns:
        where = "/".join(s for s in (scope, str(eqn.source_info.name_stack)) if s)
        with place_of(eqn):
            results = equation(eqn, [read(v) for v in eqn.invars], where)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def shapes_of(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes for which a program of these arguments is traced."""
    return [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in variables
    ]


def bind_equation(eqn: JaxprEqn, values: Sequence[Any], changed: Mapping[str, Any]) -> list[Any]:
    """Results of an equation.

    Args:
        eqn: the equation.
        values: its operands.
        changed: parameters that are other ones; those that it does not have are left out.
    """
    return bind(eqn.primitive, {**eqn.params, **{k: v for k, v in changed.items() if k in eqn.params}}, values)


def place_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The name stack and the source line of an equation, for what is bound inside."""
    stack: Any = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context: AbstractContextManager[Any] = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    return context


def marks_of_equation(eqn: JaxprEqn, in_remat: bool = False) -> tuple[str, ...]:
    """Marks of an equation, from the transformations that made it.

    Args:
        eqn: the equation.
        in_remat: whether it is inside of a remat of the backward pass.
    """
    again = (RECOMPUTED,) if in_remat and is_computed_again(eqn.source_info) else ()
    made_in = pass_of(eqn.source_info)
    return (made_in, *again) if made_in else again


def phase_of_equation(eqn: JaxprEqn, enclosing: str = "update") -> str:
    """The part of a step that an equation belongs to; see `autopar.ir.phases.phase_of`."""
    return phase_of_marks(marks_of_equation(eqn), enclosing)


def holds_passes(eqn: JaxprEqn) -> bool:
    """Whether an unmarked loop or call has equations of the forward or backward pass inside."""
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if isinstance(jaxpr, Jaxpr) and any(
                phase_of_equation(e) != "update" or holds_passes(e) for e in jaxpr.eqns
            ):
                return True
    return False
