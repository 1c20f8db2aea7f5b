"""Bodies of call-like primitives: the program that an equation stands for, where jax or its package says it.

An opened equation is planned operator by operator. One that is not opened runs whole on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from autopar.frontend.equations import shapes_of

# Primitives that are opened, with the parameter that holds their body.
_PARAMETER = MappingProxyType(
    {
        "jit": "jaxpr",
        "pjit": "jaxpr",
        "closed_call": "call_jaxpr",
        "core_call": "call_jaxpr",
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
