"""Higher-order forms that a function of a matrix is put into, and the step that trains through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.forms.functions import SIZE

BATCH = 4
#: From a matrix to a number.
Scalar: TypeAlias = Callable[[Any], Any]

_TABLE = np.linspace(0.5, 1.5, SIZE)


def _body(f: Scalar) -> Callable[[Any], Any]:
    """From a matrix to a matrix, through the number."""
    return lambda c: c + 0.1 * jnp.tanh(f(c))


def _loop(f: Scalar, trips: int) -> Scalar:
    return lambda v: jnp.sum(lax.scan(lambda c, t: (_body(f)(c * t), jnp.sum(c)), v, jnp.ones(trips))[0])


def _while(f: Scalar) -> Scalar:
    body = _body(f)
    return lambda v: jnp.sum(lax.while_loop(lambda c: c[1] < 2, lambda c: (body(c[0]), c[1] + 1), (v, 0))[0])


def _ruled(f: Scalar) -> Scalar:
    @jax.custom_vjp
    def ruled(v: Any) -> Any:
        return f(v)

    ruled.defvjp(lambda v: (f(v), v), lambda v, g: (jnp.cos(v) * g,))
    return ruled


def _tangent(f: Scalar) -> Scalar:
    @jax.custom_jvp
    def ruled(v: Any) -> Any:
        return f(v)

    ruled.defjvp(lambda p, t: (f(*p), jnp.sum(jnp.cos(*p) * t[0])))
    return ruled


def _in_ref(f: Scalar) -> Scalar:
    def run(v: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(3))

        def body(i: Any, c: Any) -> Any:
            ref[i] = f(c)
            return _body(f)(c)

        lax.fori_loop(0, 3, body, v)
        return jnp.sum(ref[...])

    return run


FORMS: Mapping[str, Callable[[Scalar], Scalar]] = MappingProxyType(
    {
        "plain": lambda f: f,
        "helper with a constant": lambda f: jax.jit(lambda v: f(v * _TABLE)),
        "helper in a loop": lambda f: _loop(jax.jit(lambda v: f(v * _TABLE)), 2),
        "no trips": lambda f: _loop(f, 0),
        "one trip": lambda f: _loop(f, 1),
        "three trips": lambda f: _loop(f, 3),
        "while": _while,
        "branches": lambda f: lambda v: lax.cond(jnp.sum(v) > 0, f, lambda v: jnp.sum(jnp.sin(v)), v),
        "remat": lambda f: jax.checkpoint(f),
        "custom vjp": _ruled,
        "custom jvp": _tangent,
        "mapped": lambda f: lambda v: jnp.sum(jax.vmap(f)(jnp.stack([v, 2 * v]))),
        "reference": _in_ref,
        "empty": lambda f: lambda v: f(v) + jnp.sum(v[:0] @ v),
    }
)


def step_of(f: Scalar, form: str) -> Callable[..., Any]:
    """``(w, x) -> ...``: a training step where the form can be differentiated, else what it computes.

    Args:
        f: from a matrix to a number.
        form: a name in `FORMS`.
    """
    inner = FORMS[form](f)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(lambda v: inner(jnp.tanh(v @ w)))(x))

    def trained(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    try:
        jax.eval_shape(trained, *map(jax.typeof, arguments()))
    except Exception:  # jax has no derivative of it
        return lambda w, x: (w * 0.9, loss(w, x))
    return trained


def arguments() -> tuple[Any, Any]:
    """Weights and examples."""
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.standard_normal((SIZE, SIZE)) / 3), jnp.asarray(rng.standard_normal((BATCH, SIZE, SIZE)))
