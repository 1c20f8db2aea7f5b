"""A function whose products take a factor as a sum of terms: what plans do that add up over devices after a product.

In finite numbers it is the function itself. Of a factor that is not finite the product with a term of zero is nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from autopar.frontend.equations import bind_equation, body_of, interpreted
from tests.end_to_end.compare import host

#: By primitive the operands in which it is linear, each alone.
_LINEAR = MappingProxyType({"mul": (0, 1), "div": (0,), "dot_general": (0, 1), "conv_general_dilated": (0, 1)})


def with_zero_terms(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with ``a * b + 0 * b + a * 0`` for every ``a * b`` that is not inside of a loop or branch."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), _results(closed, jax.tree.leaves(args)))

    return run


def not_finite_by_terms(fn: Callable[..., Any], args: Sequence[Any], got: Any, want: Any) -> Any:
    """``want`` with the nan of ``got`` where a term of zero makes nan of a value that is not finite.

    Args:
        fn: the function.
        args: its arguments.
        got: results of a plan.
        want: results of the function; leaves of the same shapes.
    """

    def leaf(g: Any, w: Any, t: Any) -> Any:
        if not jnp.issubdtype(w.dtype, jnp.inexact):
            return w
        g, w, t = (np.asarray(host(x)) for x in (g, w, t))
        return np.where(np.isnan(g) & np.isnan(t) & ~np.isfinite(w), g, w)

    return jax.tree.map(leaf, got, want, jax.jit(with_zero_terms(fn))(*args))


def _results(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Results of a jaxpr, closed or open (then without constants)."""
    inner, constants = (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())
    return interpreted(inner, [*constants, *values], "", _equation, lambda number: number)


def _equation(eqn: JaxprEqn, values: list[Any], where: str) -> Sequence[Any]:
    opened = body_of(eqn)
    if opened is not None:
        body, taken = opened
        return _results(body, [values[i] for i in taken])
    results = bind_equation(eqn, values, {})
    factors = _LINEAR.get(eqn.primitive.name, ())
    if not factors or not jnp.issubdtype(results[0].dtype, jnp.inexact):
        return results
    (total,) = results
    for i in factors:
        zero = [jnp.zeros_like(v) if n == i else v for n, v in enumerate(values)]
        total = total + bind_equation(eqn, zero, {})[0]
    return [total]
