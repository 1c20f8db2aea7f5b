"""Equations of a jaxpr: the walk over them, their marks, and the bodies of those that are calls.

A pass over a jaxpr calls `interpreted` with a function of one equation, and `bind_equation` for what it leaves
unchanged. `body_of` is the program that an equation stands for, where jax or its package says it: an equation with a
body is planned operator by operator, one without runs whole on every device. `autopar.frontend.build` makes graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.primitives import bind
from autopar._compat.source import is_recomputed, pass_of
from autopar.ir.phases import RECOMPUTED, phase_of_marks

_V = TypeVar("_V")
# Primitives that are opened, with the parameter that holds their body.
_PARAMETER = MappingProxyType(
    {
        "jit": "jaxpr",
        "pjit": "jaxpr",
        "closed_call": "call_jaxpr",
        "core_call": "call_jaxpr",
        "eval_jaxpr": "call_jaxpr",
        "custom_jvp_call": "call_jaxpr",
        "custom_vjp_call": "call_jaxpr",
        "custom_vjp_call_jaxpr": "fun_jaxpr",
        "remat2": "jaxpr",
        "checkpoint": "jaxpr",
        "custom_vmap_call": "call",
    }
)
#: Primitives that change where a value lies, or what jax knows of it.
PLACING = frozenset({"mesh_cast", "pvary", "reshard", "sharding_constraint"})
_REMAT = ("remat2", "checkpoint")
# Primitives of equinox and lineax whose parameters hold functions: what they compute is what their implementation
# does when it is traced. lineax's refuses to be traced inside a `jax.shard_map`, so it has to be opened.
_BY_IMPLEMENTATION = frozenset({"linear_solve", "maybe_set", "vprim"})


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
    again = (RECOMPUTED,) if in_remat and is_recomputed(eqn.source_info) else ()
    made_in = pass_of(eqn.source_info)
    return (made_in, *again) if made_in else again


def phase_of_equation(eqn: JaxprEqn, enclosing: str = "update") -> str:
    """The part of a step that an equation belongs to: "forward", "backward" or "update"."""
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


def body_of(eqn: JaxprEqn) -> tuple[Any, Sequence[int]] | None:
    """The jaxpr that an equation stands for and the positions of the operands that it takes; None: it is no call.

    Args:
        eqn: an equation.
    """
    name, everything = eqn.primitive.name, range(len(eqn.invars))
    parameter = _PARAMETER.get(name)
    if parameter in eqn.params:
        return eqn.params[parameter], everything
    if name == "custom_linear_solve":
        return _solve(eqn)
    if name in _BY_IMPLEMENTATION:
        traced = _implementation(eqn)
        return None if traced is None else (traced, everything)
    return None


def recomputes(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat whose body must stay apart from the first computation of the same values."""
    return is_differentiated_remat(eqn) and bool(eqn.params.get("prevent_cse", True))


def is_differentiated_remat(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat of the backward pass, whose body computes something again."""
    return eqn.primitive.name in _REMAT and bool(eqn.params.get("differentiated", True))


def without_shardings(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation, without what they say of the mesh that it was traced for.

    Values that have to do with a mesh of the user's own name it in their types and so in such parameters.
    """
    if eqn.primitive.name in PLACING:
        return dict(eqn.params)
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}


def _solve(eqn: JaxprEqn) -> tuple[Any, Sequence[int]]:
    """The solving program of `jax.lax.custom_linear_solve`: its constants lie third among those of four programs."""
    lengths = tuple(eqn.params["const_lengths"])
    starts = [0, *accumulate(lengths)]
    constants = range(starts[2], starts[3])
    return eqn.params["jaxprs"].solve, [*constants, *range(starts[-1], len(eqn.invars))]


def _implementation(eqn: JaxprEqn) -> Any:
    """The Python implementation of a primitive as a jaxpr; None where it wants concrete values."""
    implementation: Any = eqn.primitive.impl

    def run(*operands: Any) -> Any:
        return implementation(*operands, **eqn.params)

    try:
        traced = jax.make_jaxpr(run)(*shapes_of(eqn.invars))
    except (jax.errors.JAXTypeError, TypeError):
        return None
    wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]  # type: ignore[attr-defined]
    return traced if [(a.shape, a.dtype) for a in traced.out_avals] == wanted else None
