"""Parts of jaxprs that differ between versions of jax: constants, parameters of scans, mutable references.

`own_constant` copies a numpy constant, `scalar_of` reads a number from its text, `plain_params` gives the parameters
of a scan one form, and `discharged` makes a program without the references (`jax.new_ref`) that it makes. The walk
over equations is `autopar.frontend.equations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from autopar._compat.dtypes import numpy_dtype

_EFFECTS = ("InternalMutableArrayEffect", "AccumEffect", "ReadEffect", "RefEffect", "WriteEffect")


try:
    from jax._src.literals import TypedNdArray

    _NUMPY: Any = (np.ndarray, TypedNdArray)
except ImportError:
    _NUMPY = np.ndarray


def own_constant(value: Any) -> Any:
    """A constant of a jaxpr in a buffer of its own: the caller may fill his numpy array again, programs do not change.

    Args:
        value: of any type; what is no numpy array comes back as it is.
    """
    return np.array(value, value.dtype) if isinstance(value, _NUMPY) else value


def scalar_of(text: str, dtype: str) -> Any:
    """The numpy scalar of a number's text and the short name of its dtype."""
    return np.asarray(complex(text) if dtype.startswith("c") else _number(text), numpy_dtype(dtype))


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        return float(text)


def plain_params(primitive: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters with those of a scan said in one way on every jax: ``num_consts`` and ``num_carry``.

    Newer ones have trees instead: ``ft_in`` of constants, carry and rows, ``ft_out`` of carry and rows. What shape the
    trees have within says nothing about what is computed.

    Args:
        primitive: name of the equation's primitive.
        params: of the equation.
    """
    if primitive != "scan" or "ft_in" not in params:
        return params
    consts, carry, _ = params["ft_in"].unpack()
    kept = {k: v for k, v in params.items() if k not in ("ft_in", "ft_out")}
    return {**kept, "num_consts": len(consts), "num_carry": len(carry)}


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


def without_high_types(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose operators of high-level types, as `jax.remat` may leave one, are those on arrays that `jit` runs.

    Programs with such arguments, constants or results stay as they are, as all do where jax has another way.
    """
    from jax._src.interpreters import partial_eval

    lower = getattr(partial_eval, "lower_jaxpr2", None)
    outside = (*closed.in_avals, *closed.out_avals, *(v.aval for v in closed.jaxpr.constvars))
    if lower is None or any(getattr(aval, "is_high", False) for aval in outside):
        return closed
    low: ClosedJaxpr = lower(closed)
    return low


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
